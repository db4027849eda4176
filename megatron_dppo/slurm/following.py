"""``watch`` and ``stop``: a run on Slurm looked at, and ended, from a login node."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.slurm.attempts import AttemptBook
from megatron_dppo.slurm.commands import slurm
from megatron_dppo.slurm.status import job_state, status_lines

_CLEAR = "\033[H\033[2J"


def watch(directory: Path, every_s: float) -> None:
    """Show the status again and again until the job is gone. On no terminal, only when it changes."""
    shown = ""
    while True:
        text = "\n".join(status_lines(directory))
        if sys.stdout.isatty():
            print(f"{_CLEAR}{text}", flush=True)
        elif text != shown:
            print(f"{text}\n", flush=True)
        shown = text
        if not job_state(directory, AttemptBook(directory).all()).alive:
            return
        time.sleep(every_s)


def stop(directory: Path) -> str:
    """Have a running job save a checkpoint and end, and a waiting one leave the queue; what was done.

    Raises LaunchError where no job is there to be ended.
    """
    job = job_state(directory, AttemptBook(directory).all())
    if job.job is None or not job.alive:
        raise LaunchError(f"{directory}: no job of this run runs or waits")
    if job.state == "PENDING":
        slurm("scancel", job.job)
        return f"job {job.job} is out of the queue; its checkpoints stay"
    slurm("scancel", "--batch", "--signal=USR2", job.job)
    return (
        f"job {job.job} was asked to end its step and save a checkpoint; "
        f"scancel {job.job} ends it within half a minute"
    )
