"""Which of Slurm's programs this machine has, and the command that installs them."""

from __future__ import annotations

import os
import shutil

INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge iproute2"
"""Debian's and Ubuntu's command for everything that a cluster needs."""

_PROGRAMS = (
    *("slurmctld", "slurmd", "munged"),
    *("sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo"),
    *("ip", "unshare", "nsenter"),
)
_JOB_VARIABLES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SCANCEL_", "SQUEUE_", "SINFO_")


def search_path() -> str:
    """PATH with the folders of the daemons, which an ordinary user's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def missing_programs() -> list[str]:
    """The programs that a cluster needs and this machine lacks."""
    return [name for name in _PROGRAMS if shutil.which(name, path=search_path()) is None]


def clean_environment() -> dict[str, str]:
    """This process's environment without what an enclosing Slurm job or another cluster set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_JOB_VARIABLES)}
    return kept | {"PATH": search_path()}
