"""Ask a run to save a checkpoint and end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.launch.run_state import UNKNOWN, LocalRun, require_run, run_state
from megatron_dppo.launch.slurm_client import slurm
from megatron_dppo.logging import fatal
from megatron_dppo.system.errors import RunError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was done; exit with status 2 and a message if nothing could be done."""
    parser = argparse.ArgumentParser(prog="megatron-dppo stop", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's folder (run.directory)")
    options = parser.parse_args(arguments)
    try:
        print(stop(require_run(options.run)))
    except RunError as error:
        fatal(str(error))
    return 0


def stop(directory: Path) -> str:
    """Ask a run to save a checkpoint and end, or remove its waiting job from the queue; return what was done.

    Raises LaunchError if nothing runs, or if the run is on another machine.
    """
    run = run_state(directory)
    if isinstance(run, LocalRun):
        return _stop_here(run, directory)
    if run.job is None or run.state is None:
        raise LaunchError(f"{directory}: no job of this run runs or waits")
    if run.state == "PENDING":
        slurm("scancel", run.job)
        return f"job {run.job} is out of the queue; its checkpoints stay"
    # Signal only the batch process: it asks the ranks to end their step. A signal to the ranks would kill them.
    slurm("scancel", "--batch", "--signal=USR2", run.job)
    return (
        f"job {run.job} was asked to end its step and save a checkpoint; "
        f"scancel {run.job} ends it within half a minute"
    )


def _stop_here(run: LocalRun, directory: Path) -> str:
    """Stop a local run as Ctrl-C in its own terminal does."""
    if run.state == UNKNOWN:
        raise LaunchError(
            f"{directory}: {run.holder.describe()} can be stopped only on its own machine"
        )
    if run.state is None:
        raise LaunchError(f"{directory}: no process of this run is left")
    os.kill(run.holder.pid, signal.SIGINT)
    return (
        f"{run.holder.describe()} was asked to end its step and save a checkpoint; a second stop ends it at "
        "once"
    )


if __name__ == "__main__":
    sys.exit(main())
