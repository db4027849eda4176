"""Servers on nodes of their own: one that dies under a job that outlives it, and heterogeneous jobs."""

from __future__ import annotations

import pytest

from tests.slurm.jobs import StandInJob

pytestmark = [pytest.mark.slurm, pytest.mark.slurm_slow]


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


def test_servers_of_a_heterogeneous_job_run_on_its_second_group(cluster, folder):
    """Two groups as two partitions would give them."""
    job = StandInJob(cluster, folder, steps=20)
    job.submit(":", "--nodes=1", "--ntasks-per-node=1", "--exclusive", "--time=10")
    job.wait_for_step(1)
    first, second = (part["NodeList"] for part in cluster.client.job(job.job))
    assert job.attempts()[0]["hosts"] == [*cluster.nodes]
    assert f"{second}  engine0" in job.log
    assert second not in first
    assert job.wait_for_end()["JobState"] == "COMPLETED", job.log
    assert job.ends() == ["done"]
