"""List, attach and detach the servers of a run.

``megatron-dppo fleet RUN_DIRECTORY list|add|remove``.

``add URL`` attaches an SGLang server that was started elsewhere, and prints the result of the trainer's checks. If the
server passes, it generates for the run from the next weight update on. ``remove URL`` detaches a server at the next
update. Attached servers use the trainer's keys MEGATRON_DPPO_API_KEY and MEGATRON_DPPO_ADMIN_API_KEY. So ``add`` needs
MEGATRON_DPPO_ADMIN_API_KEY, with the run's value.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dppo.fleet.endpoint import RecordClient, record_of_command
from megatron_dppo.fleet.record import NOT_EXAMINED, FleetRecord, attachment_seal, states_of
from megatron_dppo.logging import aligned, fatal
from megatron_dppo.system.arguments import finite_number
from megatron_dppo.system.errors import RunError

_EXAMINATION_S = 60.0
"""Longest wait for the trainer's examination of a server, unless the command has ``--wait``."""
_POLL_S = 0.2
_NO_TRAINER = "no trainer listens now; the next trainer examines the server"
_Record = FleetRecord | RecordClient


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the process's exit code: 1 if a server is refused."""
    options = _parser().parse_args(arguments)
    try:
        if not Path(options.run_directory).is_dir():
            fatal(f"{options.run_directory}: expected the folder of a run (run.directory)")
        return _ACTIONS[options.action](record_of_command(options.run_directory), options)
    except (ValueError, OSError, RunError) as error:
        fatal(str(error))


def _list(record: _Record, options: argparse.Namespace) -> int:
    status = record.status()
    rows = [("NAME", "URL", "START", "STATE")]
    for server, state in states_of([*record.servers(), *record.teachers()], status):
        start = "attached"
        if server.replaceable:
            start = f"{server.incarnation}"
        rows.append((server.name, server.url, start, state))
    if (router := record.router()) is not None:
        rows.append((router.name, router.url, f"{router.incarnation}", ""))
    print("\n".join(aligned(rows)))
    if (version := status.get("version")) is not None:
        print(f"weight version {version}")
    return 0


def _add(record: _Record, options: argparse.Namespace) -> int:
    server = record.attach(options.url, attachment_seal(options.url))
    print(f"{server.name} is attached", flush=True)
    # ``record_of_command`` returns the registry itself, instead of a client, if the run is not running.
    if isinstance(record, FleetRecord):
        print(_NO_TRAINER)
        return 0
    state = _awaited_state(record, server.name, options.wait)
    print(state)
    return int(state.startswith("refused"))


def _awaited_state(record: RecordClient, name: str, wait_s: float) -> str:
    """Wait for the trainer's examination of a server, and return the text of its result."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        status = record.status()
        if not status:
            return _NO_TRAINER
        state = str(status["servers"].get(name, NOT_EXAMINED))
        if state != NOT_EXAMINED:
            return state
        time.sleep(_POLL_S)
    return "the trainer has not examined the server yet; the action list prints its state"


def _remove(record: _Record, options: argparse.Namespace) -> int:
    server = record.detach(options.url)
    print(f"{server.name} is detached; the run stops using it at the run's next weight update")
    return 0


_ACTIONS: dict[str, Callable[[_Record, argparse.Namespace], int]] = {
    "list": _list,
    "add": _add,
    "remove": _remove,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo fleet",
        description="List, attach and detach the SGLang servers of a run, while it runs.",
    )
    parser.add_argument("run_directory", help="run.directory of the run")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="print the servers and their states")
    add = actions.add_parser("add", help="attach a server, and print the result of its examination")
    add.add_argument("url", metavar="URL")
    add.add_argument(
        "--wait",
        type=finite_number(0),
        default=_EXAMINATION_S,
        metavar="SECONDS",
        help="seconds to wait for the result; default 60",
    )
    remove = actions.add_parser("remove", help="detach an attached server")
    remove.add_argument("url", metavar="URL")
    return parser


if __name__ == "__main__":
    sys.exit(main())
