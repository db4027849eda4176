"""Print the state of a run: step, metrics, servers, starts and why each ended."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.loading import load_config
from megatron_dppo.fleet.record import ENGINE_FOLDER, FleetRecord, states_of
from megatron_dppo.launch.attempts import RUNNING, VANISHED, Attempt, AttemptBook
from megatron_dppo.launch.logs import important_lines
from megatron_dppo.launch.run_state import describe_state, require_run, run_state
from megatron_dppo.logging import INTERRUPTED, fatal
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import (
    Record,
    RecordsError,
    mean_accuracy,
    read_history,
    read_records,
    step_of,
)
from megatron_dppo.system.arguments import finite_number
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.text import single_line

_LOG_LINES = 8
_CLEAR_TERMINAL = "\033[H\033[2J"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the run's state; exit with status 2 and a message if the run does not exist."""
    parser = argparse.ArgumentParser(prog="megatron-dppo status", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's folder (run.directory)")
    parser.add_argument("--follow", action="store_true", help="print it until the run has ended")
    parser.add_argument(
        "--every", type=finite_number(0.1), default=10.0, help="seconds between two looks"
    )
    options = parser.parse_args(arguments)
    try:
        directory = require_run(options.run)
        if options.follow:
            follow(directory, options.every)
        else:
            print("\n".join(status_lines(directory)))
    except RunError as error:
        fatal(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def status_lines(directory: Path) -> Iterator[str]:
    """Yield the lines of the status of the run in ``directory``."""
    attempts = AttemptBook(directory).all()
    state = run_state(directory)
    yield f"run: {directory}"
    yield f"state: {describe_state(state, attempts, directory)}"
    yield from _progress(directory)
    # Slurm writes the state in capitals.
    is_running = state.state in ("RUNNING", RUNNING)
    yield from _servers(directory, is_running=is_running)
    yield from _attempts(attempts, is_alive=state.state is not None)
    lines = important_lines(directory, _LOG_LINES)
    if lines:
        yield "log lines that matter:"
        yield from (f"  {line}" for line in lines)


def _progress(directory: Path) -> Iterator[str]:
    try:
        records = read_records(directory)
    except (OSError, RecordsError):
        records = []
    if not records:
        yield "step: none yet"
        return
    last_record = records[-1]
    parts = [f"step: {step_of(last_record)}{_of_steps(directory)}"]
    parts += _figure("reward", last_record.get(metric_names.REWARD), "{:.3f}")
    parts += _held_out(records)
    parts += _figure("tokens/s", last_record.get(metric_names.TOKENS_PER_SECOND), "{:,.0f}")
    yield ", ".join(parts)
    saved = read_history(directory).saved_step
    yield f"last checkpoint: {'none' if saved is None else f'step {saved}'}"


def _of_steps(directory: Path) -> str:
    try:
        return f" of {load_config(directory / 'config.yaml').run.steps}"
    except ConfigError:
        return ""


def _figure(name: str, value: float | None, form: str) -> list[str]:
    """Return the name and the formatted value; nothing for None."""
    if value is None:
        return []
    return [f"{name} {form.format(value)}"]


def _held_out(records: Sequence[Record]) -> list[str]:
    for record in reversed(records):
        accuracy = mean_accuracy(record)
        if accuracy is not None:
            return [f"held-out {accuracy:.3f} (step {step_of(record)})"]
    return []


def _servers(directory: Path, *, is_running: bool) -> Iterator[str]:
    if not is_running or not (directory / ENGINE_FOLDER).is_dir():
        return
    record = FleetRecord(directory)
    for server, state in states_of([*record.servers(), *record.teachers()], record.status()):
        start = ""
        if server.incarnation > 1:
            start = f", start {server.incarnation}"
        yield f"{server.name}: {server.url}, {state}{start}"
    router = record.router()
    if router is not None:
        yield f"router: {router.url}"
    if record.ranks_start is not None and record.ranks_start > 1:
        yield f"ranks: start {record.ranks_start}"


def _attempts(attempts: Sequence[Attempt], *, is_alive: bool) -> Iterator[str]:
    if attempts:
        yield "starts:"
    for attempt in attempts:
        start_time = time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.started))
        has_recorded_end = attempt.why != RUNNING
        outcome = attempt.why
        may_run = is_alive and attempt is attempts[-1]
        if not has_recorded_end and not may_run:
            outcome = VANISHED
        lasted = ""
        if attempt.ended is not None:
            lasted = f" after {attempt.ended - attempt.started:.0f} s"
        name = f"{attempt.job}-{attempt.attempt}"
        parts = [f"  {name}  {start_time}  {attempt.node}  {outcome}{lasted}"]
        if has_recorded_end:
            parts.append(f"checkpoint {attempt.first_saved} -> {attempt.saved}")
        parts += [f"left out {node} ({reason})" for node, reason in attempt.excluded]
        if attempt.detail:
            parts.append(single_line(attempt.detail, 160))
        yield ", ".join(parts)


def follow(directory: Path, every_s: float) -> None:
    """Print the status repeatedly until the run has ended; outside a terminal, only when it changes."""
    shown_text = ""
    while True:
        text = "\n".join(status_lines(directory))
        if sys.stdout.isatty():
            print(f"{_CLEAR_TERMINAL}{text}", flush=True)
        elif text != shown_text:
            print(f"{text}\n", flush=True)
        shown_text = text
        if run_state(directory).state is None:
            return
        time.sleep(every_s)


if __name__ == "__main__":
    sys.exit(main())
