"""Penalties, which are added to a token's loss, and scales, which multiply it: values worked by hand."""

import math

import pytest
import torch

from megatron_dppo.algorithms import rules
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.policy_loss import policy_loss
from tests.unit.token_inputs import inputs


def gradient(name, x, **options):
    sums = policy_loss(build_algorithm(name, options), x)
    return torch.autograd.grad(sums.loss, x.log_probs)[0], sums


def test_each_penalty_gives_its_value_and_its_derivative():
    log_ratio = torch.tensor([0.0, math.log(2), -1.0], dtype=torch.float64)
    value, slope = rules.kl(log_ratio)
    assert value.tolist() == pytest.approx([0, 1 - math.log(2), 1 / math.e])
    assert slope.tolist() == pytest.approx([0, 1, 1 / math.e - 1])
    value, slope = rules.squared_log_ratio(log_ratio)
    assert value.tolist() == pytest.approx([0, math.log(2) ** 2 / 2, 0.5])
    assert slope.tolist() == pytest.approx([0, math.log(2), -1])


def test_penalties_by_hand_and_for_blocked_tokens_too():
    # r = 1.5 and 0.5, both with A = 1 and TV .25. The threshold .2 blocks the first token only, because its r is
    # above 1.
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
    kl_part = gradient("pg-is", x, kl_coefficient=0.1)[0] - gradient("pg-is", x)[0]
    torch.testing.assert_close(both, grad + kl_part)
    assert "loss/penalty" not in gradient("pg-is", x)[1].metrics.values()


def test_a_scale_multiplies_value_and_gradient_of_each_token_but_not_the_metrics():
    x = inputs([0.75, 0.25], [0.5, 0.5], [1.0, 1.0])
    algorithm = build_algorithm("pg-is", {"kl_coefficient": 0.1})
    plain = policy_loss(algorithm, x)
    scaled = policy_loss(algorithm, x, torch.tensor([2.0, 0.0], dtype=torch.float64))
    plain_grad = torch.autograd.grad(plain.loss, x.log_probs)[0]
    (grad,) = torch.autograd.grad(scaled.loss, x.log_probs)
    torch.testing.assert_close(grad, plain_grad * torch.tensor([2.0, 0.0], dtype=torch.float64))
    assert scaled.loss.item() == pytest.approx(2 * (-1.5 + 0.1 * (0.5 - math.log(1.5))))
    assert scaled.metrics.values() == plain.metrics.values()
    single = inputs([0.5], [0.5], [1.0], dtype=torch.float32)
    assert policy_loss(algorithm, single, torch.ones(1).double()).loss.dtype == torch.float32
