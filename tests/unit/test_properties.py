"""What must hold of any policies, advantages and packings: properties tried on random ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.algorithms import divergence, penalties
from megatron_dppo.algorithms.advantages import group_relative
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.presets import PRESETS, build_algorithm
from tests.unit.test_divergence import at_topk
from tests.unit.test_policy_loss import complete_inputs, part
from tests.unit.token_inputs import inputs

SEEDS = st.integers(0, 2**31)
few = settings(max_examples=15, deadline=None)


def policies(seed, spread, vocab=9, states=20):
    g = torch.Generator().manual_seed(seed)
    made = (torch.randn(states, vocab, generator=g, dtype=torch.float64) * spread for _ in range(2))
    return [logits.log_softmax(-1) for logits in made]


@few
@given(SEEDS, st.sampled_from([1e-6, 0.1, 1.0, 10.0]), st.integers(1, 9))
def test_divergences_are_ordered_and_never_negative(seed, spread, k):
    pi, mu = policies(seed, spread)
    sampled = torch.randint(0, 9, (20,), generator=torch.Generator().manual_seed(seed))
    a, b = (x.gather(1, sampled[:, None])[:, 0] for x in (pi, mu))
    parts = at_topk(pi, mu, sampled, k)
    tv = [divergence.binary_tv(a, b), divergence.topk_tv(*parts), divergence.exact_tv(pi, mu)]
    kl = [divergence.binary_kl(a, b), divergence.topk_kl(*parts), divergence.exact_kl(pi, mu)]
    for chain in (tv, kl):
        assert (chain[0] >= 0).all()
        assert (chain[0] <= chain[1] + 1e-12).all()
        assert (chain[1] <= chain[2] + 1e-12).all()
    for t, d in zip(tv, kl, strict=True):
        assert (t.square() <= d / 2 + 1e-12).all()
        assert (t <= 1 + 1e-12).all()
    assert all((f == 0).all() for f in (divergence.binary_tv(b, b), divergence.binary_kl(b, b)))


def gradient(name, x, **options):
    log_probs = x.log_probs.detach().clone().requires_grad_()
    sums = policy_loss(build_algorithm(name, options), replace(x, log_probs=log_probs))
    return torch.autograd.grad(sums.loss, log_probs)[0], sums


@pytest.mark.parametrize("name", list(PRESETS))
@few
@given(SEEDS)
def test_the_gradient_is_zero_exactly_where_a_token_is_blocked_or_has_no_advantage(name, seed):
    x = complete_inputs(seed=seed)
    advantages = x.advantages.clone()
    advantages[::5] = 0
    x = replace(x, advantages=advantages)
    grad, sums = gradient(name, x)
    still = ~x.loss_mask | sums.blocked | (advantages == 0)
    assert torch.equal(grad == 0, still)
    assert not (sums.blocked & ~x.loss_mask).any()


@pytest.mark.parametrize("name", list(PRESETS))
@few
@given(SEEDS, st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaled_advantages_scale_the_gradient_and_block_the_same(name, seed, factor):
    x = complete_inputs(seed=seed)
    grad, sums = gradient(name, x)
    scaled, other = gradient(name, replace(x, advantages=x.advantages * factor))
    torch.testing.assert_close(scaled, grad * factor)
    assert torch.equal(sums.blocked, other.blocked)


@pytest.mark.parametrize("name", list(PRESETS))
@few
@given(SEEDS)
def test_order_of_the_tokens_does_not_matter(name, seed):
    x = complete_inputs(seed=seed)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    grad, _ = gradient(name, x)
    shuffled = {
        f: None if (v := getattr(x, f)) is None else v[order] for f in x.__dataclass_fields__
    }
    other, _ = gradient(name, type(x)(**shuffled))
    torch.testing.assert_close(other, grad[order])


@pytest.mark.parametrize("name", list(PRESETS))
@few
@given(SEEDS, st.sampled_from([6, 12, 18]))
def test_splits_between_sequences_do_not_matter(name, seed, cut):
    x = complete_inputs(seed=seed)
    grad, _ = gradient(name, x)
    pieces = [gradient(name, part(x, rows))[0] for rows in (slice(0, cut), slice(cut, 24))]
    torch.testing.assert_close(torch.cat(pieces), grad)


@few
@given(SEEDS, st.integers(1, 5), st.integers(1, 6))
def test_advantages_of_permuted_groups_are_permuted_and_sum_to_zero(seed, groups, size):
    g = np.random.default_rng(seed)
    rewards = g.normal(size=(groups, size)).round(3)
    found = group_relative(rewards.ravel(), size).view(groups, size)
    order, inside = g.permutation(groups), g.permutation(size)
    again = group_relative(rewards[order][:, inside].ravel(), size).view(groups, size)
    torch.testing.assert_close(again, found[order.copy()][:, inside.copy()])
    torch.testing.assert_close(found.sum(1), torch.zeros(groups), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        found, torch.tensor(rewards - rewards.mean(1, keepdims=True)).float(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("term", list(penalties.PENALTIES.values()))
@few
@given(SEEDS)
def test_a_penaltys_slope_is_its_derivative(term, seed):
    g = torch.Generator().manual_seed(seed)
    at = torch.randn(8, generator=g, dtype=torch.float64)
    value, slope = term(at)
    step = 1e-6
    numeric = (term(at + step)[0] - term(at - step)[0]) / (2 * step)
    torch.testing.assert_close(slope, numeric, rtol=1e-6, atol=1e-8)
    assert (value >= 0).all()
    assert [x.tolist() for x in term(torch.zeros(1))] == [[0.0], [0.0]]


def test_penalties_by_hand_and_for_blocked_tokens_too():
    # r = 1.5 and 0.5, both with A = 1; TV .25 blocks the first at a threshold of .2.
    x = inputs([0.75, 0.25, 0.25], [0.5] * 3, [1.0, 1.0, 1.0], loss_mask=[True, True, False])
    grad, sums = gradient("dppo-binary-tv", x, tv_threshold=0.2, kl_coefficient=0.1)
    torch.testing.assert_close(grad, torch.tensor([0.05, -0.5 - 0.05, 0.0], dtype=torch.float64))
    kl = 0.1 * ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5)))
    assert sums.metrics.values()["loss/penalty"] == pytest.approx(kl)
    assert sums.metrics.values()["loss/sum"] == pytest.approx(-0.5)
    assert sums.loss.item() == pytest.approx(-0.5 + kl)
    grad, sums = gradient("pg-is", x, log_ratio_coefficient=0.2)
    expected = [-1.5 + 0.2 * math.log(1.5), -0.5 + 0.2 * math.log(0.5), 0.0]
    assert grad.tolist() == pytest.approx(expected)
    both = gradient("pg-is", x, log_ratio_coefficient=0.2, kl_coefficient=0.1)[0]
    only = gradient("pg-is", x, kl_coefficient=0.1)[0] - gradient("pg-is", x)[0]
    torch.testing.assert_close(both, grad + only)
    assert "loss/penalty" not in gradient("pg-is", x)[1].metrics.values()


def test_a_scale_multiplies_value_and_gradient_of_each_token_but_not_the_metrics():
    x = inputs([0.75, 0.25], [0.5, 0.5], [1.0, 1.0])
    algorithm = build_algorithm("pg-is", {"kl_coefficient": 0.1})
    plain = policy_loss(algorithm, x)
    scaled = policy_loss(algorithm, x, torch.tensor([2.0, 0.0], dtype=torch.float64))
    first = torch.autograd.grad(plain.loss, x.log_probs)[0]
    (grad,) = torch.autograd.grad(scaled.loss, x.log_probs)
    torch.testing.assert_close(grad, first * torch.tensor([2.0, 0.0], dtype=torch.float64))
    assert scaled.loss.item() == pytest.approx(2 * (-1.5 + 0.1 * (0.5 - math.log(1.5))))
    assert scaled.metrics.values() == plain.metrics.values()
    single = inputs([0.5], [0.5], [1.0], dtype=torch.float32)
    assert policy_loss(algorithm, single, torch.ones(1).double()).loss.dtype == torch.float32
