"""The supervisor's reactions to faults, in real jobs on a real Slurm with stand-ins for trainer and server."""

from __future__ import annotations

import pytest

from tests.slurm.jobs import SERVER, TRAINER, StandInJob

pytestmark = pytest.mark.slurm


def test_a_job_runs_to_its_end(cluster, folder):
    """Each step begins with the site's prologue, and sees all GPUs of a node that ``--gres`` requests."""
    prologue = 'echo "prologue: GPUs $CUDA_VISIBLE_DEVICES"'
    job = StandInJob(cluster, folder, prologue=prologue).submit("--gres=gpu:8")
    assert job.wait_for_end()["JobState"] == "COMPLETED", job.log
    assert job.ends() == ["done"]
    assert job.steps() == list(range(1, 21))
    assert job.attempts()[0]["hosts"] == cluster.nodes[:3]
    for name in ("check.out", "rank0.out", "rank1.out", "engine0-1.log"):
        lines = (job.directory / "logs" / name).read_text().splitlines()
        assert "prologue: GPUs 0,1,2,3,4,5,6,7" in lines, name


def test_a_killed_server_starts_again_on_its_node_and_the_job_goes_on(cluster, folder):
    job = StandInJob(cluster, folder, steps=10_000).submit()
    job.wait_for_step(1)
    before = job.server()
    job.kill(SERVER)
    job.wait(lambda: (s := job.server()) and s.incarnation == 2)
    reached = job.steps()[-1]
    job.wait_for_step(reached + 3)
    assert job.server().url.split(":")[1] == before.url.split(":")[1]
    assert len(job.attempts()) == 1


def test_scancel_ends_with_a_checkpoint_and_without_a_requeue(cluster, folder):
    job = StandInJob(cluster, folder, steps=10_000).submit()
    job.wait_for_step(7)
    cluster.client.run("scancel", job.job)
    assert job.wait_for_end()["JobState"] == "CANCELLED"
    job.wait(lambda: job.ends() == ["cancelled"])
    assert job.attempts()[0]["saved"] >= 7
    assert job.processes(TRAINER) == []


def test_two_jobs_at_once_do_not_disturb_each_other(cluster, folder):
    small = {"world_size": 1}
    jobs = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        job = StandInJob(cluster, folder / name, steps=10_000, parallel=small)
        jobs.append(job.submit("--nodes=2"))
    for job in jobs:
        job.wait_for_step(5)
    first, second = (job.attempts()[0] for job in jobs)
    assert (first["why"], second["why"]) == ("running", "running")
    assert set(first["hosts"]).isdisjoint(second["hosts"])
    for job in jobs:
        cluster.client.run("scancel", "--batch", "--signal=USR2", job.job)
    for job in jobs:
        assert job.wait_for_end()["JobState"] == "COMPLETED", job.log
        assert job.ends() == ["asked"]
        assert job.jobs_of_steps() == {job.job}


def test_a_second_job_on_a_run_that_another_holds_is_refused_and_does_no_harm(cluster, folder):
    small = {"world_size": 1}
    job = StandInJob(cluster, folder, steps=10_000, parallel=small).submit("--nodes=2")
    job.wait_for_step(3)
    second = job.submit_again("--nodes=2")
    assert cluster.client.wait(second)["JobState"] == "FAILED"
    assert f"scancel {job.job}" in (folder / f"out-{second}").read_text()
    reached = job.steps()[-1]
    job.wait_for_step(reached + 3)
    assert job.jobs_of_steps() == {job.job}
