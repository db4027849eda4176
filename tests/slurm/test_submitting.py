"""What is published or printed for sbatch, taken by a real one."""

from __future__ import annotations

import os
import re
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
"""Of the cluster here; a script that wants more is asked with as many, and all else that it says."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_published_script_can_be_scheduled(cluster: Cluster, script: Path) -> None:
    (nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)$", script.read_text(), re.MULTILINE)
    options = ["--test-only", f"--chdir={ROOT}", f"--nodes={min(int(nodes), NODES)}"]
    done = cluster.client.run("sbatch", *options, script, check=False)
    assert done.returncode == 0, done.stderr


def command(cluster: Cluster, *words: object) -> subprocess.CompletedProcess[str]:
    return cluster.client.run(
        sys.executable, "-m", "megatron_dppo.cluster.slurm", *words, check=False, folder=ROOT
    )


def test_a_partition_that_is_not_there_is_told_in_slurms_words(
    cluster: Cluster, folder: Path
) -> None:
    done = command(
        cluster, "submit", write_config(folder, minimal(folder)), "--set=partition=nowhere",
        "--set=gpus_per_node=0", f"run.directory={folder}/run",
    )  # fmt: skip
    assert done.returncode == 2
    assert "invalid partition specified: nowhere" in done.stderr
    assert not (folder / "run" / "job").exists()


def test_ctrl_c_while_sbatch_answers_leaves_no_job_that_nobody_knows(
    cluster: Cluster, folder: Path
) -> None:
    """It goes to the whole foreground of a terminal, also to sbatch, which here is slow to end."""
    slow = folder / "sbatch"
    slow.write_text(
        f"#!{sys.executable}\nimport subprocess, sys, time\n"
        f"subprocess.run([{shutil.which('sbatch')!r}, *sys.argv[1:]], check=True); time.sleep(2)\n"
    )
    slow.chmod(0o755)
    environment = cluster.environment | {"PATH": f"{folder}:{os.environ['PATH']}"}
    words = (
        "env", "--default-signal=INT",  # a job in the background is started to ignore Ctrl-C
        sys.executable, "-m", "megatron_dppo.cluster.slurm", "submit",
        write_config(folder, minimal(folder)), "--set=gpus_per_node=0",
        f"run.directory={folder}/run", "--sbatch=--hold",
    )  # fmt: skip
    with subprocess.Popen(
        list(map(str, words)), cwd=ROOT,
        env=environment, stdout=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        while not (jobs := waiting(cluster)):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    assert (folder / "run" / "job").read_text().split() == jobs
    cluster.client.run("scancel", *jobs)


def test_the_output_is_in_the_folder_whose_name_has_percent_signs(
    cluster: Cluster, folder: Path
) -> None:
    """Of the batch process by sbatch's pattern, of a step by srun's."""
    run = folder / "a%jb%%c"
    done = command(
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
    done = command(
        cluster, "submit", write_config(folder, minimal(folder)), "--set=gpus_per_node=0",
        f"run.directory={folder}/run", f"--sbatch={word}",
    )  # fmt: skip
    assert done.returncode == 2
    assert f"--sbatch: got {word!r}" in done.stderr
    assert not waiting(cluster)


def waiting(cluster: Cluster) -> list[str]:
    return cluster.client.run("squeue", "--noheader", "--format=%A").stdout.split()


def test_a_waiting_run_has_a_status_and_can_be_stopped(cluster: Cluster, folder: Path) -> None:
    run = folder / "run"
    done = command(
        cluster, "submit", write_config(folder, minimal(folder)), "--set=gpus_per_node=0",
        f"run.directory={run}", "--sbatch=--hold",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = (run / "job").read_text().strip()
    assert f"submitted as job {job}" in done.stdout
    assert f"state: job {job} waits (JobHeld" in command(cluster, "status", run).stdout
    assert "is out of the queue" in command(cluster, "stop", run).stdout
    assert happens(lambda: "is gone and never started" in command(cluster, "status", run).stdout), (
        command(cluster, "status", run).stdout
    )
    assert command(cluster, "stop", run).returncode == 2
