"""Faults after which Slurm or the supervisor starts the job again: real jobs, stand-ins for trainer and server."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from megatron_dppo.launch.srun import SrunProcess
from megatron_dppo.system.fork_server import MODULE as FORK_SERVER
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.processes import start_process
from tests.patience import Patience, family_of
from tests.slurm.jobs import TRAINER, StandInJob

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_killed_rank_starts_the_ranks_step_again_in_the_same_attempt(cluster, folder):
    job = StandInJob(cluster, folder, steps=40).submit()
    job.wait(job.server)
    server = job.server()
    job.wait_for_step(12)
    job.kill(TRAINER, 1)
    job.wait(lambda: "restart 1 of 3" in job.log)
    job.wait_for_step(20)
    assert job.server() == server
    record = job.wait_for_end()
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0"), job.log
    assert job.ends() == ["done"]
    assert job.steps() == list(range(1, 41))


def test_without_restarts_a_killed_rank_ends_the_attempt_and_the_next_goes_on(cluster, folder):
    job = StandInJob(cluster, folder, steps=40, max_restarts=0).submit()
    job.wait_for_step(12)
    job.kill(TRAINER, 1)
    record = job.wait_for_end()
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), job.log
    assert job.ends() == ["failed", "done"]
    first, second = job.attempts()
    assert "rank 1" in first["detail"]
    assert "137" in first["detail"]
    assert first["saved"] >= 10
    assert second["first_saved"] == first["saved"]
    assert job.steps() == list(range(1, 41))


def test_a_killed_rank_of_several_that_one_process_forked_is_the_one_named(cluster, folder):
    job = StandInJob(cluster, folder, steps=12, parallel={"world_size": 4})
    job.submit("--ntasks-per-node=2").wait_for_step(6)
    # On each node Slurm has started one process. Its child is the server that forks the node's ranks.
    _, second_node = job.processes(TRAINER)
    (server,) = [child for child in second_node.children() if FORK_SERVER in child.cmdline()]
    # The second node has ranks 2 and 3. The later process is rank 3.
    os.kill(max(rank.pid for rank in server.children()), signal.SIGKILL)
    job.wait_for_end()
    assert job.ends() == ["done"], job.log
    assert "rank 3 exited with code 137" in job.log
    assert job.steps() == list(range(1, 13))


def test_a_crashed_node_is_left_out_of_the_next_attempt(isolated, folder):
    """The test does not declare the node down: the controller notices the crash after SlurmdTimeout."""
    job = StandInJob(isolated, folder, steps=100_000).submit()
    job.wait_for_step(7)
    dead = job.attempts()[0]["hosts"][1]
    isolated.crash(dead)
    try:
        job.wait(lambda: len(job.attempts()) == 2)
        reached = job.attempts()[1]["first_saved"]
        assert reached >= 5
        job.wait_for_step(reached + 20)
        assert dead not in job.attempts()[1]["hosts"]
        isolated.client.run("scancel", job.job)
        job.wait_for_end()
    finally:
        isolated.boot(dead)


def test_a_cut_off_supervisor_does_no_harm_to_the_attempt_that_succeeds_it(isolated, folder):
    """The old processes continue, see the shared folder, and find that they are fenced off."""
    job = StandInJob(isolated, folder, steps=100_000).submit()
    job.wait_for_step(7)
    cut = job.attempts()[0]["node"]
    isolated.cut_network(cut)
    try:
        job.wait(lambda: len(job.attempts()) == 2)
        old = {p.pid for p in job.processes(TRAINER) if isolated.is_on(cut, p.pid)}
        reached = job.attempts()[1]["first_saved"]
        job.wait_for_step(reached + 20)
        assert cut not in job.attempts()[1]["hosts"]
        job.wait(lambda: not old & {p.pid for p in job.processes(TRAINER)})
        steps = job.steps()
        assert steps == list(range(1, len(steps) + 1))
    finally:
        isolated.mend_network(cut)
    reached = job.steps()[-1]
    job.wait_for_step(reached + 20)
    isolated.client.run("scancel", job.job)
    job.wait_for_end()
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1))


def test_a_step_of_the_next_attempt_outlives_the_old_one_s_srun(cluster, folder):
    """Both attempts have a step 0, because Slurm counts a requeued job's steps from 0 again. The old srun must not
    ask Slurm to end its step: that would end the new step."""
    script = folder / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        f'echo "attempt ${{SLURM_RESTART_COUNT:-0}}" >> {folder}/log\n'
        '[ -z "$SLURM_RESTART_COUNT" ] || srun --overlap sh -c '
        f"'echo began >> {folder}/log; sleep 8'; echo \"ended $?\" >> {folder}/log\n"
        "sleep 300\n"
    )

    def wait_for_line(line: str) -> None:
        patience = Patience(180.0, lambda: family_of(os.getpid()))
        while line not in (folder / "log").read_text().splitlines():
            assert not patience.is_exhausted(), line
            time.sleep(0.1)

    job = cluster.client.submit("--requeue", "--nodes=1", f"--output={folder}/out", script)
    (folder / "log").touch()
    wait_for_line("attempt 0")
    with open(folder / "messages", "wb") as messages:
        old_srun = start_process(
            ["srun", f"--jobid={job}", "--overlap", "sleep", "300"],
            environment=cluster.environment,
            output=messages.fileno(),
        )
    while ".0" not in cluster.client.run("squeue", "-s", "-h", "-j", job, "-o", "%i").stdout:
        time.sleep(0.1)
    # A stopped srun is like one that can't reach Slurm: it does not learn of the requeue.
    os.kill(old_srun.pid, signal.SIGSTOP)
    cluster.client.run("scontrol", "requeue", job)
    wait_for_line("began")

    def raise_fenced() -> None:
        raise FencedError("another start of this run took over")

    SrunProcess(old_srun, raise_fenced).kill()
    wait_for_line("ended 0")


def test_before_its_time_limit_a_job_saves_and_starts_again(cluster, folder):
    """The limit is a minute and the margin 30 s, so half a minute is left for the first step."""
    job = StandInJob(cluster, folder, steps=100_000, checkpoint_margin_s=30).submit("--time=1")
    job.wait(lambda: len(job.attempts()) == 2)
    first, second = job.attempts()
    assert (first["why"], first["requeued"]) == ("time", True)
    assert first["saved"] == first["recorded"] > 0
    job.wait_for_step(first["saved"] + 2)
    assert second["first_saved"] == first["saved"]
    assert f"begins after step {first['saved']}" in job.log
    cluster.client.run("scancel", job.job)
    job.wait_for_end()


def test_a_node_that_the_preflight_finds_ill_is_excluded(isolated, folder):
    site: dict[str, Any] = {"preflight": True, "preflight_skip": ["all_reduce"]}
    bad = isolated.nodes[1]
    isolated.run_on(bad, "mount", "-o", "remount,size=64M", "/dev/shm")
    try:
        job = StandInJob(isolated, folder, **site).submit()
        record = job.wait_for_end()
    finally:
        isolated.run_on(bad, "mount", "-o", "remount,size=50%", "/dev/shm")
    assert (record["JobState"], record["ExcNodeList"]) == ("COMPLETED", bad), job.log
    first, second = job.attempts()
    [[name, why]] = first["excluded"]
    assert name == bad
    assert "free space in /dev/shm: got 64 MiB" in why
    assert bad not in second["hosts"]
    assert second["why"] == "done"


def test_a_preflight_that_finds_no_node_fit_refuses_the_job(cluster, folder):
    site: dict[str, Any] = {"preflight": True, "preflight_skip": ["all_reduce"]}
    impossible = {"max_concurrent_requests": 2**31 - 1000}
    job = StandInJob(cluster, folder, rollout=impossible, **site).submit()
    assert job.wait_for_end()["JobState"] == "FAILED", job.log
    [attempt] = job.attempts()
    assert (attempt["why"], attempt["requeued"]) == ("refused", False)
    assert "open files (ulimit -n)" in attempt["detail"]
