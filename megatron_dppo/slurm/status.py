"""``status``: where a run is, told from its folder, and from Slurm's queue or its own process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.expectations import given
from megatron_dppo.config.loading import load_config
from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.launch.run_directory import is_finished
from megatron_dppo.metrics import names
from megatron_dppo.metrics.records import (
    Record,
    RecordsError,
    mean_accuracy,
    read_records,
    step_of,
)
from megatron_dppo.metrics.summary import SUMMARY_FILE
from megatron_dppo.slurm.attempts import RUNNING, VANISHED, Attempt, AttemptBook, one_line
from megatron_dppo.slurm.commands import SlurmError, slurm
from megatron_dppo.slurm.run_logs import important_lines
from megatron_dppo.slurm.submission import JOB_FILE
from megatron_dppo.system.lease import LEASE_FILE, Holder, LeaseError, LeaseFiles

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

    @property
    def alive(self) -> bool:
        """Whether the job runs, or waits to, as far as is known."""
        return self.state is not None


@dataclass(frozen=True)
class LocalRun:
    """A run that was started without Slurm. ``holder``: of its lease; ``state``: RUNNING, ``UNKNOWN`` where its process
    is on another machine, None where it has ended; ``returned``: it gave the lease back at its end."""

    holder: Holder
    state: str | None
    returned: bool

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        return self.state is not None


def require_run(directory: str) -> Path:
    """The folder of a run. Raises LaunchError where there is none."""
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
    if job.alive:
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
    """The state of the run's newest job."""
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
    """The whole status, for people."""
    attempts, state = AttemptBook(directory).all(), run_state(directory)
    yield f"run: {directory}"
    if isinstance(state, LocalRun):
        yield f"state: {_local_state(state, directory)}"
    else:
        yield f"state: {state_of(state, attempts)}"
    yield from _progress(directory)
    yield from _servers(directory, running=state.state in ("RUNNING", RUNNING))
    yield from _attempts(attempts, alive=state.alive)
    lines = important_lines(directory, _LINES)
    if lines:
        yield "log lines that matter:"
        yield from (f"  {line}" for line in lines)


def _local_state(run: LocalRun, directory: Path) -> str:
    """The state in a line of a run without Slurm."""
    began = time.strftime("%m-%d %H:%M:%S", time.localtime(run.holder.taken))
    if run.state == RUNNING:
        return f"runs as {run.holder.describe()}, since {began}"
    if run.state == UNKNOWN:
        return f"started as {run.holder.describe()}, {began}, which can't be asked from here"
    if not run.returned:
        return f"ended: {VANISHED}; the same command resumes"
    try:
        is_done = is_finished(load_config(directory / "config.yaml"))
    except ConfigError:
        is_done = (directory / SUMMARY_FILE).is_file()
    return "ended: done" if is_done else "ended; the same command resumes"


def state_of(job: JobState, attempts: Sequence[Attempt]) -> str:
    """The run's state in a line."""
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
    saved = AttemptBook(directory).saved()
    yield f"last checkpoint: {'none' if saved is None else f'step {saved}'}"


def _of_steps(directory: Path) -> str:
    try:
        return f" of {load_config(directory / 'config.yaml').run.steps}"
    except ConfigError:
        return ""


def _figure(name: str, value: float | None, form: str) -> list[str]:
    return [] if value is None else [f"{name} {form.format(value)}"]


def _held_out(records: Sequence[Record]) -> list[str]:
    for found in reversed(records):
        if (accuracy := mean_accuracy(found)) is not None:
            return [f"held-out {accuracy:.3f} (step {step_of(found)})"]
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
