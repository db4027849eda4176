"""``watch`` and ``stop``: a run looked at, and ended, from a login node or another terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.slurm.commands import slurm
from megatron_dppo.slurm.status import UNKNOWN, LocalRun, run_state, status_lines

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
        if not run_state(directory).alive:
            return
        time.sleep(every_s)


def stop(directory: Path) -> str:
    """Have a running job save a checkpoint and end, and a waiting one leave the queue; what was done.

    Raises LaunchError where nothing is there to be ended, or only on another machine.
    """
    run = run_state(directory)
    if isinstance(run, LocalRun):
        return _stop_here(run, directory)
    if run.job is None or not run.alive:
        raise LaunchError(f"{directory}: no job of this run runs or waits")
    if run.state == "PENDING":
        slurm("scancel", run.job)
        return f"job {run.job} is out of the queue; its checkpoints stay"
    slurm("scancel", "--batch", "--signal=USR2", run.job)
    return (
        f"job {run.job} was asked to end its step and save a checkpoint; "
        f"scancel {run.job} ends it within half a minute"
    )


def _stop_here(run: LocalRun, directory: Path) -> str:
    """As Ctrl-C in its own terminal."""
    if run.state == UNKNOWN:
        raise LaunchError(f"{directory}: {run.holder.describe()} can be stopped there alone")
    if not run.alive:
        raise LaunchError(f"{directory}: no process of this run is left")
    os.kill(run.holder.pid, signal.SIGINT)
    return (
        f"{run.holder.describe()} was asked to end its step and save a checkpoint; a second stop ends it at "
        "once"
    )
