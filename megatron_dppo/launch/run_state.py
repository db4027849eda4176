"""The state of a run: the state of its job in Slurm's queue, or of its process on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.errors import ConfigError, given
from megatron_dppo.config.loading import load_config
from megatron_dppo.launch.attempts import JOB_FILE, RUNNING, VANISHED, Attempt, AttemptBook
from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.launch.run_directory import is_finished
from megatron_dppo.launch.slurm_client import SlurmError, slurm
from megatron_dppo.metrics.records import CONFIG_FILE, SUMMARY_FILE
from megatron_dppo.system.lease import LEASE_FILE, Holder, LeaseError, LeaseFiles
from megatron_dppo.system.text import single_line

UNKNOWN = "UNKNOWN"
"""State of a job if Slurm does not answer."""
_FORGOTTEN_JOB = "Invalid job id"
"""Part of squeue's error message for a job that ended some minutes ago."""
_FINAL_ENDINGS = {"done", "asked", "cancelled", "refused", "succeeded"}
"""Values of ``Attempt.why`` after which submitting the run again is not suggested."""


@dataclass(frozen=True)
class JobState:
    """State of a job in squeue.

    ``state`` is None if squeue does not know the job, and ``UNKNOWN`` if squeue fails, with its message as ``reason``.
    """

    job: str | None
    state: str | None
    reason: str = ""


@dataclass(frozen=True)
class LocalRun:
    """A run that was started without Slurm.

    ``holder`` is the last process that held the run's lease. ``state`` is None if the holder has ended. Otherwise it is
    RUNNING, or ``UNKNOWN`` for a holder on another machine. ``has_released``: whether the holder released the lease.
    """

    holder: Holder
    state: str | None
    has_released: bool


def require_run(directory: str) -> Path:
    """Return the path of a run's folder. Raises LaunchError if ``directory`` is not the folder of a run."""
    path = Path(directory)
    try:
        is_run = any((path / name).is_file() for name in (JOB_FILE, LEASE_FILE))
    except (OSError, ValueError) as error:
        # The path is too long, has a NUL or must not be read.
        raise LaunchError(f"{given(directory)}: {getattr(error, 'strerror', error)}") from error
    if not is_run:
        raise LaunchError(f"{directory}: expected the folder of a run (run.directory)")
    return path


def run_state(directory: Path) -> JobState | LocalRun:
    """Return the state of the run's newest job, or of its last start without Slurm if no job is in the queue.

    Raises LaunchError if the run's lease can't be read.
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
    has_released = beat is not None and beat.ended
    is_same_machine = holder.is_neighbour(Holder.of_this_process())
    state: str | None = UNKNOWN
    if has_released:
        state = None
    elif is_same_machine:
        state = RUNNING if holder.runs() else None
    return LocalRun(holder, state, has_released)


def job_state(directory: Path, attempts: Sequence[Attempt]) -> JobState:
    """Return the state of the job that was submitted last.

    If no submission was recorded, return the state of the last attempt's job.
    """
    file = directory / JOB_FILE
    job = None
    if file.is_file():
        job = file.read_text(encoding="utf-8").strip()
    if job is None and attempts:
        job = attempts[-1].job
    if job is None:
        return JobState(None, None)
    try:
        # %T is the state, %r the reason for it.
        squeue_fields = slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T %r").split()
    except SlurmError as error:
        if _FORGOTTEN_JOB in str(error):
            return JobState(job, None)
        return JobState(job, UNKNOWN, single_line(str(error)))
    if not squeue_fields:
        return JobState(job, None)
    state, *reason_words = squeue_fields
    return JobState(job, state, " ".join(reason_words))


def state_text(directory: Path) -> str:
    """Return the run's state in words. Raises LaunchError if the run's lease can't be read."""
    return describe_state(run_state(directory), AttemptBook(directory).all(), directory)


def describe_state(state: JobState | LocalRun, attempts: Sequence[Attempt], directory: Path) -> str:
    """Return ``state`` in words."""
    if isinstance(state, LocalRun):
        return _describe_local(state, directory)
    return describe_job(state, attempts)


def _describe_local(run: LocalRun, directory: Path) -> str:
    start_time = time.strftime("%m-%d %H:%M:%S", time.localtime(run.holder.taken))
    if run.state == RUNNING:
        return f"runs as {run.holder.describe()}, since {start_time}"
    if run.state == UNKNOWN:
        return f"started as {run.holder.describe()}, {start_time}, which can't be asked from here"
    if not run.has_released:
        return f"ended: {VANISHED}; the same command resumes"
    try:
        is_done = is_finished(load_config(directory / CONFIG_FILE), directory)
    except ConfigError:
        is_done = (directory / SUMMARY_FILE).is_file()
    if is_done:
        return "ended: done"
    return "ended; the same command resumes"


def describe_job(job: JobState, attempts: Sequence[Attempt]) -> str:
    """Return the state of a job in words, with the run's last attempt."""
    last_attempt = attempts[-1] if attempts else None
    if job.state == "PENDING":
        reason = f" ({job.reason})" if job.reason else ""
        restart_text = ""
        if last_attempt is not None:
            restart_text = f", to start again after: {last_attempt.why}"
        return f"job {job.job} waits{reason}{restart_text}"
    if job.state == UNKNOWN:
        return f"job {job.job}: Slurm can't be asked: {job.reason}"
    if job.state is not None:
        count = ""
        if last_attempt is not None:
            # Attempts are counted from 0.
            count = f", start {last_attempt.attempt + 1}"
        node_text = ""
        if last_attempt is not None and last_attempt.why == RUNNING:
            node_text = f" on {last_attempt.node}"
        return f"job {job.job} is {job.state.lower()}{node_text}{count}"
    if last_attempt is None:
        return f"job {job.job} is gone and never started"
    why = VANISHED if last_attempt.why == RUNNING else last_attempt.why
    if why in _FINAL_ENDINGS:
        return f"ended: {why}"
    return f"ended: {why}; submit it again to resume"
