"""Attempts of a run on Slurm, and the decisions that follow from their ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.cluster.slurm.commands import fields
from megatron_dppo.cluster.slurm.decisions import count_fruitless_starts, decide
from megatron_dppo.cluster.slurm.supervise import Spares, deadlines
from megatron_dppo.launch.attempts import Attempt, AttemptBook
from megatron_dppo.launch.placement import place
from megatron_dppo.launch.stops import OVERTIME, TIME
from megatron_dppo.launch.supervisor import Outcome
from megatron_dppo.metrics.records import remember_checkpoint
from megatron_dppo.spec import Roles
from tests.unit.test_placement import hosts

FIRST = Attempt("7", 0, "n1", ("n1", "n2"), started=100.0)


def test_an_attempt_without_an_end_vanished_when_the_next_begins(tmp_path: Path):
    book = AttemptBook(tmp_path)
    book.begin(FIRST)
    assert [a.why for a in book.all()] == ["running"]
    remember_checkpoint(tmp_path, 4)
    second = book.begin(replace(FIRST, attempt=1, started=200.0))
    assert second.first_saved == 4
    first, running = book.all()
    assert (first.why, first.ended, first.saved, first.progressed) == ("vanished", 200.0, 4, True)
    assert running == second
    ended = book.end(replace(second, why="time", excluded=(("n2", "DOWN"),)))
    assert book.all()[1] == ended
    assert not ended.progressed
    (tmp_path / "attempts" / "8-0.json").write_text("{")
    assert len(book.all()) == 2


def test_starts_in_a_row_without_a_new_checkpoint():
    failed = replace(FIRST, why="failed")
    progressed = replace(failed, first_saved=1, saved=2)
    stopped = replace(failed, why="asked")
    assert count_fruitless_starts([]) == 0
    assert count_fruitless_starts([failed, progressed]) == 0
    assert count_fruitless_starts([progressed, failed, failed]) == 2
    assert count_fruitless_starts([failed, stopped, failed]) == 1


FAILED = Outcome(1, "failed", "rank 3 exited with code 42")


@pytest.mark.parametrize(
    ("outcome", "starts", "expected"),
    [
        (FAILED, 1, ("failed", 1, True)),
        (FAILED, 2, ("failed", 1, True)),
        (FAILED, 3, ("failed", 1, False)),
        (Outcome(0, "ended"), 1, ("failed", 1, True)),
        (Outcome(0, "stopped", "time"), 0, ("time", 1, True)),
        (Outcome(0, "stopped", "time"), 3, ("time", 1, False)),
        (Outcome(1, "stopped", "overtime"), 1, ("overtime", 1, True)),
        (Outcome(0, "stopped", "asked"), 3, ("asked", 0, False)),
        (Outcome(143, "stopped", "cancelled"), 0, ("cancelled", 143, False)),
        (Outcome(1, "succeeded", "another"), 0, ("succeeded", 1, False)),
        (Outcome(2, "refused", "parallel.world_size"), 0, ("refused", 2, False)),
    ],
)
def test_what_follows_from_an_end(outcome, starts, expected):
    decision = decide(
        outcome, finished=False, cancelled=False, fruitless_starts=starts, max_failures=3
    )
    assert (decision.why, decision.code, decision.requeue) == expected


@pytest.mark.parametrize("outcome", [FAILED, Outcome(0, "ended"), Outcome(0, "stopped", "time")])
def test_a_cancelled_job_never_starts_again_whatever_its_steps_did_first(outcome):
    decision = decide(outcome, finished=False, cancelled=True, fruitless_starts=1, max_failures=3)
    assert (decision.why, decision.code, decision.requeue) == ("cancelled", 143, False)


def test_a_run_with_nothing_left_to_do_is_done_however_it_ended():
    for outcome in (Outcome(0, "ended"), Outcome(0, "stopped", "time"), FAILED):
        decision = decide(
            outcome, finished=True, cancelled=False, fruitless_starts=9, max_failures=3
        )
        assert (decision.why, decision.code, decision.requeue) == ("done", 0, False)


def test_the_reason_of_giving_up_is_told():
    decision = decide(FAILED, finished=False, cancelled=False, fruitless_starts=3, max_failures=3)
    assert decision.detail == (
        "rank 3 exited with code 42\ngave up after 3 starts without a new checkpoint (max_failures)"
    )
    lost_node = decide(
        Outcome(0, "ended"), finished=False, cancelled=False, fruitless_starts=1, max_failures=3
    )
    assert "a node" in lost_node.detail


def test_scontrols_fields():
    line = "JobId=7 JobState=RUNNING EndTime=2026-01-01T00:00:00 Comment=a=b\nX=1"
    assert fields(line) == {
        "JobId": "7",
        "JobState": "RUNNING",
        "EndTime": "2026-01-01T00:00:00",
        "Comment": "a=b",
    }


def test_the_deadlines_of_a_time_limit():
    assert deadlines(None, 90.0) == {}
    assert deadlines(1000.0, 90.0) == {TIME: 910.0, OVERTIME: 970.0}
    assert deadlines(1000.0, 900.0) == {TIME: 100.0, OVERTIME: 940.0}


def test_servers_of_a_dead_host_move_together_to_a_spare():
    placement = place(Roles(2, 2), hosts(4, 2))
    (host,) = {server.host for server in placement.servers}
    dead: dict[str, str] = {}
    spares = Spares(placement.unused, lambda names: {n: dead[n] for n in names if n in dead})
    assert spares.host_now(host) == host
    dead["n2"] = "DOWN*"
    assert [spares.host_now(host).name for _ in range(2)] == ["n3", "n3"]
    dead["n3"] = "DOWN*"
    assert spares.host_now(host).name == "n4"
    dead["n4"] = "DRAINED"
    assert spares.host_now(host).name == "n4"
