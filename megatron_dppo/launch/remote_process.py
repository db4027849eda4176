"""Run commands on this host for a supervisor on another host.

    ssh HOST python -m megatron_dppo.launch.remote_process

The supervisor starts this program through a remote shell, such as ssh. The first line of standard input is a JSON list
of commands (``RemoteCommand``). A later line ``stop`` makes this program send SIGTERM to the commands. When standard
input ends, the supervisor or the connection is gone: the program kills the commands and their descendants, and its exit
code is 1. Otherwise its exit code is the code of the first command that fails (128 + n for signal n), or 0.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dppo.system.processes import (
    adopt_orphans,
    describe_exit,
    kill_descendants,
    kill_families,
    start_fed,
)
from megatron_dppo.system.secret_variables import hide_secrets

MODULE = "megatron_dppo.launch.remote_process"
STOP = b"stop\n"
_POLL_S = 0.1
_SUPERVISOR_LOST = 1


@dataclass(frozen=True)
class RemoteCommand:
    """A command for another host.

    Attributes:
        command: program and arguments.
        environment: all of its variables, without keys.
        stdin: text of its standard input; may contain keys.
        log: file that its output is appended to, on the file system that the hosts share.
        folder: its working directory, on the file system that the hosts share.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    stdin: str
    log: str
    folder: str


def header(commands: Sequence[RemoteCommand]) -> bytes:
    """Return the first line of standard input for ``commands``."""
    return json.dumps([asdict(command) for command in commands]).encode() + b"\n"


def main() -> int:
    """Start the commands, wait until they have ended or the supervisor is gone, and return the exit code."""
    # The first line has the keys of the commands.
    hide_secrets()
    adopt_orphans()
    commands = [RemoteCommand(**values) for values in json.loads(_read_line())]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            os.chdir(command.folder)
            Path(command.log).parent.mkdir(parents=True, exist_ok=True)
            processes.append(
                start_fed(
                    command.command,
                    environment=command.environment,
                    log=Path(command.log),
                    stdin=command.stdin.encode(),
                )
            )
        return _wait(processes)
    finally:
        kill_families(processes)
        kill_descendants()


def _read_line() -> bytes:
    """Read one line of standard input, and nothing after it, so that ``select`` sees a later line."""
    line = b""
    while not line.endswith(b"\n"):
        character = os.read(0, 1)
        if not character:
            raise SystemExit(f"{MODULE}: expected a line of commands on standard input")
        line += character
    return line


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        for code in codes:
            if code:
                print(f"a command {describe_exit(code)}", flush=True)
                # 128 + n for signal n, as in a shell.
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if not readable:
            continue
        received = os.read(0, 64)
        if not received:
            print("the supervisor is gone", flush=True)
            return _SUPERVISOR_LOST
        if STOP.strip() in received:
            for process in processes:
                process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
