"""Servers on their own nodes: nodes die while the job continues, servers use several nodes, jobs are heterogeneous."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.slurm.jobs import ROOT, SERVER, StandInJob

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SECOND_GROUP = (":", "--nodes=1", "--ntasks-per-node=1", "--exclusive", "--time=10")


def test_servers_of_a_dead_node_move_to_a_spare(cluster, folder, isolated):
    job = StandInJob(cluster, folder, steps=10_000, spares_servers=True)
    job.submit("--nodes=4", "--no-kill")
    job.wait_for_step(1)
    dead = isolated.nodes[2]
    isolated.crash(dead)
    isolated.declare_down(dead)
    try:
        job.wait(lambda: (s := job.server()) and s.incarnation > 1)
        reached = job.steps()[-1]
        job.wait_for_step(reached + 3)
        assert f"its servers move to {isolated.nodes[3]}" in job.log
        assert job.ends() == ["running"]
    finally:
        isolated.boot(dead)


def test_servers_whose_supervisor_is_gone_end_and_have_the_job_start_again(
    cluster, folder, isolated
):
    """With ``--no-kill`` the job continues without its batch process. The servers would continue, too."""
    job = StandInJob(
        cluster, folder, steps=100_000, spares_servers=True, supervisor_patience_s=10
    ).submit("--no-kill")
    job.wait_for_step(7)
    dead = job.attempts()[0]["node"]
    isolated.crash(dead)
    try:
        job.wait(lambda: len(job.attempts()) == 2)
        controller_log = (isolated.root / "log" / "slurmctld.log").read_text()
        # Slurm did not requeue the job by itself.
        assert f"JobId={job.job} due to failure of node" not in controller_log
        first, second = job.attempts()
        assert (first["why"], second["first_saved"] >= 5) == ("vanished", True)
        assert dead not in second["hosts"]
        job.wait_for_step(second["first_saved"] + 5)
    finally:
        isolated.boot(dead)


def test_a_server_over_two_nodes_starts_again_as_a_whole(cluster, folder):
    job = StandInJob(cluster, folder, steps=10_000, sglang={"tp_size": 2}).submit("--nodes=4")
    job.wait_for_step(1)
    head, follower = job.processes(SERVER)
    assert f"{cluster.nodes[3]}  engine0" in job.log
    job.kill(SERVER)
    job.wait(lambda: (s := job.server()) and s.incarnation == 2)
    assert not {head.pid, follower.pid} & {p.pid for p in job.processes(SERVER)}
    assert len(job.processes(SERVER)) == 2
    reached = job.steps()[-1]
    job.wait_for_step(reached + 3)
    assert job.ends() == ["running"]


def test_servers_of_a_heterogeneous_job_run_on_its_second_group(cluster, folder):
    """The two groups of nodes could come from two partitions. Such a job can be stopped, too."""
    job = StandInJob(cluster, folder, steps=10_000)
    job.submit(*SECOND_GROUP)
    job.wait_for_step(1)
    first, second = (part["NodeList"] for part in cluster.client.job(job.job))
    assert job.attempts()[0]["hosts"] == [*cluster.nodes]
    assert f"{second}  engine0" in job.log
    assert second not in first
    stop = (sys.executable, "-m", "megatron_dppo.cluster.slurm", "stop", job.directory)
    done = cluster.client.run(*stop, check=False, folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert job.wait_for_end()["JobState"] == "COMPLETED", job.log
    assert job.ends() == ["asked"]


def test_an_ill_node_of_the_second_group_is_excluded(cluster, folder, isolated):
    bad = isolated.nodes[2]
    site: dict[str, Any] = {"preflight": True, "preflight_skip": ["all_reduce"]}
    isolated.run_on(bad, "mount", "-o", "remount,size=64M", "/dev/shm")
    try:
        job = StandInJob(cluster, folder, **site).submit("--nodes=2", *SECOND_GROUP)
        job.wait_for_end()
    finally:
        isolated.run_on(bad, "mount", "-o", "remount,size=50%", "/dev/shm")
    first, second = job.attempts()
    assert [name for name, _ in first["excluded"]] == [bad]
    assert second["hosts"] == [*isolated.nodes[:2], isolated.nodes[3]]
    assert second["why"] == "done"
    groups = cluster.client.job(job.job)
    assert [group["ExcNodeList"] for group in groups] == [bad, bad]
