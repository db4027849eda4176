"""A start check: the run's directory needs free disk space."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_dppo.config import TrainConfig
from megatron_dppo.config.machine import Machine
from megatron_dppo.launch.start_checks import StartCheck

LEAST_FREE_GIB = 1


def check_free_disk(config: TrainConfig, machine: Machine) -> StartCheck:
    """Refuse a start if less than ``LEAST_FREE_GIB`` GiB are free in the run's directory or its nearest parent."""
    folder = Path(config.run.directory).absolute()
    while not folder.exists():
        folder = folder.parent
    free_gib = shutil.disk_usage(folder).free / 2**30
    summary = f"disk: {free_gib:.0f} GiB free in {folder}"
    if free_gib >= LEAST_FREE_GIB:
        return StartCheck(summary=summary)
    fault = f"run.directory: {free_gib:.2f} GiB are free in {folder}, expected at least {LEAST_FREE_GIB} GiB"
    return StartCheck([fault], summary)
