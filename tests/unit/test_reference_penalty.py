"""The penalty on leaving a reference policy: hand-worked values, its gradient, and that nothing else changes."""

import math

import pytest
import torch

from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.presets import build_algorithm
from megatron_dppo.algorithms.reference import REFERENCE_KL, k3, reference_penalty

PI = torch.tensor([0.5, 0.2, 0.25])
REFERENCE = torch.tensor([0.25, 0.4, 0.25])


def test_k3_by_hand():
    value, slope = k3(PI.log(), REFERENCE.log())
    # reference / pi is 1/2, 2, 1.
    expected = [0.5 - 1 - math.log(0.5), 2 - 1 - math.log(2), 0.0]
    assert value.tolist() == pytest.approx(expected, abs=1e-6)
    assert slope.tolist() == pytest.approx([0.5, -1.0, 0.0], abs=1e-6)


def test_its_mean_under_pi_is_the_divergence():
    pi, reference = (torch.rand(7, dtype=torch.float64).softmax(0) for _ in range(2))
    mean = (pi * k3(pi.log(), reference.log())[0]).sum()
    exact = (pi * (pi.log() - reference.log())).sum()
    assert mean == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize("scale", [None, torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)])
def test_it_is_added_to_the_loss_of_tokens_in_the_mask(scale):
    log_probs = PI.log().requires_grad_()
    mask = torch.tensor([True, True, False])
    inputs = TokenInputs(log_probs, PI.log(), torch.ones(3), mask)
    plain = policy_loss(build_algorithm("dppo-binary-tv"), inputs, scale)
    reference = REFERENCE.log()
    reference[2] = math.nan  # outside the mask: not looked at
    total = reference_penalty(0.1)(plain, inputs, reference, scale)
    value, slope = k3(PI.log(), REFERENCE.log())
    factor = torch.ones(3) if scale is None else scale.float()
    added = 0.1 * (value * factor)[:2].sum()
    assert float(total.loss.detach() - plain.loss.detach()) == pytest.approx(float(added), rel=1e-5)
    (with_penalty,) = torch.autograd.grad(total.loss, log_probs, retain_graph=True)
    (without,) = torch.autograd.grad(plain.loss, log_probs)
    expected = 0.1 * slope * factor * mask
    assert torch.allclose(with_penalty - without, expected, atol=1e-6)
    assert total.blocked is plain.blocked
    assert float(total.metrics.sums[REFERENCE_KL]) == pytest.approx(float(value[:2].sum()))
    shared = {k: v for k, v in total.metrics.sums.items() if k != REFERENCE_KL}
    assert shared == dict(plain.metrics.sums)


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
