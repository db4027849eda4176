"""The record itself: what it refuses, what it derives, and that nothing changes it in place."""

import numpy as np
import pytest

from megatron_dppo.data.trajectory import Trajectory, VersionSpan, forms_of
from tests.trajectories import same, trajectory


def test_several_turns_have_one_prompt_and_all_sampled_tokens():
    turns = Trajectory(0, 0, [1, 2, 7, 30, 31, 8], [False, False, True, False, False, True])
    assert (turns.length, turns.sampled) == (6, 2)
    assert turns.prompt_ids.tolist() == [1, 2]
    assert turns.response_ids.tolist() == [7, 8]
    nobody = Trajectory(0, 0, [1, 2], [False, False])
    assert (nobody.prompt_ids.tolist(), nobody.response_ids.tolist()) == ([1, 2], [])


def test_versions_become_spans_of_sampled_tokens():
    assert trajectory([1], [2] * 5, weight_version=[4, 4, 5, 6, 6]).version_spans == (
        VersionSpan(4, 0, 2),
        VersionSpan(5, 2, 3),
        VersionSpan(6, 3, 5),
    )
    assert trajectory([1], [2, 3]).version_spans == ()


def test_truncation_is_a_finish_reason():
    assert Trajectory.of_response([1], [2], finish_reason="length").truncated
    assert not Trajectory.of_response([1], [2]).truncated


def test_arrays_are_read_only_and_the_caller_keeps_its_own():
    tokens, log_probs = np.array([1, 2, 3], np.int32), np.array([-1.0, -2.0], np.float32)
    made = Trajectory(0, 0, tokens, [False, True, True], {"rollout_log_probs": log_probs})
    for array in (made.token_ids, made.loss_mask, made.columns["rollout_log_probs"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(TypeError):
        made.columns["rollout_log_probs"] = log_probs  # type: ignore[index]
    assert tokens.flags.writeable
    assert log_probs.flags.writeable


def test_each_step_makes_a_new_one():
    first = trajectory([1], [2, 3], advantage=0.0)
    scored = first.scored(1.0, 0.5)
    assert (scored.reward, scored.advantage) == (1.0, 0.5)
    assert (first.reward, first.advantage) == (0.0, 0.0)
    more = first.with_columns(recomputed_log_probs=[-1.0, -2.0])
    assert more.columns.keys() == {"rollout_log_probs", "recomputed_log_probs"}
    assert first.columns.keys() == {"rollout_log_probs"}
    assert same(more.without("recomputed_log_probs"), first)
    assert first.without("topk_ids") is first


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Trajectory(3, 1, [1, 2], [True, True]), "response 1 to problem 3: the prompt is"),
        (lambda: Trajectory(0, 0, [], []), "the prompt is empty"),
        (lambda: Trajectory(0, 0, [1, 2], [False]), r"token_ids \(2,\) and loss_mask \(1,\)"),
        (lambda: trajectory([1], [2], mood=[1.0]), "column 'mood' is not declared; known are"),
        (
            lambda: trajectory([1], [2], rollout_log_probs=np.array([-1.0])),
            "rollout_log_probs is float64, expected float32",
        ),
        (lambda: trajectory([1], [2], topk_ids=[3]), r"shape \(1,\), expected \[rows, topk\]"),
        (
            lambda: trajectory([1], [2]).column("topk_ids"),
            r"has no topk_ids; it has \['rollout_log_probs'\]",
        ),
        (
            lambda: forms_of([trajectory([1], [2]), trajectory([1], [2], rollout_log_probs=None)]),
            "rollout_log_probs: 1 of 2 trajectories have none, expected all or none",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
