"""Optimiser steps of a rollout batch: what divides each loss, worked by hand."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms.aggregation import AGGREGATIONS
from megatron_dppo.algorithms.presets import build_algorithm
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.packing import TrainingSample, pack
from megatron_dppo.loop.batches import BatchLayout, plan_mini_batches
from megatron_dppo.loop.learning import check_carried_topk
from megatron_dppo.loop.rollouts.sources import verify
from megatron_dppo.trainer.token_loss import make_token_loss
from megatron_dppo.types import Problem, Rollout
from megatron_dppo.vocab_parallel import policy_stats

GROUP = 2
LENGTHS = [3, 5, 1, 2, 4, 4, 6, 7]
"""Response tokens: four prompts, two responses each."""


@dataclass
class Part:
    """A section of the configuration with what planning reads."""

    group_size: int = GROUP
    max_response_tokens: int = 10
    prompts_per_mini_batch: int = 2
    micro_batch_tokens: int = 20


@dataclass
class Config:
    """As ``TrainConfig``, without the files that one names."""

    algorithm: AlgorithmConfig
    rollout: Part
    training: Part
    router_replay: bool = False


def config(**algorithm):
    return Config(AlgorithmConfig(**algorithm), Part(), Part())


def rollouts(truncated=()):
    return [
        Rollout(
            problem_id=i // GROUP, sample_index=i % GROUP, prompt_ids=[1, 2],
            response_ids=[3] * n, rollout_log_probs=[-1.0] * n,
            finish_reason="length" if i in truncated else "stop", text=str(i),
        )
        for i, n in enumerate(LENGTHS)
    ]  # fmt: skip


def denominators(batch, **algorithm):
    plans = plan_mini_batches(batch, config(**algorithm), BatchLayout(0, 1))
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
    assert denominators(rollouts(), aggregation=aggregation) == expected


def test_the_constant_may_be_set():
    batch = rollouts()
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
    batch = rollouts(truncated=(1, 4))  # of 5 and 4 tokens
    dropping = {"aggregation": aggregation, "truncated_responses": "drop"}
    assert denominators(batch, **dropping) == expected
    for kept in ("as-verified", "zero-reward"):
        own = {"aggregation": aggregation, "truncated_responses": kept}
        assert denominators(batch, **own) == denominators(rollouts(), aggregation=aggregation)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_a_mini_batch_in_which_nothing_trains_is_left_out(aggregation):
    batch = rollouts(truncated=(0, 1, 2, 3))
    plans = plan_mini_batches(
        batch, config(aggregation=aggregation, truncated_responses="drop"), BatchLayout(0, 1)
    )
    assert len(plans) == 1
    assert sorted(plans[0].of_rank(0)) == [4, 5, 6, 7]
    every = rollouts(truncated=range(8))
    assert denominators(every, aggregation=aggregation, truncated_responses="drop") == []


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_response_has_one_place_and_the_denominator_is_global(dp_size):
    plans = plan_mini_batches(rollouts(), config(aggregation="token-mean"), BatchLayout(0, dp_size))
    assert [plan.denominator for plan in plans] == [11, 21]
    for plan, expected in zip(plans, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
        placed = [i for rank in plan.positions for rows in rank for i in rows]
        assert sorted(placed) == expected
        assert len({len(rank) for rank in plan.positions}) == 1


class Answers:
    """A verifier that scores every response 1."""

    def score(self, pairs):
        @dataclass
        class Score:
            value: float

        return [Score(1.0) for _ in pairs]


@pytest.mark.parametrize(
    ("setting", "rewards", "advantages"),
    [
        ("zero-reward", [1, 0, 1, 1], [0.5, -0.5, 0, 0]),
        ("as-verified", [1, 1, 1, 1], [0, 0, 0, 0]),
        ("drop", [1, 1, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_what_a_truncated_response_earns(setting, rewards, advantages):
    batch = rollouts(truncated=(1,))[:4]
    problems = [Problem(i, "p", "a", (1,)) for i in range(2)]
    verify(batch, problems, GROUP, config(truncated_responses=setting), Answers())
    assert [r.reward for r in batch] == rewards
    assert [r.advantage for r in batch] == advantages


def test_another_number_of_topk_ids_than_asked_for_is_refused():
    batch = rollouts()[:2]
    check_carried_topk(batch, 0)
    with pytest.raises(ValueError, match=r"problem 0, sample 0: 0 Top-K ids .* expected 20"):
        check_carried_topk(batch, 20)
    for rollout in batch:
        rollout.topk_ids = np.zeros((len(rollout.response_ids), 5), np.int32)
    check_carried_topk(batch, 5)
    check_carried_topk(batch, 0)
    with pytest.raises(ValueError, match="5 Top-K ids for each token, expected 36"):
        check_carried_topk(batch, 36)


def gradient_of(packs, aggregation, denominator):
    """Of a table of logits by the current token, under gspo."""
    table = torch.zeros(9, 9, dtype=torch.float64, requires_grad=True)
    token_loss = make_token_loss(build_algorithm("gspo"), aggregation)
    total = torch.zeros((), dtype=torch.float64)
    for batch in packs:
        stats = policy_stats(table[batch.token_ids], batch.target_ids, vocab_size=9)
        total = total + token_loss(stats, batch).loss / denominator
    return torch.autograd.grad(total, table)[0]


def test_gspos_objective_by_hand_and_under_any_packing():
    """(1/N) sum_i s_i A_i (1/|y_i|) sum_t grad log pi; at a uniform table each grad log pi of token
    a in state s is (1[a] - 1/9), so a state's row adds up coefficients.
    """
    log_mu = -math.log(9)  # s_i = 1: nothing is clipped
    made = [
        TrainingSample(prompt_ids=[i + 1], response_ids=[i + 5] * n, advantage=a,
                       rollout_log_probs=[log_mu] * n, recomputed_log_probs=None, topk_ids=None,
                       topk_log_probs=None, index=i, train=i != 2)
        for i, (n, a) in enumerate([(1, 1.0), (4, -2.0), (3, 9.0)])
    ]  # fmt: skip
    grad = gradient_of([pack(made)], "sequence-mean-token-mean", 2.0)
    one_hot = torch.eye(9, dtype=torch.float64) - 1 / 9
    expected = torch.zeros(9, 9, dtype=torch.float64)
    expected[1] = -(1.0 / 1 / 2) * one_hot[5]  # the only token of the first response
    expected[2] = -(-2.0 / 4 / 2) * one_hot[6]  # first of the second's four tokens
    expected[6] = -3 * (-2.0 / 4 / 2) * one_hot[6]  # its other three
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-7)
    for packs in ([[made[0]], [made[1], made[2]]], [[made[2], made[1], made[0]]]):
        again = gradient_of(
            [pack(p, pad_multiple=8) for p in packs], "sequence-mean-token-mean", 2.0
        )
        torch.testing.assert_close(again, grad, rtol=0, atol=1e-7)
    summed = gradient_of([pack(made)], "sequence-mean-token-sum", 2.0)
    torch.testing.assert_close(summed[2], 4 * grad[2], rtol=0, atol=1e-7)
