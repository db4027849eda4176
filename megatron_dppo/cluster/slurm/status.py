"""``status``, ``watch``, ``logs``, ``stop``: where a run is, by its folder, the queue or its process, and its end."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.cluster.slurm.attempts import (
    JOB_FILE,
    RUNNING,
    VANISHED,
    Attempt,
    AttemptBook,
    one_line,
)
from megatron_dppo.cluster.slurm.commands import SlurmError, slurm
from megatron_dppo.config.errors import ConfigError, given
from megatron_dppo.config.loading import load_config
from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.launch.run_directory import is_finished
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import (
    CONFIG_FILE,
    SUMMARY_FILE,
    Record,
    RecordsError,
    mean_accuracy,
    read_history,
    read_records,
    step_of,
)
from megatron_dppo.system.lease import LEASE_FILE, Holder, LeaseError, LeaseFiles
from megatron_dppo.system.processes import tail

# The logs of a run: which there are, and the lines in them that matter.

_LOOK_BACK = 400
_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[\w+\] (\w+) ")
_MATTERS = {"WARNING", "ERROR", "CRITICAL"}
_FOR_AUTHORS = re.compile(r" py\.warnings: .*(Deprecation|Future)Warning")
_TOLD = ("supervisor.log", "rank0.log")


def log_lines(directory: Path, name: str | None, count: int) -> list[str]:
    """The last ``count`` lines of a log: of the newest file whose name begins with ``name``, such as ``rank3``; None:
    of supervisor and rank 0, by their times.

    Raises LaunchError where there is no such log; it names those that there are.
    """
    folder = directory / "logs"
    if name is None:
        return merged([folder / file for file in _TOLD], count)
    named = re.compile(rf"{re.escape(name)}(?!\d)")  # rank1 is not rank12
    paths = (path for path in folder.glob("*") if named.match(path.name))
    logs = sorted(paths, key=lambda path: path.stat().st_mtime)
    if not logs:
        names = ", ".join(sorted(path.name for path in folder.glob("*"))) or "none"
        raise LaunchError(f"{folder}: no log begins with {name!r}; there are: {names}")
    return [f"# {logs[-1]}", *tail(logs[-1], count).splitlines()]


def important_lines(directory: Path, count: int) -> list[str]:
    """The last warnings and errors of supervisor and rank 0, each with its further lines left out; without
    what Python tells the authors of libraries."""
    lines = merged([directory / "logs" / file for file in _TOLD], _LOOK_BACK)
    return [line for line in lines if _matters(line)][-count:]


def _matters(line: str) -> bool:
    match = _LINE.match(line)
    return match is not None and match[1] in _MATTERS and not _FOR_AUTHORS.search(line)


def merged(paths: Sequence[Path], count: int) -> list[str]:
    """The last ``count`` lines of several logs together, records in the order of their times."""
    records = [record for path in paths for record in _records(path)]
    lines = [line for record in sorted(records, key=lambda record: record[0]) for line in record]
    return lines[-count:]


def _records(path: Path) -> Iterator[list[str]]:
    """Records of a log, each with the lines that belong to it."""
    record: list[str] = []
    for line in tail(path, _LOOK_BACK).splitlines():
        if _LINE.match(line) and record:
            yield record
            record = []
        record.append(line)
    if record:
        yield record


UNKNOWN = "UNKNOWN"
"""State of a job of which Slurm can't be asked now."""
_FORGOTTEN = "Invalid job id"
"""In what squeue says of a job some minutes after its end."""
_ENDED = {"done", "asked", "cancelled", "refused", "succeeded"}
_LINES = 8


@dataclass(frozen=True)
class JobState:
    """What squeue says of a job. ``state``: None where it knows none, ``UNKNOWN`` where it can't say, with
    the ``reason``."""

    job: str | None
    state: str | None
    reason: str = ""


@dataclass(frozen=True)
class LocalRun:
    """A run that was started without Slurm. ``holder``: of its lease; ``state``: RUNNING, ``UNKNOWN`` where its process
    is on another machine, None where it has ended; ``returned``: it gave the lease back at its end."""

    holder: Holder
    state: str | None
    returned: bool


def require_run(directory: str) -> Path:
    path = Path(directory)
    try:
        is_run = any((path / name).is_file() for name in (JOB_FILE, LEASE_FILE))
    except (OSError, ValueError) as error:  # too long, no permission, a NUL
        raise LaunchError(f"{given(directory)}: {getattr(error, 'strerror', error)}") from error
    if not is_run:
        raise LaunchError(f"{directory}: expected the folder of a run (run.directory)")
    return path


def run_state(directory: Path) -> JobState | LocalRun:
    """The state of the run's newest job, or where none is in the queue of its last start without Slurm.

    Raises LaunchError where its lease can't be read.
    """
    job = job_state(directory, AttemptBook(directory).all())
    if job.state is not None:
        return job
    files = LeaseFiles(directory)
    try:
        holder = files.holder()
    except (LeaseError, OSError) as error:
        raise LaunchError(str(error)) from error
    if holder is None or holder.job is not None:
        return job
    beat = files.beat(holder)
    returned = beat is not None and beat.ended
    here = holder.is_neighbour(Holder.of_this_process())
    lives = RUNNING if holder.runs() else None
    return LocalRun(holder, None if returned else lives if here else UNKNOWN, returned)


def job_state(directory: Path, attempts: Sequence[Attempt]) -> JobState:
    file = directory / JOB_FILE
    job = file.read_text(encoding="utf-8").strip() if file.is_file() else None
    if job is None and attempts:
        job = attempts[-1].job
    if job is None:
        return JobState(None, None)
    try:
        shown = slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T %r").split()
    except SlurmError as error:
        if _FORGOTTEN in str(error):
            return JobState(job, None)
        return JobState(job, UNKNOWN, one_line(str(error)))
    return JobState(job, shown[0] if shown else None, " ".join(shown[1:]))


def status_lines(directory: Path) -> Iterator[str]:
    attempts, state = AttemptBook(directory).all(), run_state(directory)
    yield f"run: {directory}"
    yield f"state: {_described(state, attempts, directory)}"
    yield from _progress(directory)
    yield from _servers(directory, running=state.state in ("RUNNING", RUNNING))
    yield from _attempts(attempts, alive=state.state is not None)
    lines = important_lines(directory, _LINES)
    if lines:
        yield "log lines that matter:"
        yield from (f"  {line}" for line in lines)


def state_text(directory: Path) -> str:
    """The run's state in words. Raises LaunchError as ``run_state``."""
    return _described(run_state(directory), AttemptBook(directory).all(), directory)


def _described(state: JobState | LocalRun, attempts: Sequence[Attempt], directory: Path) -> str:
    if isinstance(state, LocalRun):
        return _local_state(state, directory)
    return state_of(state, attempts)


def _local_state(run: LocalRun, directory: Path) -> str:
    began = time.strftime("%m-%d %H:%M:%S", time.localtime(run.holder.taken))
    if run.state == RUNNING:
        return f"runs as {run.holder.describe()}, since {began}"
    if run.state == UNKNOWN:
        return f"started as {run.holder.describe()}, {began}, which can't be asked from here"
    if not run.returned:
        return f"ended: {VANISHED}; the same command resumes"
    try:
        is_done = is_finished(load_config(directory / CONFIG_FILE))
    except ConfigError:
        is_done = (directory / SUMMARY_FILE).is_file()
    return "ended: done" if is_done else "ended; the same command resumes"


def state_of(job: JobState, attempts: Sequence[Attempt]) -> str:
    last = attempts[-1] if attempts else None
    if job.state == "PENDING":
        reason = f" ({job.reason})" if job.reason else ""
        again = f", to start again after: {last.why}" if last is not None else ""
        return f"job {job.job} waits{reason}{again}"
    if job.state == UNKNOWN:
        return f"job {job.job}: Slurm can't be asked: {job.reason}"
    if job.state is not None:
        count = f", start {last.attempt + 1}" if last is not None else ""
        where = f" on {last.node}" if last is not None and last.why == RUNNING else ""
        return f"job {job.job} is {job.state.lower()}{where}{count}"
    if last is None:
        return f"job {job.job} is gone and never started"
    why = VANISHED if last.why == RUNNING else last.why
    return f"ended: {why}" + ("" if why in _ENDED else "; submit it again to resume")


def _progress(directory: Path) -> Iterator[str]:
    try:
        records = read_records(directory)
    except (OSError, RecordsError):
        records = []
    if not records:
        yield "step: none yet"
        return
    last = records[-1]
    parts = [f"step: {step_of(last)}{_of_steps(directory)}"]
    parts += _figure("reward", last.get(names.REWARD), "{:.3f}")
    parts += _held_out(records)
    parts += _figure("tokens/s", last.get(names.TOKENS_PER_SECOND), "{:,.0f}")
    yield ", ".join(parts)
    saved = read_history(directory).saved
    yield f"last checkpoint: {'none' if saved is None else f'step {saved}'}"


def _of_steps(directory: Path) -> str:
    try:
        return f" of {load_config(directory / 'config.yaml').run.steps}"
    except ConfigError:
        return ""


def _figure(name: str, value: float | None, form: str) -> list[str]:
    return [] if value is None else [f"{name} {form.format(value)}"]


def _held_out(records: Sequence[Record]) -> list[str]:
    for record in reversed(records):
        if (accuracy := mean_accuracy(record)) is not None:
            return [f"held-out {accuracy:.3f} (step {step_of(record)})"]
    return []


def _servers(directory: Path, *, running: bool) -> Iterator[str]:
    if not running or not (directory / "engine").is_dir():
        return
    record = FleetRecord(directory)
    states = record.status().get("servers", {})
    for server in record.servers():
        start = f", start {server.incarnation}" if server.incarnation > 1 else ""
        yield f"{server.name}: {server.url}, {states.get(server.name, 'not yet seen')}{start}"
    if (router := record.router()) is not None:
        yield f"router: {router.url}"


def _attempts(attempts: Sequence[Attempt], *, alive: bool) -> Iterator[str]:
    if attempts:
        yield "starts:"
    for attempt in attempts:
        began = time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.started))
        vanished = attempt.why == RUNNING and not (alive and attempt is attempts[-1])
        why = VANISHED if vanished else attempt.why
        lasted = "" if attempt.ended is None else f" after {attempt.ended - attempt.started:.0f} s"
        parts = [f"  {attempt.job}-{attempt.attempt}  {began}  {attempt.node}  {why}{lasted}"]
        parts += [f"checkpoint {attempt.first_saved} -> {attempt.saved}"] * (attempt.why != RUNNING)
        parts += [f"left out {node} ({reason})" for node, reason in attempt.excluded]
        parts += [one_line(attempt.detail, 160)] * bool(attempt.detail)
        yield ", ".join(parts)


# ``watch`` and ``stop``: a run looked at, and ended, from a login node or another terminal.

_CLEAR = "\033[H\033[2J"


def watch(directory: Path, every_s: float) -> None:
    """Show the status again and again until it has ended. On no terminal, only when it changes."""
    shown = ""
    while True:
        text = "\n".join(status_lines(directory))
        if sys.stdout.isatty():
            print(f"{_CLEAR}{text}", flush=True)
        elif text != shown:
            print(f"{text}\n", flush=True)
        shown = text
        if run_state(directory).state is None:
            return
        time.sleep(every_s)


def stop(directory: Path) -> str:
    """Have a running job save a checkpoint and end, and a waiting one leave the queue; what was done.

    Raises LaunchError where nothing is there to be ended, or only on another machine.
    """
    run = run_state(directory)
    if isinstance(run, LocalRun):
        return _stop_here(run, directory)
    if run.job is None or run.state is None:
        raise LaunchError(f"{directory}: no job of this run runs or waits")
    if run.state == "PENDING":
        slurm("scancel", run.job)
        return f"job {run.job} is out of the queue; its checkpoints stay"
    # The batch process alone: it lets the ranks end their step, which would die of the signal.
    slurm("scancel", "--batch", "--signal=USR2", run.job)
    return (
        f"job {run.job} was asked to end its step and save a checkpoint; "
        f"scancel {run.job} ends it within half a minute"
    )


def _stop_here(run: LocalRun, directory: Path) -> str:
    """As Ctrl-C in its own terminal."""
    if run.state == UNKNOWN:
        raise LaunchError(f"{directory}: {run.holder.describe()} can be stopped there alone")
    if run.state is None:
        raise LaunchError(f"{directory}: no process of this run is left")
    os.kill(run.holder.pid, signal.SIGINT)
    return (
        f"{run.holder.describe()} was asked to end its step and save a checkpoint; a second stop ends it at "
        "once"
    )
