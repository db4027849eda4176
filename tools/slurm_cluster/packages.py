"""Whether this machine has Slurm's programs. ``install.sh`` lists them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_INSTALL = Path(__file__).with_name("install.sh")
_JOB_VARIABLES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SCANCEL_", "SQUEUE_", "SINFO_")


def search_path() -> str:
    """PATH with the folders of the daemons: an ordinary user's PATH may lack these folders."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def what_is_missing() -> str | None:
    """A line with the programs that this machine lacks, and the script that installs them. None if none is missing."""
    command = ("/bin/bash", str(_INSTALL), "--missing")
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if not names:
        return None
    return f"Slurm is not installed (no {', '.join(names)}); on Debian and Ubuntu: {_INSTALL}"


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables of an enclosing Slurm job or another cluster."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_JOB_VARIABLES)}
    return kept | {"PATH": search_path()}
