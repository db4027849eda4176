"""The batch process of a job whose ranks are stand-ins: ``megatron-dppo slurm supervise`` with another rank module."""

from __future__ import annotations

import sys

import megatron_dppo.cluster.slurm.__main__ as slurm
from megatron_dppo.cluster.slurm import supervise

if __name__ == "__main__":
    supervise.MODULE = "tests.slurm.stand_in.trainer"
    sys.exit(slurm.main(["supervise", *sys.argv[1:]]))
