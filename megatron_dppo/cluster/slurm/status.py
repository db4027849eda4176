"""``status``, ``watch``, ``logs``, ``stop``: the state of a run, from its folder, the queue or its process, and its
end.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
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

_LOOK_BACK = 400
_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[\w+\] (\w+) ")
_MATTERS = {"WARNING", "ERROR", "CRITICAL"}
_FOR_AUTHORS = re.compile(r" py\.warnings: .*(Deprecation|Future)Warning")
_TOLD = ("supervisor.log", "rank0.log")


def log_lines(directory: Path, name: str | None, count: int) -> list[str]:
    """Return the last ``count`` lines of the newest log whose name begins with ``name``, such as ``rank3``.

    ``name`` None: the logs of supervisor and rank 0, merged by time. Raises LaunchError, with the names of the existing
    logs, where there is no such log.
    """
    folder = directory / "logs"
    if name is None:
        return merged([folder / file for file in _TOLD], count)
    name_pattern = re.compile(rf"{re.escape(name)}(?!\d)")  # rank1 is not rank12
    paths = (path for path in folder.glob("*") if name_pattern.match(path.name))
    logs = sorted(paths, key=lambda path: path.stat().st_mtime)
    if not logs:
        names = ", ".join(sorted(path.name for path in folder.glob("*"))) or "none"
        raise LaunchError(f"{folder}: no log begins with {name!r}; there are: {names}")
    return [f"# {logs[-1]}", *tail(logs[-1], count).splitlines()]


def important_lines(directory: Path, count: int) -> list[str]:
    """Return the last warnings and errors of supervisor and rank 0, the first line of each.

    Python's warnings for authors of libraries are left out.
    """
    lines = merged([directory / "logs" / file for file in _TOLD], _LOOK_BACK)
    return [line for line in lines if _matters(line)][-count:]


def _matters(line: str) -> bool:
    match = _LINE.match(line)
    return match is not None and match[1] in _MATTERS and not _FOR_AUTHORS.search(line)


def merged(paths: Sequence[Path], count: int) -> list[str]:
    """Return the last ``count`` lines of several logs, their records in the order of time."""
    records: list[list[str]] = []
    for path in paths:
        records += _records(path)
    lines: list[str] = []
    for record in sorted(records, key=itemgetter(0)):
        lines += record
    return lines[-count:]


def _records(path: Path) -> Iterator[list[str]]:
    """Yield the records of a log, each with its further lines."""
    record: list[str] = []
    for line in tail(path, _LOOK_BACK).splitlines():
        if _LINE.match(line) and record:
            yield record
            record = []
        record.append(line)
    if record:
        yield record


UNKNOWN = "UNKNOWN"
"""State of a job where Slurm does not answer."""
_FORGOTTEN = "Invalid job id"
"""Text of squeue for a job some minutes after its end."""
_ENDED = {"done", "asked", "cancelled", "refused", "succeeded"}
_LINES = 8


@dataclass(frozen=True)
class JobState:
    """State of a job in squeue.

    ``state`` is None where squeue does not know the job, ``UNKNOWN`` where it can't tell, with the ``reason``.
    """

    job: str | None
    state: str | None
    reason: str = ""


@dataclass(frozen=True)
class LocalRun:
    """A run that was started without Slurm.

    ``holder`` holds its lease. ``state`` is RUNNING, ``UNKNOWN`` where its process is on another machine, None where it
    has ended. ``returned`` tells that it released the lease at its end.
    """

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
    """Return the state of the run's newest job, or of its last start without Slurm where no job is in the queue.

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
    is_same_machine = holder.is_neighbour(Holder.of_this_process())
    lives = RUNNING if holder.runs() else None
    return LocalRun(holder, None if returned else lives if is_same_machine else UNKNOWN, returned)


def job_state(directory: Path, attempts: Sequence[Attempt]) -> JobState:
    file = directory / JOB_FILE
    job = file.read_text(encoding="utf-8").strip() if file.is_file() else None
    if job is None and attempts:
        job = attempts[-1].job
    if job is None:
        return JobState(None, None)
    try:
        squeue_fields = slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T %r").split()
    except SlurmError as error:
        if _FORGOTTEN in str(error):
            return JobState(job, None)
        return JobState(job, UNKNOWN, one_line(str(error)))
    return JobState(job, squeue_fields[0] if squeue_fields else None, " ".join(squeue_fields[1:]))


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
    """Return the run's state in words. Raises LaunchError as ``run_state``."""
    return _described(run_state(directory), AttemptBook(directory).all(), directory)


def _described(state: JobState | LocalRun, attempts: Sequence[Attempt], directory: Path) -> str:
    if isinstance(state, LocalRun):
        return _local_state(state, directory)
    return state_of(state, attempts)


def _local_state(run: LocalRun, directory: Path) -> str:
    start_time = time.strftime("%m-%d %H:%M:%S", time.localtime(run.holder.taken))
    if run.state == RUNNING:
        return f"runs as {run.holder.describe()}, since {start_time}"
    if run.state == UNKNOWN:
        return f"started as {run.holder.describe()}, {start_time}, which can't be asked from here"
    if not run.returned:
        return f"ended: {VANISHED}; the same command resumes"
    try:
        is_done = is_finished(load_config(directory / CONFIG_FILE))
    except ConfigError:
        is_done = (directory / SUMMARY_FILE).is_file()
    return "ended: done" if is_done else "ended; the same command resumes"


def state_of(job: JobState, attempts: Sequence[Attempt]) -> str:
    last_attempt = attempts[-1] if attempts else None
    if job.state == "PENDING":
        reason = f" ({job.reason})" if job.reason else ""
        restart_text = (
            f", to start again after: {last_attempt.why}" if last_attempt is not None else ""
        )
        return f"job {job.job} waits{reason}{restart_text}"
    if job.state == UNKNOWN:
        return f"job {job.job}: Slurm can't be asked: {job.reason}"
    if job.state is not None:
        count = f", start {last_attempt.attempt + 1}" if last_attempt is not None else ""
        node_text = (
            f" on {last_attempt.node}"
            if last_attempt is not None and last_attempt.why == RUNNING
            else ""
        )
        return f"job {job.job} is {job.state.lower()}{node_text}{count}"
    if last_attempt is None:
        return f"job {job.job} is gone and never started"
    why = VANISHED if last_attempt.why == RUNNING else last_attempt.why
    return f"ended: {why}" + ("" if why in _ENDED else "; submit it again to resume")


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
    parts += _figure("reward", last_record.get(names.REWARD), "{:.3f}")
    parts += _held_out(records)
    parts += _figure("tokens/s", last_record.get(names.TOKENS_PER_SECOND), "{:,.0f}")
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
        start_time = time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.started))
        vanished = attempt.why == RUNNING and not (alive and attempt is attempts[-1])
        why = VANISHED if vanished else attempt.why
        lasted = "" if attempt.ended is None else f" after {attempt.ended - attempt.started:.0f} s"
        parts = [f"  {attempt.job}-{attempt.attempt}  {start_time}  {attempt.node}  {why}{lasted}"]
        parts += [f"checkpoint {attempt.first_saved} -> {attempt.saved}"] * (attempt.why != RUNNING)
        parts += [f"left out {node} ({reason})" for node, reason in attempt.excluded]
        parts += [one_line(attempt.detail, 160)] * bool(attempt.detail)
        yield ", ".join(parts)


_CLEAR = "\033[H\033[2J"


def watch(directory: Path, every_s: float) -> None:
    """Print the status repeatedly until the run has ended; outside a terminal, only when it changes."""
    shown_text = ""
    while True:
        text = "\n".join(status_lines(directory))
        if sys.stdout.isatty():
            print(f"{_CLEAR}{text}", flush=True)
        elif text != shown_text:
            print(f"{text}\n", flush=True)
        shown_text = text
        if run_state(directory).state is None:
            return
        time.sleep(every_s)


def stop(directory: Path) -> str:
    """Ask a running job to save a checkpoint and end, and remove a waiting one; return what was done.

    Raises LaunchError where nothing runs, or only on another machine.
    """
    run = run_state(directory)
    if isinstance(run, LocalRun):
        return _stop_here(run, directory)
    if run.job is None or run.state is None:
        raise LaunchError(f"{directory}: no job of this run runs or waits")
    if run.state == "PENDING":
        slurm("scancel", run.job)
        return f"job {run.job} is out of the queue; its checkpoints stay"
    # Signal only the batch process: it lets the ranks end their step, and the signal would kill them.
    slurm("scancel", "--batch", "--signal=USR2", run.job)
    return (
        f"job {run.job} was asked to end its step and save a checkpoint; "
        f"scancel {run.job} ends it within half a minute"
    )


def _stop_here(run: LocalRun, directory: Path) -> str:
    """Stop a local run as Ctrl-C in its own terminal does."""
    if run.state == UNKNOWN:
        raise LaunchError(f"{directory}: {run.holder.describe()} can be stopped there alone")
    if run.state is None:
        raise LaunchError(f"{directory}: no process of this run is left")
    os.kill(run.holder.pid, signal.SIGINT)
    return (
        f"{run.holder.describe()} was asked to end its step and save a checkpoint; a second stop ends it at "
        "once"
    )
