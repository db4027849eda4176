"""Slurm's client programs, each with a time-out, because Slurm's controller may not answer for minutes."""

from __future__ import annotations

import subprocess

from megatron_dppo.system.errors import RunError

_TIMEOUT_S = 30.0
CLIENT_VARIABLES = (
    "SLURM_CLUSTERS",
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_JWT",
    "SLURM_TIME_FORMAT",
    "SLURM_UMASK",
)
"""Variables with settings of Slurm's client programs. Other variables of Slurm describe a job or are options."""


class SlurmError(RunError):
    """A client program of Slurm failed; the message has its output."""


def slurm(*command: str) -> str:
    """Run a client program of Slurm and return its standard output. Raises SlurmError."""
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"{command[0]} is not on the path: this is no machine of a Slurm cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{' '.join(command)}: no answer within {_TIMEOUT_S:.0f} s") from error
    if completed.returncode:
        message = completed.stderr.strip() or completed.stdout.strip()
        raise SlurmError(f"{' '.join(command)}: {message}")
    return completed.stdout
