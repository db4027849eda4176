"""The spool of scored responses, on one rank: which stored responses it returns, and when it stops writing."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.data.response_frames import ScoredResponse
from megatron_dppo.data.sampling import ProblemSampler, ReturningSampler
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.loop.scorer import PendingScore
from megatron_dppo.loop.spool import OwnShare, ResponseSpool, settings_of_responses
from megatron_dppo.rewards.verifier import Score

pytestmark = pytest.mark.usefixtures("one_rank")

PROBLEMS = [Problem(number, "p", "1", (number, 1)) for number in (7, 8)]


def spool_in(folder: Path) -> ResponseSpool:
    return ResponseSpool(folder, 0, lambda step: step - 1)


def open_alone(spool: ResponseSpool, step: int, *, is_fresh: bool) -> None:
    """Open the spool of a run with one rank and one response per problem."""
    spool.open("settings", step, OwnShare(list, 1, PROBLEMS), is_fresh=is_fresh)


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


def test_a_response_is_young_only_if_all_its_tokens_are(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    for index, versions in enumerate(([3, 4], [4, 4], [4, 5], [2, 3])):
        columns = {"weight_version": np.array(versions, np.int32)}
        mixed = Trajectory.of_response(
            PROBLEMS[0].prompt_ids, [3, 3], problem_id=7, columns=columns
        )
        spool.keep(5, ScoredResponse((0, index), mixed, asdict(Score(1.0))))
    spool.flush()
    assert sorted(spool.found(5)) == [(0, 1)]
    spool.close()


def test_another_seed_makes_other_responses() -> None:
    run = {"directory": "run", "seed": 1, "steps": 9, "max_restarts": 3}
    settings = {"run": run, "model": {"dtype": "float32"}}
    kept = settings_of_responses(settings)
    assert kept == settings_of_responses({**settings, "run": {**run, "steps": 8}})
    for changes in ({"run": {**run, "seed": 2}}, {"run": {**run, "directory": "b"}}, {"model": {}}):
        assert settings_of_responses({**settings, **changes}) != kept


def test_stored_rows_are_read_by_the_next_start(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool")
    assert spool.read_rows() == {}
    open_alone(spool, 0, is_fresh=True)
    rows = {"0": {"step": 0, "a": None}, "1": {"step": 1, "a": 0.5}}
    spool.keep_rows(rows)
    assert spool_in(tmp_path / "spool").read_rows() == rows
    assert ResponseSpool(None, 0, lambda step: step - 1).read_rows() == {}


def test_responses_are_synced_before_a_step_counts_as_trained(tmp_path: Path, monkeypatch) -> None:
    spool = spool_in(tmp_path / "spool")
    open_alone(spool, 0, is_fresh=True)
    synced: list[str] = []
    sync = os.fsync

    def note_sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note_sync)
    spool.note_draws(1, 1, [0])
    spool.keep(1, ScoredResponse((0, 0), response(PROBLEMS[0], 0), asdict(Score(1.0))))
    spool.sync(1)
    assert {"draws.jsonl", "rank0.frames", "step_000001"} <= set(synced)
    assert "trained.jsonl" not in synced
    spool.note_trained(1, "hash")
    assert synced[-1] == "trained.jsonl"
    spool.close()


def test_responses_after_a_damaged_file_are_found_by_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    first = spool_in(folder)
    open_alone(first, 0, is_fresh=True)
    first.close()
    (folder / "trained.jsonl").write_bytes(b"\xff\xfe\n")
    second = spool_in(folder)
    open_alone(second, 4, is_fresh=False)
    second.part(5, [0]).keep((0, 0), response(PROBLEMS[0], 4), Score(1.0))
    second.flush()
    second.close()
    third = spool_in(folder)
    open_alone(third, 4, is_fresh=False)
    assert sorted(third.found(5)) == [(0, 0)]
    third.close()


def keep_one(spool: ResponseSpool) -> None:
    spool.part(1, [0]).keep((0, 0), response(PROBLEMS[0], 0), Score(1.0))
    spool.flush()


def test_a_linked_spool_of_an_earlier_run_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "spool").symlink_to(tmp_path / "elsewhere")
    first = spool_in(tmp_path / "spool")
    open_alone(first, 0, is_fresh=True)
    keep_one(first)
    first.close()
    second = spool_in(tmp_path / "spool")
    open_alone(second, 0, is_fresh=True)
    assert second.found(1) == {}
    keep_one(second)
    assert sorted(second.found(1)) == [(0, 0)]
    second.close()


def test_a_spool_that_cannot_be_emptied_keeps_nothing(tmp_path: Path, monkeypatch) -> None:
    first = spool_in(tmp_path / "spool")
    open_alone(first, 0, is_fresh=True)
    keep_one(first)
    first.close()
    second = spool_in(tmp_path / "spool")

    def fail(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as busy:
        busy.setattr(shutil, "rmtree", fail)
        open_alone(second, 0, is_fresh=True)
    assert second.found(1) == {}
    second.close()


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
