"""The concentration, an index of how alike a group's responses are: by hand, against gradients, and at its extremes."""

import numpy as np
import pytest
import torch

from megatron_dppo.data.trajectory import Outline, Trajectory
from megatron_dppo.loop.rollout_figures import GroupRow, concentration_of, generated_figures
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.step_table import NormalityCheck

V = 12


def drawn(mu: torch.Tensor, tokens: list[int], k: int = V) -> Trajectory:
    """Return a response of ``tokens`` to one prompt, with log-probabilities and ``k`` TopK entries of ``mu`` [n, V]."""
    top = mu.log().topk(k, -1)
    own = mu.log()[torch.arange(len(tokens)), tokens]
    return Trajectory.of_response(
        [1], tokens, columns={
            "rollout_log_probs": own.float().numpy(),
            "topk_ids": top.indices.int().numpy(),
            "topk_log_probs": top.values.float().numpy(),
        },
    )  # fmt: skip


def policies(count: int, length: int, spread: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    return (spread * torch.randn(count, length, V, generator=g, dtype=torch.float64)).softmax(-1)


def test_two_responses_by_hand():
    """With mu = (1/2, 1/2), v is (1/2, -1/2) for token 0, and -v for token 1. The index of two equal responses is 2,
    that of two opposite ones 0."""
    half = torch.full((1, 2), 0.5, dtype=torch.float64)
    first, second = drawn(half, [0], 2), drawn(half, [1], 2)
    assert concentration_of([first, first]) == pytest.approx(2)
    assert concentration_of([first, second]) == pytest.approx(0)
    # Two equal responses and an opposite one: |v + v - v|^2 / 3 |v|^2 = (1/2) / (3/2).
    assert concentration_of([first, first, second]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("k", [V, 4])
def test_it_is_that_of_the_gradients_by_a_bias_of_the_logits(k):
    """With the whole vocabulary the index is exact. With TopK(mu), the other tokens count as 0."""
    mu = policies(5, 6, spread=2.0)
    tokens = torch.multinomial(mu.flatten(0, 1), 1).view(5, 6)
    group = [drawn(m, t.tolist(), k) for m, t in zip(mu, tokens, strict=True)]
    gradients = []
    for m, t in zip(mu, tokens, strict=True):
        bias = torch.zeros(V, dtype=torch.float64, requires_grad=True)
        log_p = (m.log() + bias).log_softmax(-1)[torch.arange(6), t].sum()
        (gradient,) = torch.autograd.grad(log_p, bias)
        if k < V:
            is_in_topk = torch.zeros(6, V, dtype=torch.bool).scatter_(1, m.topk(k).indices, True)
            is_in_topk[torch.arange(6), t] = True
            gradient = gradient + torch.where(is_in_topk, 0.0, m).sum(0)
        gradients.append(gradient)
    v = torch.stack(gradients)
    expected = v.sum(0).square().sum() / v.square().sum()
    assert concentration_of(group) == pytest.approx(expected.item(), rel=1e-5)


def test_responses_drawn_apart_have_a_mean_near_one_and_equal_ones_the_size_of_their_group():
    mu = policies(1, 40)[0]
    draws = torch.multinomial(
        mu, 8 * 60, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    groups = draws.T.reshape(60, 8, 40)
    values = [concentration_of([drawn(mu, t.tolist()) for t in group]) for group in groups]
    assert np.mean(values) == pytest.approx(1, abs=0.15)
    same = [drawn(mu, groups[0, 0].tolist())] * 8
    assert concentration_of(same) == pytest.approx(8)


def test_it_is_a_figure_of_the_batch_only_where_every_response_has_topk():
    mu = policies(2, 5)
    group = [drawn(m, [1, 2, 3, 4, 5]) for m in mu]
    row = GroupRow.of(group)
    assert GroupRow(*row).concentration == concentration_of(group)
    assert generated_figures([row])[names.CONCENTRATION] == row.concentration
    without_topk = [t.without("topk_ids") for t in group]
    for incomplete_group in (
        without_topk,
        [group[0], without_topk[1]],
        [Outline.of(t) for t in group],
    ):
        assert GroupRow.of(incomplete_group).concentration is None
    assert names.CONCENTRATION not in generated_figures([GroupRow.of(without_topk)])
    both = generated_figures([row, GroupRow.of(without_topk)])
    assert both[names.CONCENTRATION] == row.concentration
    # If mu is 1 for every sampled token, each v is 0, and the group has no index.
    certain = torch.eye(V, dtype=torch.float64)[:1]
    assert concentration_of([drawn(certain, [0], 1)] * 3) is None


def test_a_group_of_equal_responses_is_a_warning_of_the_step():
    """Three equal responses have the index 3, above the normal range; with one opposite response it is 1/3."""
    half = torch.full((1, 2), 0.5, dtype=torch.float64)
    equal, opposite = drawn(half, [0], 2), drawn(half, [1], 2)
    for group, is_normal in (([equal] * 3, False), ([equal, equal, opposite], True)):
        figures = generated_figures([GroupRow.of(group)])
        assert (names.CONCENTRATION in NormalityCheck("float32").compare(figures)) is not is_normal
