"""The test cluster itself: jobs run, nodes crash and lose their network, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import Patience, family_of
from tools.slurm_cluster import Cluster
from tools.slurm_cluster.leftovers import is_running, processes_of

pytestmark = pytest.mark.slurm


def script(folder: Path, text: str) -> Path:
    path = folder / "job.sbatch"
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


def test_tasks_of_a_job_see_hosts_ranks_and_gpus(cluster, folder):
    text = "srun bash -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    words = ["-N2", "--ntasks-per-node=2", "--gpus-per-node=8", "-o", folder / "out"]
    job = cluster.client.submit(*words, script(folder, text))
    assert cluster.client.wait(job)["JobState"] == "COMPLETED"
    first, second = cluster.nodes[:2]
    gpus = "0,1,2,3,4,5,6,7"
    tasks = [f"0 0 {first}", f"1 1 {first}", f"2 0 {second}", f"3 1 {second}"]
    lines = sorted((folder / "out").read_text().splitlines())
    assert lines == [f"{task} {gpus}" for task in tasks]


def test_isolated_nodes_are_machines_of_their_own(isolated, folder):
    cluster = isolated
    text = "srun bash -c 'hostname; ls /tmp /dev/shm; ip -o addr show eth0'; echo hello > /tmp/note"
    job = cluster.client.submit("-N2", "-o", folder / "out", script(folder, text))
    cluster.client.wait(job)
    output = (folder / "out").read_text()
    first, second, third = cluster.nodes[:3]
    assert {first, second} <= set(output.split())
    assert "note" not in output
    assert cluster.run_on(first, "cat", "/tmp/note") == "hello\n"
    assert "note" not in cluster.run_on(third, "ls", "/tmp")
    assert cluster.run_on(third, "hostname") == f"{third}\n"


def test_a_job_is_requeued_when_its_node_crashes(cluster, folder):
    text = 'echo "start $SLURM_RESTART_COUNT"; [ -n "$SLURM_RESTART_COUNT" ] || sleep 100'
    words = ["-N1", "--requeue", "--open-mode=append", "-o", folder / "out"]
    job = cluster.client.submit(*words, script(folder, text))
    node = cluster.client.wait(job, {"RUNNING"})["NodeList"]
    cluster.crash(node)
    cluster.declare_down(node)
    try:
        # On a busy machine Slurm may also find the next node not responding, and requeue the job once more.
        restarts = int(cluster.client.wait(job)["Restarts"])
    finally:
        cluster.boot(node)
    assert restarts >= 1
    assert (folder / "out").read_text().splitlines()[-1] == f"start {restarts}"


def test_a_cut_network_leaves_the_tasks_running(isolated, folder):
    cluster = isolated
    beat = folder / "beat"
    job = cluster.client.submit(
        "-N1", "-o", folder / "out", script(folder, f"while sleep 0.05; do date > {beat}; done")
    )
    node = cluster.client.wait(job, {"RUNNING"})["NodeList"]
    wait_for(beat.exists)
    other = next(name for name in cluster.nodes if name != node)
    cluster.cut_network(node)
    try:
        beat.unlink()
        wait_for(beat.exists)
        with pytest.raises(RuntimeError):
            cluster.run_on(other, "bash", "-c", f"timeout 0.3 bash -c '</dev/tcp/{node}/6818'")
    finally:
        cluster.mend_network(node)
    cluster.run_on(other, "bash", "-c", f"timeout 20 bash -c '</dev/tcp/{node}/6818'")


def test_a_stopped_cluster_leaves_nothing(tmp_path):
    with Cluster(2) as small:
        job = small.client.submit(
            "-N2",
            "-o",
            small.shared / "out",
            script(small.shared, "srun sleep 100 & srun sleep 100"),
        )
        small.client.wait(job, {"RUNNING"})
        small.crash(small.nodes[1])
        assert small.leftovers()
    assert small.leftovers() == []


def test_a_plain_cluster_runs_jobs_and_leaves_nothing():
    with Cluster(2, isolated=False) as small:
        out = small.shared / "out"
        text = "srun bash -c 'echo $SLURMD_NODENAME'"
        job = small.client.submit("-N2", "-o", out, script(small.shared, text))
        assert small.client.wait(job)["JobState"] == "COMPLETED"
        assert sorted(out.read_text().split()) == small.nodes
    assert small.leftovers() == []


def test_a_killed_owner_leaves_nothing():
    owner = subprocess.Popen(
        [sys.executable, "-m", "tools.slurm_cluster", "--nodes", "2"],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = ""
    while "SLURM_CONF=" not in line:
        line = owner.stdout.readline()
        assert line, f"it ended with {owner.wait()} before its cluster was there"
    configuration = Path(line.split("SLURM_CONF=")[1].strip())
    assert len(processes_of(configuration)) >= 4
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_for(lambda: not configuration.exists())
    assert not processes_of(configuration)
    assert not is_running(owner.pid)


def wait_for(condition, timeout_s: float = 60.0) -> None:
    patience = Patience(timeout_s, lambda: family_of(os.getpid()))
    while not condition():
        assert not patience.is_exhausted(), "not in time"
        time.sleep(0.02)
