"""A real sbatch accepts the published scripts, and the jobs that the command ``submit`` makes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.launch.placement import Host
from megatron_dppo.launch.srun import StepForm, literal
from tests.patience import happens
from tests.slurm.conftest import ROOT
from tests.unit.config_files import minimal, write_config
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slurm
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
NODES = 4
"""Nodes of the test cluster, and of the scripts of Qwen3-30B-A3B."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_published_script_can_be_scheduled(cluster: Cluster, script: Path) -> None:
    options = ["--test-only", f"--chdir={ROOT}", f"--nodes={NODES}"]
    done = cluster.client.run("sbatch", *options, script, check=False)
    assert done.returncode == 0, done.stderr


def run_command(cluster: Cluster, *words: object) -> subprocess.CompletedProcess[str]:
    return cluster.client.run(
        sys.executable, "-m", "megatron_dppo.cluster.slurm", *words, check=False, folder=ROOT
    )


def test_a_partition_that_is_not_there_is_told_in_slurms_words(
    cluster: Cluster, folder: Path
) -> None:
    done = run_command(
        cluster, "submit", write_config(folder, minimal(folder)), "--set=partition=nowhere",
        "--set=gpus_per_node=0", f"run.directory={folder}/run",
    )  # fmt: skip
    assert done.returncode == 2
    assert "invalid partition specified: nowhere" in done.stderr
    assert not (folder / "run" / "job").exists()


def test_ctrl_c_while_sbatch_answers_leaves_no_job_that_nobody_knows(
    cluster: Cluster, folder: Path
) -> None:
    """A terminal sends Ctrl-C to its whole foreground, including sbatch. This sbatch is slow to end."""
    slow = folder / "sbatch"
    slow.write_text(
        f"#!{sys.executable}\nimport subprocess, sys, time\n"
        f"subprocess.run([{shutil.which('sbatch')!r}, *sys.argv[1:]], check=True); time.sleep(2)\n"
    )
    slow.chmod(0o755)
    environment = cluster.environment | {"PATH": f"{folder}:{os.environ['PATH']}"}
    words = (
        "env", "--default-signal=INT",  # a shell starts background jobs with Ctrl-C ignored
        sys.executable, "-m", "megatron_dppo.cluster.slurm", "submit",
        write_config(folder, minimal(folder)), "--set=gpus_per_node=0",
        f"run.directory={folder}/run", "--sbatch=--hold",
    )  # fmt: skip
    with subprocess.Popen(
        list(map(str, words)), cwd=ROOT,
        env=environment, stdout=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        while not (jobs := queued_jobs(cluster)):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    assert (folder / "run" / "job").read_text().split() == jobs
    cluster.client.run("scancel", *jobs)


def test_the_output_is_in_the_folder_whose_name_has_percent_signs(
    cluster: Cluster, folder: Path
) -> None:
    """sbatch's pattern names the batch process's output, and srun's pattern names a step's output."""
    run = folder / "a%jb%%c"
    done = run_command(
        cluster, "submit", write_config(folder, minimal(folder)), "--set=gpus_per_node=0",
        f"run.directory={run}", "--set=preflight=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = (run / "job").read_text().strip()
    log = run / "logs" / f"slurm-{job}.out"
    assert happens(lambda: log.is_file() and log.stat().st_size), sorted(folder.rglob("*.out"))
    step = StepForm().command(
        ["echo", "step"], name="s", hosts=[Host("h", "h", 1, None)], tasks_per_host=1,
        output=literal(run / "logs" / "step.out"), stdin=False,
    )  # fmt: skip
    (output,) = [word for word in step if word.startswith("--output=")]
    cluster.client.run("srun", "--nodes=1", output, "echo", "step", timeout_s=60)
    assert (run / "logs" / "step.out").read_text() == "step\n"


@pytest.mark.parametrize("word", ["--wait", "--version", "--test-only", "true", "-C"])
def test_what_sbatch_would_take_in_another_way_is_refused(
    cluster: Cluster, folder: Path, word: str
) -> None:
    done = run_command(
        cluster, "submit", write_config(folder, minimal(folder)), "--set=gpus_per_node=0",
        f"run.directory={folder}/run", f"--sbatch={word}",
    )  # fmt: skip
    assert done.returncode == 2
    assert f"--sbatch: got {word!r}" in done.stderr
    assert not queued_jobs(cluster)


def queued_jobs(cluster: Cluster) -> list[str]:
    return cluster.client.run("squeue", "--noheader", "--format=%A").stdout.split()


def test_a_waiting_run_has_a_status_and_can_be_stopped(cluster: Cluster, folder: Path) -> None:
    run = folder / "run"
    done = run_command(
        cluster, "submit", write_config(folder, minimal(folder)), "--set=gpus_per_node=0",
        f"run.directory={run}", "--sbatch=--hold",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = (run / "job").read_text().strip()
    assert f"submitted as job {job}" in done.stdout
    assert f"state: job {job} waits (JobHeld" in run_command(cluster, "status", run).stdout
    assert "is out of the queue" in run_command(cluster, "stop", run).stdout
    assert happens(
        lambda: "is gone and never started" in run_command(cluster, "status", run).stdout
    ), run_command(cluster, "status", run).stdout
    assert run_command(cluster, "stop", run).returncode == 2
