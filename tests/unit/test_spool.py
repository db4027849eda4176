"""The spool of scored responses, on one rank: which stored responses it returns, and when it stops writing."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from megatron_dppo.data.sampling import ProblemSampler, ReturningSampler
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.loop import spool as spool_module
from megatron_dppo.loop.scorer import PendingScore
from megatron_dppo.loop.spool import ResponseSpool
from megatron_dppo.rewards.verifier import Score

PROBLEMS = [Problem(number, "p", "1", (number, 1)) for number in (7, 8)]


def spool_in(folder: Path) -> ResponseSpool:
    return ResponseSpool(folder, 0, lambda step: step - 1)


def response(problem: Problem, version: int) -> Trajectory:
    columns = {"weight_version": np.array([version], np.int32)}
    return Trajectory.of_response(
        problem.prompt_ids, [3], problem_id=problem.problem_id, columns=columns
    )


def test_only_young_responses_to_the_same_problem_are_found(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    part = spool.part(5, [2, 4])
    part.keep((0, 0), response(PROBLEMS[0], 4), Score(1.0))
    part.keep((0, 1), response(PROBLEMS[0], 3), Score(1.0))
    part.keep((1, 0), response(PROBLEMS[0], 4), Score(1.0))
    part.keep((1, 1), response(PROBLEMS[1], 4), Score.without_value("away"))
    spool.flush()
    assert sorted(spool.found(5)) == [(2, 0), (4, 0)]
    found = part.found(PROBLEMS)
    assert list(found) == [(0, 0)]
    assert found[0, 0][1] == Score(1.0)
    assert spool.found(6) == {}
    spool.forget_until(5)
    assert spool.found(5) == {}
    spool.close()


def test_responses_after_a_damaged_file_are_found_by_the_next_start(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(spool_module, "on_rank_0", lambda function: function())
    folder = tmp_path / "spool"
    first = spool_in(folder)
    first.open("settings", 0, is_fresh=True)
    first.close()
    (folder / "trained.jsonl").write_bytes(b"\xff\xfe\n")
    second = spool_in(folder)
    second.open("settings", 4, is_fresh=False)
    second.part(5, [0]).keep((0, 0), response(PROBLEMS[0], 4), Score(1.0))
    second.flush()
    second.close()
    third = spool_in(folder)
    third.open("settings", 4, is_fresh=False)
    assert sorted(third.found(5)) == [(0, 0)]
    third.close()


def test_a_spool_that_cannot_be_written_is_named_once(tmp_path: Path, caplog) -> None:
    (tmp_path / "spool").write_text("a file")
    spool = spool_in(tmp_path / "spool")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            spool.part(1, [0]).keep((0, 0), response(PROBLEMS[0], 0), Score(1.0))
            spool.flush()
    assert caplog.text.count(str(tmp_path / "spool")) == 1
    spool.close()


def test_a_score_is_complete_when_the_last_reward_is() -> None:
    futures: dict[str, Future[Score]] = {"a": Future(), "b": Future()}
    seen: list[float] = []
    PendingScore(futures, {"a": 1.0, "b": 2.0}).when_done(lambda score: seen.append(score.value))
    futures["a"].set_result(Score(1.0))
    assert seen == []
    futures["b"].set_result(Score(3.0))
    assert seen == [7.0]


def test_a_sampler_draws_what_earlier_ranks_drew_and_then_what_they_passed_over() -> None:
    order = ProblemSampler(10, seed=3).next(20)
    sampler = ReturningSampler(ProblemSampler(10, seed=3))
    sampler.take([order[2], order[0]])
    assert sampler.next(3) == [order[1], order[3], order[4]]
