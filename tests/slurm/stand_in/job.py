"""The batch process of a job whose ranks are stand-ins: as ``megatron-dppo slurm supervise``."""

from __future__ import annotations

import sys

import megatron_dppo.slurm.__main__ as slurm
from megatron_dppo.slurm import start, steps

if __name__ == "__main__":
    start.MODULE = steps.MODULE = "tests.slurm.stand_in.trainer"
    sys.exit(slurm.main(["supervise", *sys.argv[1:]]))
