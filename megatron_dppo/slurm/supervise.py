"""The batch process of a run: reads the allocation, has one start of the run supervised, and has the job
start again where that was decided.

Signals: USR1, the time limit is near (Slurm's, beside our own clock): checkpoint, start again.
USR2: checkpoint, then end. TERM (scancel): the same, in the half minute that Slurm gives.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from megatron_dppo.config.loading import load_config
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import configure_logging
from megatron_dppo.slurm import commands
from megatron_dppo.slurm.commands import SlurmError
from megatron_dppo.slurm.decisions import Decision
from megatron_dppo.slurm.job import Job
from megatron_dppo.slurm.site import load_site, site_path
from megatron_dppo.slurm.start import Start

log = logging.getLogger(__name__)

_EXCLUDE_TRIES = 20
_EXCLUDE_EVERY_S = 0.5
_LAST_BREATH_S = 2.0


def supervise(config_path: str, overrides: Sequence[str], site_file: str | None) -> int:
    """Run the recipe inside this job; the batch process's exit code. Raises ConfigError, LaunchError,
    SlurmError."""
    site = load_site(site_path(site_file))
    os.environ.update(site.environment)
    config = load_config(config_path, overrides)
    job = Job.of_environment(site)
    stops = job.stops(site.checkpoint_margin_s)
    job.follow_time_limit(stops, site.checkpoint_margin_s)
    with stops.listening():
        with RunDirectory(config.run.directory) as directory:
            configure_logging(directory.path, None)
            decision = Start(config, job, site, directory, stops).run()
        return _requeue(job, decision)


def _requeue(job: Job, decision: Decision) -> int:
    """Have the job start again where that was decided; the exit code.

    A requeue ends this process too, by a TERM that is only noted. A job can be given nodes to keep off
    only when it waits again.
    """
    if not decision.requeue:
        return decision.code
    try:
        commands.requeue(job.id)
    except SlurmError as error:
        log.error("the job can't be requeued, so this run ends here: %s", error)
        return decision.code or 1
    for _ in range(_EXCLUDE_TRIES if decision.exclude else 0):
        try:
            commands.exclude(job.id, decision.exclude)
            break
        except SlurmError:
            time.sleep(_EXCLUDE_EVERY_S)
    time.sleep(_LAST_BREATH_S)
    return 0
