"""Ranks that srun starts without the supervisor, and without torchrun."""

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


STEPS = """
import os, subprocess, sys
from megatron_dppo.launch.placement import Host
from megatron_dppo.launch.srun import StepForm, hostnames, step_environment
names = hostnames(os.environ["SLURM_JOB_NODELIST"])
for count in (1, len(names)):
    hosts = [Host(name, name, 1) for name in names[:count]]
    step = StepForm().command(
        ["true"], name="step", hosts=hosts, tasks_per_host=1, output="/dev/null", stdin=False
    )
    done = subprocess.run(step, env=step_environment(os.environ), stderr=subprocess.PIPE, text=True)
    print(done.returncode, done.stderr.strip(), flush=True)
"""


@pytest.mark.parametrize(
    "flags",
    [
        ("--mem-per-cpu=100", "--cpus-per-task=2"),
        # These variables are set if a job is submitted inside an allocation that counts memory in another way.
        ("--mem=400", "--export=ALL,SLURM_MEM_PER_CPU=100"),
        ("--gpus-per-node=2", "--mem-per-gpu=100", "--export=ALL,SLURM_MEM_PER_NODE=400"),
        ("--gpus-per-task=2", "--ntasks=2"),
        ("--gpus-per-node=2", "--export=ALL,SLURM_GPUS=9,SLURM_NTASKS_PER_GPU=2"),
        ("--hint=nomultithread", "--export=ALL,SLURM_HINT=compute_bound"),
        ("--export=ALL,SRUN_CPUS_PER_TASK=4096,SLURM_CONSTRAINT=nowhere",),
        ("--export=ALL,SLURM_HOSTFILE=/nowhere,SLURM_WORKING_DIR=/nowhere,SLURM_THREAD_SPEC=4096",),
    ],
    ids=[
        "cpu",
        "node-in-cpu",
        "gpu-in-node",
        "gpus-per-task",
        "gpus-in-gpus",
        "hint",
        "srun",
        "files",
    ],
)
def test_steps_start_whatever_the_job_or_an_allocation_around_it_asked_for(
    cluster: Cluster, folder: Path, flags: tuple[str, ...]
) -> None:
    """A step on one node and a step on both nodes start. Both share the job's resources."""
    program, script = folder / "steps.py", folder / "job.sbatch"
    program.write_text(STEPS)
    script.write_text(
        f"#!/bin/bash\nPYTHONPATH={ROOT} {sys.executable} {program} > {folder}/ends\n"
    )
    job = cluster.client.submit("--nodes=2", *flags, "--output=/dev/null", script)
    assert cluster.client.wait(job)["JobState"] == "COMPLETED"
    assert (folder / "ends").read_text().split() == ["0", "0"]
