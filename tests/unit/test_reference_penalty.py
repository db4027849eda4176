"""The penalty on the distance from a reference policy: values by hand, means by enumeration, and the rest of the loss,
which must not change."""

import math
from typing import get_args

import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import LossSums, policy_loss
from megatron_dppo.algorithms.reference_penalty import ESTIMATORS, k3, reference_penalty
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.sums import MetricSums

PI = torch.tensor([0.5, 0.2, 0.25])
REFERENCE = torch.tensor([0.25, 0.4, 0.25])


def test_k3_by_hand():
    value, slope = k3(REFERENCE.log() - PI.log())
    # reference / pi is 1/2, 2, 1.
    expected = [0.5 - 1 - math.log(0.5), 2 - 1 - math.log(2), 0.0]
    assert value.tolist() == pytest.approx(expected, abs=1e-6)
    assert slope.tolist() == pytest.approx([0.5, -1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("k1-on-policy", [math.log(2), -math.log(2), 0], [math.log(2), -math.log(2), 0]),
        ("k2", [math.log(2) ** 2 / 2] * 2 + [0], [math.log(2), -math.log(2), 0]),
        ("k3-on-policy", [math.log(2) - 0.5, 1 - math.log(2), 0], [math.log(2), -math.log(2), 0]),
        ("reverse-k3-on-policy", [0.5 - math.log(2) / 2, 2 * math.log(2) - 1, 0], [0.5, -1.0, 0]),
    ],
)
def test_the_other_estimators_by_hand(name, value, slope):
    """Compare each token, because a wrong term whose mean is 0 does not change the means."""
    got = ESTIMATORS[name](REFERENCE.log() - PI.log())
    assert [x.tolist() for x in got] == [pytest.approx(x, abs=1e-6) for x in (value, slope)]


def forward_kl(pi, reference):
    return (pi.exp() * (pi - reference)).sum()


def reverse_kl(pi, reference):
    return (reference.exp() * (reference - pi)).sum()


def half_square(pi, reference):
    return (pi.exp() * (reference - pi).square() / 2).sum()


# estimator -> (its mean under pi, the divergence whose gradient its mean gradient is)
MEANINGS = {
    "k1-on-policy": (forward_kl, forward_kl),
    "k2": (half_square, forward_kl),
    "k3": (forward_kl, reverse_kl),
    "k3-on-policy": (forward_kl, forward_kl),
    "reverse-k3-on-policy": (reverse_kl, reverse_kl),
}


def expected_penalty(name, sampler, logits, reference, weight_cap):
    """Return the mean penalty under ``sampler``, a sum over all ids with their probabilities, and its gradient."""
    log_probs = logits.log_softmax(0)
    all_tokens = torch.ones(len(logits), dtype=torch.bool)
    no_loss = LossSums(torch.zeros((), dtype=torch.float64), MetricSums())
    inputs = TokenInputs(log_probs, sampler, torch.zeros_like(sampler), all_tokens)
    total = reference_penalty(1.0, name, weight_cap)(no_loss, inputs, reference, sampler.exp())
    return total.loss, torch.autograd.grad(total.loss, logits)[0]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("is_off_policy", [False, True])
def test_means_by_enumeration(name, is_off_policy):
    """Value and gradient have the documented means under pi and, with importance weights, under mu."""
    g = torch.Generator().manual_seed(5)
    logits, reference, mu = torch.randn(3, 6, generator=g, dtype=torch.float64) * 1.5
    logits.requires_grad_()
    reference, mu = reference.log_softmax(0), mu.log_softmax(0)
    sampler = mu if is_off_policy else logits.detach().log_softmax(0)
    value, gradient = expected_penalty(
        name, sampler, logits, reference, math.inf if is_off_policy else None
    )
    divergence, minimized = MEANINGS[name]
    assert float(value.detach()) == pytest.approx(
        float(divergence(logits.detach().log_softmax(0), reference)), abs=1e-12
    )
    (expected,) = torch.autograd.grad(minimized(logits.log_softmax(0), reference), logits)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)


def test_the_two_directions_part_and_unweighted_tokens_of_mu_are_neither():
    g = torch.Generator().manual_seed(5)
    logits, reference, mu = torch.randn(3, 6, generator=g, dtype=torch.float64) * 1.5
    logits.requires_grad_()
    reference, mu = reference.log_softmax(0), mu.log_softmax(0)
    forward, reverse = (
        torch.autograd.grad(f(logits.log_softmax(0), reference), logits)[0]
        for f in (forward_kl, reverse_kl)
    )
    assert torch.cosine_similarity(forward, reverse, dim=0) < 0.9
    for name in ESTIMATORS:
        unweighted = expected_penalty(name, mu, logits, reference, None)[1]
        assert min((unweighted - x).abs().max() for x in (forward, reverse)) > 0.05


def test_weights_are_capped():
    pi, mu = PI.log().requires_grad_(), torch.tensor([0.1, 0.2, 0.5]).log()
    inputs = TokenInputs(pi, mu, torch.zeros(3), torch.ones(3, dtype=torch.bool))
    no_loss = LossSums(torch.zeros(()), MetricSums())
    total = reference_penalty(2.0, "k2", 3.0)(no_loss, inputs, REFERENCE.log(), None)
    (gradient,) = torch.autograd.grad(total.loss, pi)
    # pi / mu is 5 (capped at 3), 1, 1/2; log pi / reference is log 2, -log 2, 0.
    assert gradient.tolist() == pytest.approx(
        [6 * math.log(2), -2 * math.log(2), 0.0], rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("weight_cap", [None, math.inf])
def test_a_token_that_pi_has_left_is_bounded_and_counted(name, weight_cap):
    """Three log-ratios are 120, 20.5 and 20. e^120 overflows float32. Values above 20 are clamped and counted."""
    log_probs = torch.tensor([-121.0, -21.5, -21.0, -0.5, -0.5, -0.5], requires_grad=True)
    inputs = TokenInputs(
        log_probs, torch.full((6,), -1.0), torch.zeros(6), torch.tensor([True] * 6)
    )
    no_loss = LossSums(torch.zeros(()), MetricSums())
    reference = torch.tensor([-1.0, -1.0, -1.0, -0.5, -0.5, -0.5])
    total = reference_penalty(1.0, name, weight_cap)(no_loss, inputs, reference, None)
    (gradient,) = torch.autograd.grad(total.loss, log_probs)
    assert total.loss.isfinite()
    assert gradient.square().sum().isfinite()
    assert gradient[0] <= (-10 if weight_cap is None else 0)  # still towards the reference
    torch.testing.assert_close(
        total.metrics.sums[names.REFERENCE_CLAMPED], torch.tensor(2, dtype=torch.float64)
    )


def test_every_estimator_can_be_configured():
    field = AlgorithmConfig.model_fields["reference_estimator"]
    assert set(get_args(field.annotation)) == set(ESTIMATORS)


@pytest.mark.parametrize("scale", [None, torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)])
def test_it_is_added_to_the_loss_of_tokens_in_the_mask(scale):
    log_probs = PI.log().requires_grad_()
    mask = torch.tensor([True, True, False])
    inputs = TokenInputs(log_probs, PI.log(), torch.ones(3), mask)
    plain = policy_loss(build_algorithm("dppo-binary-tv"), inputs, scale)
    reference = REFERENCE.log()
    reference[2] = math.nan  # outside the mask, so it must not be read
    total = reference_penalty(0.1)(plain, inputs, reference, scale)
    value, slope = k3(REFERENCE.log() - PI.log())
    factor = torch.ones(3) if scale is None else scale.float()
    added = 0.1 * (value * factor)[:2].sum()
    assert float(total.loss.detach() - plain.loss.detach()) == pytest.approx(float(added), rel=1e-5)
    (with_penalty,) = torch.autograd.grad(total.loss, log_probs, retain_graph=True)
    (without,) = torch.autograd.grad(plain.loss, log_probs)
    expected = 0.1 * slope * factor * mask
    assert torch.allclose(with_penalty - without, expected, atol=1e-6)
    assert total.blocked is plain.blocked
    assert float(total.metrics.sums[names.REFERENCE_KL]) == pytest.approx(float(value[:2].sum()))
    penalty_metrics = (names.REFERENCE_KL, names.REFERENCE_CLAMPED)
    other_metrics = {k: v for k, v in total.metrics.sums.items() if k not in penalty_metrics}
    assert other_metrics == dict(plain.metrics.sums)


def test_what_is_impossible_outside_the_mask_changes_nothing():
    log_probs = torch.tensor([math.log(0.5), -math.inf], requires_grad=True)
    mask = torch.tensor([True, False])
    inputs = TokenInputs(log_probs, torch.full((2,), math.log(0.5)), torch.ones(2), mask)
    plain = policy_loss(build_algorithm("dppo-binary-tv"), inputs)
    reference = torch.full((2,), math.log(0.25))
    total = reference_penalty(0.1)(plain, inputs, reference, None)
    added = 0.1 * (0.5 - 1 + math.log(2))  # reference / pi is 1/2
    assert float(total.loss.detach() - plain.loss.detach()) == pytest.approx(added, rel=1e-5)
    (gradient,) = torch.autograd.grad(total.loss - plain.loss, log_probs)
    assert gradient.tolist() == pytest.approx([0.1 * (1 - 0.5), 0.0])
