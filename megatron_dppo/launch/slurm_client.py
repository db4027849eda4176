"""Slurm's client programs, each with a time-out, because Slurm's controller may not answer for minutes."""

from __future__ import annotations

import shutil

from megatron_dppo.system.errors import RunError
from megatron_dppo.system.programs import ProgramError, output_of

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
    if shutil.which(command[0]) is None:
        raise SlurmError(f"{command[0]} is not on the path: this is no machine of a Slurm cluster")
    try:
        return output_of(command, _TIMEOUT_S)
    except ProgramError as error:
        raise SlurmError(f"{' '.join(command)}: {error.output or error}") from error
