"""The optimiser steps of a rollout batch: their responses, denominators and costs, worked by hand."""

import math
from dataclasses import dataclass

import pytest
import torch

from megatron_dppo.algorithms.aggregation import AGGREGATIONS
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.batch_file import BatchFormatError
from megatron_dppo.data.columns import Form
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop import learning
from megatron_dppo.loop.batch_layout import BatchLayout
from megatron_dppo.loop.credit import length_penalties, with_rewards
from megatron_dppo.loop.learning import (
    MiniBatchPlan,
    check_carried_topk,
    check_teacher_scores,
    pack_mini_batch,
)
from megatron_dppo.model.shape import SequenceCost
from megatron_dppo.rewards.verifier import Score
from megatron_dppo.trainer.token_loss import make_token_loss
from megatron_dppo.vocab_parallel import policy_stats
from tests.messages import mentioning
from tests.trajectories import trajectory

GROUP = 2
LENGTHS = [3, 5, 1, 2, 4, 4, 6, 7]
"""Tokens of each response: four prompts with two responses each."""


@dataclass
class Part:
    """The keys that planning reads of the configuration's sections ``rollout`` and ``training``."""

    group_size: int = GROUP
    max_response_tokens: int = 10
    prompts_per_mini_batch: int = 2
    micro_batch_tokens: int = 20


@dataclass
class Config:
    """``TrainConfig`` without the sections that name files."""

    algorithm: AlgorithmConfig
    rollout: Part
    training: Part
    router_replay: bool = False


def config(**algorithm):
    return Config(AlgorithmConfig(**algorithm), Part(), Part())


def make_plans(batch, config, layout):
    sections = (config.training, config.rollout, config.algorithm)
    return learning.plan_mini_batches(batch, *sections, layout)


def responses_of(plan):
    """Return the positions of all responses of a mini-batch, in order."""
    return sorted(i for rank in plan.positions for rows in rank for i in rows)


def answers(truncated=()):
    return [
        Trajectory.of_response(
            [1, 2], [3] * n, problem_id=i // GROUP, sample_index=i % GROUP,
            finish_reason="length" if i in truncated else "stop", text=str(i),
        )
        for i, n in enumerate(LENGTHS)
    ]  # fmt: skip


def denominators(batch, **algorithm):
    plans = make_plans(batch, config(**algorithm), BatchLayout(0, 1))
    return [plan.denominator for plan in plans]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [11, 21]),  # 3 + 5 + 1 + 2 and 4 + 4 + 6 + 7: response tokens alone
        ("sequence-mean-with-constant", [40, 40]),  # 4 responses x the longest response
        ("sequence-mean-token-sum", [4, 4]),
        ("sequence-mean-token-mean", [4, 4]),
    ],
)
def test_denominators_by_hand(aggregation, expected):
    assert denominators(answers(), aggregation=aggregation) == expected


def test_the_constant_may_be_set():
    batch = answers()
    assert denominators(batch, aggregation_constant=3.5) == [14, 14]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [6, 17]),
        ("sequence-mean-with-constant", [30, 30]),
        ("sequence-mean-token-mean", [3, 3]),
    ],
)
def test_dropped_responses_do_not_count(aggregation, expected):
    batch = answers(truncated=(1, 4))  # of 5 and 4 tokens
    dropping = {"aggregation": aggregation, "truncated_responses": "drop"}
    assert denominators(batch, **dropping) == expected
    for setting in ("as-verified", "zero-reward"):
        options = {"aggregation": aggregation, "truncated_responses": setting}
        assert denominators(batch, **options) == denominators(answers(), aggregation=aggregation)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_a_mini_batch_in_which_nothing_trains_is_left_out(aggregation):
    batch = answers(truncated=(0, 1, 2, 3))
    plans = make_plans(
        batch, config(aggregation=aggregation, truncated_responses="drop"), BatchLayout(0, 1)
    )
    assert len(plans) == 1
    assert sorted(plans[0].of_rank(0)) == [4, 5, 6, 7]
    all_truncated = answers(truncated=range(8))
    assert denominators(all_truncated, aggregation=aggregation, truncated_responses="drop") == []


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_response_has_one_place_and_the_denominator_is_global(dp_size):
    plans = make_plans(answers(), config(aggregation="token-mean"), BatchLayout(0, dp_size))
    assert [plan.denominator for plan in plans] == [11, 21]
    for plan, expected in zip(plans, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
        assert responses_of(plan) == expected
        assert len({len(rank) for rank in plan.positions}) == 1


@pytest.mark.parametrize(
    ("setting", "rewards", "advantages"),
    [
        ("zero-reward", [1, 0, 1, 1], [0.5, -0.5, 0, 0]),
        ("as-verified", [1, 1, 1, 1], [0, 0, 0, 0]),
        ("drop", [1, 1, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_what_a_truncated_response_earns(setting, rewards, advantages):
    batch = answers(truncated=(1,))[:4]
    algorithm = AlgorithmConfig(truncated_responses=setting)
    scored = with_rewards(batch, [Score(1.0)] * 4, GROUP, algorithm, most_tokens=16)
    assert [t.reward for t in scored] == rewards
    assert [t.advantage for t in scored] == advantages
    assert all(t.reward == t.advantage == 0 for t in batch)  # the input has not changed


def test_a_length_costs_what_the_configuration_says():
    """The limit is 100 tokens, the last 20 are overlong. The penalty is 0 up to 80, 1/4 at 85, and 1 from 100 on."""
    overlong = AlgorithmConfig(overlong_tokens=20)
    lengths = (1, 80, 85, 100, 130)
    found = [length_penalties(n, 100, overlong) for n in lengths]
    assert found == pytest.approx([0, 0, 0.25, 1, 1])
    both = AlgorithmConfig(overlong_tokens=20, length_penalty=0.4)
    found = [length_penalties(n, 100, both) for n in lengths]
    assert found == pytest.approx([0.004, 0.32, 0.25 + 0.34, 1.4, 1.52])
    assert length_penalties(100, 100, AlgorithmConfig()) == 0


def test_a_penalty_comes_after_what_a_truncated_response_earns_and_before_advantages():
    batch = answers(truncated=(1,))[:2]
    max_tokens = max(t.sampled for t in batch)
    algorithm = AlgorithmConfig(length_penalty=0.5)
    scored = with_rewards(batch, [Score(1.0)] * 2, 2, algorithm, most_tokens=max_tokens)
    expected = [1 - 0.5 * batch[0].sampled / max_tokens, 0 - 0.5 * batch[1].sampled / max_tokens]
    assert [t.reward for t in scored] == pytest.approx(expected)
    difference = expected[0] - expected[1]
    assert [t.advantage for t in scored] == pytest.approx([difference / 2, -difference / 2])
    leave_one_out = AlgorithmConfig(length_penalty=0.5, advantage="leave-one-out")
    scored = with_rewards(batch, [Score(1.0)] * 2, 2, leave_one_out, most_tokens=max_tokens)
    assert [t.advantage for t in scored] == pytest.approx([difference, -difference])


def test_another_number_of_topk_ids_than_asked_for_is_refused():
    check_carried_topk({}, 0)
    with pytest.raises(BatchFormatError, match=mentioning(0, 20)):
        check_carried_topk({}, 20)
    forms = {"topk_ids": Form("int32", (5,)), "topk_log_probs": Form("float32", (5,))}
    check_carried_topk(forms, 5)
    check_carried_topk(forms, 0)
    with pytest.raises(BatchFormatError, match=mentioning(5, 36)):
        check_carried_topk(forms, 36)


def test_a_batch_without_the_scores_of_teachers_is_refused():
    with pytest.raises(BatchFormatError, match="has no teacher_log_probs, expected a batch of a"):
        check_teacher_scores({}, 0)
    scores = {"teacher_log_probs": Form("float32", ())}
    check_teacher_scores(scores, 0)
    topk_forms = {"teacher_topk_ids": Form("int32", (4,))}
    check_teacher_scores(scores | topk_forms, 4)
    with pytest.raises(BatchFormatError, match=mentioning(0, 4)):
        check_teacher_scores(scores, 4)
    with pytest.raises(BatchFormatError, match=mentioning(4, 5)):
        check_teacher_scores(scores | topk_forms, 5)


def gradient_of(packs, aggregation, denominator):
    """Return the gradient of GSPO's loss by a table of logits, with one row for each current token."""
    table = torch.zeros(9, 9, dtype=torch.float64, requires_grad=True)
    token_loss = make_token_loss(build_algorithm("gspo"), aggregation)
    total = torch.zeros((), dtype=torch.float64)
    for batch in packs:
        stats = policy_stats(table[batch.token_ids], batch.target_ids, vocab_size=9)
        total = total + token_loss(stats, batch).loss / denominator
    return torch.autograd.grad(total, table)[0]


def test_gspos_objective_by_hand_and_under_any_packing():
    """The objective's gradient is (1/N) sum_i s_i A_i (1/|y_i|) sum_t grad log pi. With a uniform table, grad log pi of
    token a after token s is 1[a] - 1/9 in row s. So each row is a sum of coefficients times such vectors.
    """
    log_mu = -math.log(9)  # s_i = 1: nothing is clipped
    responses = [
        trajectory([i + 1], [i + 5] * n, advantage=a, rollout_log_probs=[log_mu] * n)
        for i, (n, a) in enumerate([(1, 1.0), (4, -2.0), (3, 9.0)])
    ]  # fmt: skip

    def packed(rows, **options):
        return pack([responses[i] for i in rows], trains=[i != 2 for i in rows], **options)

    grad = gradient_of([packed(range(3))], "sequence-mean-token-mean", 2.0)
    one_hot = torch.eye(9, dtype=torch.float64) - 1 / 9
    expected = torch.zeros(9, 9, dtype=torch.float64)
    expected[1] = -(1.0 / 1 / 2) * one_hot[5]  # the only token of the first response
    expected[2] = -(-2.0 / 4 / 2) * one_hot[6]  # first of the second's four tokens
    expected[6] = -3 * (-2.0 / 4 / 2) * one_hot[6]  # its other three
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-7)
    for packs in ([[0], [1, 2]], [[2, 1, 0]]):
        again = gradient_of(
            [packed(rows, pad_multiple=8) for rows in packs], "sequence-mean-token-mean", 2.0
        )
        torch.testing.assert_close(again, grad, rtol=0, atol=1e-7)
    summed = gradient_of([packed(range(3))], "sequence-mean-token-sum", 2.0)
    torch.testing.assert_close(summed[2], 4 * grad[2], rtol=0, atol=1e-7)


def test_a_mini_batch_is_whole_groups_and_tells_its_cost():
    """Each mini-batch is one prompt. With two prompt tokens each, the lengths are 5 7 | 3 4 | 6 6 | 8 9."""
    one_prompt = Config(
        AlgorithmConfig(), Part(), Part(prompts_per_mini_batch=1, micro_batch_tokens=8)
    )
    plans = make_plans(answers(), one_prompt, BatchLayout(0, 2))
    assert [responses_of(plan) for plan in plans] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [plan.cost for plan in plans] == [12, 7, 12, 17]
    # Both replicas have one sequence. In the first mini-batch they work 5 and 7: 2 of 2 x 7 are idle.
    assert [plan.idle for plan in plans] == pytest.approx([1 / 7, 1 / 8, 0, 1 / 18])
    squares = BatchLayout(0, 1, cost=SequenceCost(0.0, 1.0))
    assert [plan.cost for plan in make_plans(answers(), one_prompt, squares)] == [74, 25, 72, 145]
    assert [len(p.positions[0]) for p in make_plans(answers(), one_prompt, squares)] == [2, 1, 2, 2]


def test_the_layout_bounds_the_number_of_micro_batches():
    one_prompt = Config(AlgorithmConfig(), Part(), Part(prompts_per_mini_batch=1))
    plans = make_plans(answers(), one_prompt, BatchLayout(0, 1, count_multiple=2))
    assert [len(plan.positions[0]) for plan in plans] == [2, 2, 2, 2]


def test_a_rank_packs_its_own_rows_and_what_is_dropped_trains_nothing():
    """With two prompt tokens each, the first four sequences have 5, 7, 3 and 4 tokens. Replica 1 has 0 and 2."""
    batch, algorithm = answers(truncated=(2,)), AlgorithmConfig(truncated_responses="drop")
    plan = MiniBatchPlan([[[1], [3]], [[0], [2]]], 10, 19.0, 0.0)
    mini_batch = pack_mini_batch(batch, plan, BatchLayout(1, 2), algorithm, {})
    assert mini_batch.denominator == 10
    assert [pack.sequence_index.tolist() for pack in mini_batch.micro_batches] == [[0], [2]]
    assert [pack.num_tokens for pack in mini_batch.micro_batches] == [5, 3]  # no padding
    assert [int(pack.loss_mask.sum()) for pack in mini_batch.micro_batches] == [3, 0]
    padded = pack_mini_batch(batch, plan, BatchLayout(0, 2, pad_multiple=4), algorithm, {})
    assert [pack.num_tokens for pack in padded.micro_batches] == [8, 4]
    assert [pack.sequence_index.tolist() for pack in padded.micro_batches] == [[1, -1], [3]]
