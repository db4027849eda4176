"""Ranks that srun starts without our supervisor, and without torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import ROOT
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slurm
TELL = """
import os
from megatron_dppo.launch.srun import adopt_slurm_rank
adopt_slurm_rank()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(*(os.environ.get(name) for name in names))
"""


def test_tasks_are_ranks_and_the_batch_script_is_none(cluster: Cluster, folder: Path) -> None:
    tell = folder / "tell.py"
    tell.write_text(TELL)
    script = folder / "job.sbatch"
    program = f"PYTHONPATH={ROOT} {sys.executable} {tell}"
    script.write_text(f"#!/bin/bash\n{program} > {folder}/batch\nexport PYTHONPATH={ROOT}\n"
                      f"srun --output={folder}/ranks {sys.executable} {tell}\n")  # fmt: skip
    job = cluster.client.submit("--nodes=2", "--ntasks-per-node=2", "--output=/dev/null", script)
    assert cluster.client.wait(job)["JobState"] == "COMPLETED"
    assert (folder / "batch").read_text() == "None None None None None None\n"
    port = 21_000 + job * 97 % 9_000
    where = f"{cluster.nodes[0]} {port}"
    assert sorted((folder / "ranks").read_text().splitlines()) == [
        f"{rank} {rank % 2} 4 2 {where}" for rank in range(4)
    ]
