"""Properties that hold for any policies, advantages and packings, tested with random ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.algorithms import divergence, rules
from megatron_dppo.algorithms.advantages import group_relative
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.table import PRESETS
from tests.unit.test_divergence import at_topk
from tests.unit.test_policy_loss import complete_inputs, select_rows

SEEDS = st.integers(0, 2**31)
ORDER_DEPENDENT = {"cppo-binary-tv", "cppo-topk-tv", "cppo-binary-kl", "cppo-topk-kl", "minpro"}
"""Presets whose loss depends on a token's position in its response."""
WITHOUT_PENALTY = {"triage": {"repair": 0.0}, "troll": {"regression": 0.0}}
"""Options that remove a preset's penalty, because its gradient depends neither on advantages nor on the mask."""
few_examples = settings(max_examples=15, deadline=None)


def policies(seed, spread, vocab=9, states=20):
    g = torch.Generator().manual_seed(seed)
    both = (torch.randn(states, vocab, generator=g, dtype=torch.float64) * spread for _ in range(2))
    return [logits.log_softmax(-1) for logits in both]


@few_examples
@given(SEEDS, st.sampled_from([1e-6, 0.1, 1.0, 10.0]), st.integers(1, 9))
def test_divergences_are_ordered_and_never_negative(seed, spread, k):
    pi, mu = policies(seed, spread)
    sampled = torch.randint(0, 9, (20,), generator=torch.Generator().manual_seed(seed))
    a, b = (x.gather(1, sampled[:, None])[:, 0] for x in (pi, mu))
    parts = at_topk(pi, mu, sampled, k)
    tv = [divergence.binary_tv(a, b), divergence.topk_tv(*parts), divergence.exact_tv(pi, mu)]
    kl = [divergence.binary_kl(a, b), divergence.topk_kl(*parts), divergence.exact_kl(pi, mu)]
    # The rest of pi is 1 minus a sum. The sum's rounding error, at most 2^-49, changes the logarithm of the rest.
    rest_pi, rest_mu = (
        1 - torch.where(parts[2], x.exp(), 0.0).sum(-1).clamp(max=1) for x in parts[:2]
    )
    rounding = rest_mu * 2.0**-49 / rest_pi.clamp(min=2.0**-50)
    for chain, slack in ((tv, 1e-12), (kl, 1e-12 + rounding)):
        assert (chain[0] >= 0).all()
        assert (chain[0] <= chain[1] + slack).all()
        assert (chain[1] <= chain[2] + slack).all()
    for t, d in zip(tv, kl, strict=True):
        # Pinsker's inequality.
        assert (t.square() <= d / 2 + 1e-12).all()
        assert (t <= 1 + 1e-12).all()
    assert all((f == 0).all() for f in (divergence.binary_tv(b, b), divergence.binary_kl(b, b)))


def gradient(name, x, **options):
    log_probs = x.log_probs.detach().clone().requires_grad_()
    options = WITHOUT_PENALTY.get(name, {}) | options
    sums = policy_loss(build_algorithm(name, options), replace(x, log_probs=log_probs))
    return torch.autograd.grad(sums.loss, log_probs)[0], sums


@pytest.mark.parametrize("name", list(PRESETS))
@few_examples
@given(SEEDS)
def test_the_gradient_is_zero_exactly_where_a_token_is_blocked_or_has_no_advantage(name, seed):
    x = complete_inputs(seed=seed)
    advantages = x.advantages.clone()
    advantages[::5] = 0
    x = replace(x, advantages=advantages)
    grad, sums = gradient(name, x)
    has_no_gradient = ~x.loss_mask | sums.blocked | (advantages == 0)
    assert torch.equal(grad == 0, has_no_gradient)
    assert not (sums.blocked & ~x.loss_mask).any()


@pytest.mark.parametrize("name", list(PRESETS))
@few_examples
@given(SEEDS, st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaled_advantages_scale_the_gradient_and_block_the_same(name, seed, factor):
    x = complete_inputs(seed=seed)
    grad, sums = gradient(name, x)
    scaled, other = gradient(name, replace(x, advantages=x.advantages * factor))
    torch.testing.assert_close(scaled, grad * factor)
    assert torch.equal(sums.blocked, other.blocked)


@pytest.mark.parametrize("name", list(PRESETS))
@few_examples
@given(SEEDS)
def test_order_of_the_tokens_does_not_matter(name, seed):
    x = complete_inputs(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(24, generator=generator)
    if name in ORDER_DEPENDENT:
        # Permute whole responses, and keep the order within each.
        order = torch.arange(24).view(4, 6)[torch.randperm(4, generator=generator)].flatten()
    grad, _ = gradient(name, x)
    shuffled = {}
    for field in x.__dataclass_fields__:
        value = getattr(x, field)
        shuffled[field] = None if value is None else value[order]
    other, _ = gradient(name, type(x)(**shuffled))
    torch.testing.assert_close(other, grad[order])


@pytest.mark.parametrize("name", list(PRESETS))
@few_examples
@given(SEEDS, st.sampled_from([6, 12, 18]))
def test_splits_between_sequences_do_not_matter(name, seed, cut):
    x = complete_inputs(seed=seed)
    grad, _ = gradient(name, x)
    pieces = [gradient(name, select_rows(x, rows))[0] for rows in (slice(0, cut), slice(cut, 24))]
    torch.testing.assert_close(torch.cat(pieces), grad)


@few_examples
@given(SEEDS, st.integers(1, 5), st.integers(1, 6))
def test_advantages_of_permuted_groups_are_permuted_and_sum_to_zero(seed, groups, size):
    g = np.random.default_rng(seed)
    rewards = g.normal(size=(groups, size)).round(3)
    found = group_relative(rewards.ravel().tolist(), size).view(groups, size)
    order, inside = g.permutation(groups), g.permutation(size)
    permuted = group_relative(rewards[order][:, inside].ravel().tolist(), size).view(groups, size)
    torch.testing.assert_close(permuted, found[order.copy()][:, inside.copy()])
    torch.testing.assert_close(found.sum(1), torch.zeros(groups), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        found, torch.tensor(rewards - rewards.mean(1, keepdims=True)).float(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("term", list(rules.PENALTIES.values()))
@few_examples
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
