"""A trajectory: the values it rejects, the values it derives, and that nothing changes it in place."""

import numpy as np
import pytest

from megatron_dppo.data.columns import COLUMNS, LOSS_COLUMNS, Column, ReadBy, Rows, declared_column
from megatron_dppo.data.trajectory import Trajectory, VersionSpan, check_complete, forms_of
from megatron_dppo.loop.rollout_figures import interruption_figures
from megatron_dppo.metrics import table as names
from tests.messages import mentioning
from tests.trajectories import masked, same, trajectory


def test_several_turns_have_one_prompt_and_all_sampled_tokens():
    turns = masked([1, 2, 7, 30, 31, 8], [False, False, True, False, False, True])
    assert (turns.length, turns.sampled) == (6, 2)
    assert turns.prompt_ids.tolist() == [1, 2]
    assert turns.response_ids.tolist() == [7, 8]
    without_response = masked([1, 2], [False, False])
    assert (without_response.prompt_ids.tolist(), without_response.response_ids.tolist()) == (
        [1, 2],
        [],
    )


def test_versions_become_spans_of_sampled_tokens():
    assert trajectory([1], [2] * 5, weight_version=[4, 4, 5, 6, 6]).version_spans == (
        VersionSpan(4, 0, 2),
        VersionSpan(5, 2, 3),
        VersionSpan(6, 3, 5),
    )
    assert trajectory([1], [2, 3]).version_spans == ()


def test_an_update_interrupts_a_turn_and_not_what_lies_between_two():
    assert trajectory([1, 1], [2] * 5, weight_version=[4, 4, 5, 6, 6]).interruptions == (4, 5)
    mask = [False, True, True, False, True, True]
    for versions, expected in (([1, 1, 2, 2], ()), ([1, 2, 3, 4], (2, 5)), ([1, 1, 1, 2], (5,))):
        turns = masked([1] * 6, mask, weight_version=versions)
        assert turns.interruptions == expected
        figures = interruption_figures([turns, trajectory([1], [2, 3])])
        expected_figures = {names.INTERRUPTED: 0.5, names.RECOMPUTED_TOKENS: sum(expected)}
        assert figures == (expected_figures if expected else {})


def test_truncation_is_a_finish_reason():
    assert Trajectory.of_response([1], [2], finish_reason="length").truncated
    assert not Trajectory.of_response([1], [2]).truncated


def test_a_response_is_the_first_to_the_first_problem_unless_it_says_otherwise():
    response = Trajectory.of_response([1], [2])
    assert (response.problem_id, response.sample_index) == (0, 0)
    assert (response.reward, response.advantage) == (0.0, 0.0)
    response = Trajectory.of_response([1], [2], problem_id=3, sample_index=5)
    assert (response.problem_id, response.sample_index) == (3, 5)


def test_a_list_becomes_an_array_of_the_usual_type():
    response = trajectory([1], [2], routed_experts=[[[3, 1]]])
    assert response.columns["routed_experts"].dtype == np.uint8


def test_a_column_has_gaps_where_some_lack_it_or_some_rows_do_not_hold():
    def gaps(**fields):
        return Column("c", ("int8",), Rows.INPUT, **fields).has_gaps

    assert not gaps()
    assert gaps(complete=False)
    assert gaps(usable=lambda mask, columns: mask)


def test_rows_stand_at_the_token_that_predicts_or_is_read():
    mask = np.array([False, True, False, True])
    sampled, read = declared_column("rollout_log_probs"), declared_column("routed_experts")
    assert (sampled.positions(mask).tolist(), sampled.count(mask)) == ([0, 2], 2)
    assert (read.positions(mask).tolist(), read.count(mask)) == ([0, 1, 2], 3)


DTYPES = {
    "rollout_log_probs": ("float32",),
    "recomputed_log_probs": ("float32",),
    "reference_log_probs": ("float32",),
    "topk_ids": ("int32",),
    "topk_log_probs": ("float32",),
    "teacher_log_probs": ("float32",),
    "teacher_topk_ids": ("int32",),
    "teacher_topk_log_probs": ("float32",),
    "weight_version": ("int32",),
    "routing_version": ("int32",),
    "routed_experts": ("uint8", "uint16"),
    "branch": ("uint16",),
    "loss_log_probs": ("float32",),
    "loss_recomputed_log_probs": ("float32",),
    "loss_entropy": ("float32",),
    "loss_divergence": ("float64",),
    "loss_advantages": ("float32",),
    "loss_trains": ("bool",),
    "loss_topk_log_probs": ("float32",),
}


def test_what_each_column_is():
    columns = {name: COLUMNS[name] for name in DTYPES}  # other tests declare further ones
    assert {name: column.dtypes for name, column in columns.items()} == DTYPES

    def names_where(holds):
        return {name for name, column in columns.items() if holds(column)}

    loss = {name for name in DTYPES if name.startswith("loss_")}
    ids = {"topk_ids", "teacher_topk_ids"}
    topk = {*ids, "topk_log_probs", "teacher_topk_log_probs"}
    versions = {"weight_version", "routing_version"}
    assert set(LOSS_COLUMNS) == loss
    inputs = {"routed_experts", "branch"}
    assert names_where(lambda c: c.rows is Rows.INPUT) == inputs
    assert names_where(lambda c: c.rows is Rows.SAMPLED) == DTYPES.keys() - inputs
    log_probs = {f"{of}_log_probs" for of in ("rollout", "recomputed", "reference", "teacher")}
    assert names_where(lambda c: c.read_by is ReadBy.LAST) == log_probs | topk
    assert names_where(lambda c: c.read_by is ReadBy.ALL) == loss | versions | inputs
    assert names_where(lambda c: c.fill == -1) == ids
    assert names_where(lambda c: c.fill == 0) == DTYPES.keys() - ids
    assert names_where(lambda c: not c.complete) == loss | inputs | {"routing_version"}
    assert names_where(lambda c: not c.packed) == loss | versions | {"branch"}
    assert names_where(lambda c: c.usable is not None) == {"routed_experts"}
    own_topk = {name for name in topk if not name.startswith("teacher")} | {"loss_topk_log_probs"}
    assert names_where(lambda c: c.trailing == ("topk",)) == own_topk
    assert names_where(lambda c: c.trailing == ("teacher_topk",)) == topk - own_topk
    assert columns["routed_experts"].trailing == ("moe_layers", "experts_per_token")
    assert names_where(lambda c: c.trailing) == topk | {"loss_topk_log_probs", "routed_experts"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rollout_log_probs": [0.5]}, "problem 0: rollout_log_probs: 0.5 at token 0"),
        (
            {"topk_ids": [[3, 3]], "topk_log_probs": [[-1, -1]]},
            "problem 0: Top-K id 3 stands twice at token 0",
        ),
        ({"routed_experts": [[[3, 3]]]}, "problem 0: routed_experts: "),
        ({"topk_log_probs": [[-1.0]]}, "problem 0: topk_ids and topk_log_probs go together"),
        ({"topk_ids": [[3]]}, "problem 0: topk_ids and topk_log_probs go together"),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_place(columns, message):
    with pytest.raises(ValueError, match=f"response 0 to {message}"):
        trajectory([1], [2], **columns).check()


def test_both_columns_of_topk_pass_without_a_further_one():
    trajectory([1], [2], topk_ids=[[3, -1]], topk_log_probs=[[-1.0, 0.5]]).check()


def test_a_complete_column_is_of_all_or_of_none():
    for present in (0, 3):
        check_complete(declared_column("rollout_log_probs"), present, 3)
    check_complete(declared_column("routed_experts"), 1, 3)
    with pytest.raises(ValueError, match=mentioning("rollout_log_probs", "2 of 3")):
        check_complete(declared_column("rollout_log_probs"), 1, 3)


def test_arrays_are_read_only_and_the_caller_keeps_its_own():
    tokens, log_probs = np.array([1, 2, 3], np.int32), np.array([-1.0, -2.0], np.float32)
    response = masked(tokens, [False, True, True], rollout_log_probs=log_probs)
    for array in (response.token_ids, response.loss_mask, response.columns["rollout_log_probs"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(TypeError):
        response.columns["rollout_log_probs"] = log_probs  # type: ignore[index]
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
        (
            lambda: masked([1, 2], [True, True], problem_id=3),
            "response 0 to problem 3: the prompt is",
        ),
        (lambda: masked([], []), "the prompt is empty"),
        (lambda: masked([1, 2], [False]), r"token_ids \(2,\) and loss_mask \(1,\)"),
        (lambda: trajectory([1], [2], mood=[1.0]), "column 'mood' is not declared; known are"),
        (
            lambda: trajectory([1], [2], rollout_log_probs=np.array([-1.0])),
            "rollout_log_probs is float64, expected float32",
        ),
        (
            lambda: trajectory([1], [2], rollout_log_probs=[]),
            "0 rows of rollout_log_probs, expected 1, one for each of the sampled tokens",
        ),
        (
            lambda: trajectory([1], [2, 3], routed_experts=[[[3, 1]]]),
            "1 rows of routed_experts, expected 2, one for each of the tokens but the last",
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
