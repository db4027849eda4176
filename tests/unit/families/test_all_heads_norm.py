"""The norm of all heads against torch's own operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.families.shared.all_heads_norm.trainer import _Norm
from tests.unit.rank_threads import on_ranks

EPS = 1e-5


class OneRank:
    """The tensor-parallel group of a single rank."""

    def size(self) -> int:
        return 1


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [7 tokens, 1, 3 heads, 5], its weights [15], and a gradient of the output."""
    torch.manual_seed(0)
    x = torch.randn(7, 1, 3, 5, dtype=dtype, requires_grad=True)
    weight = (1 + 0.1 * torch.randn(15, dtype=dtype)).requires_grad_()
    return x, weight, torch.randn(7, 1, 3, 5, dtype=dtype)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.flatten(-2), (15,), weight, EPS).view_as(x)


def results(norm, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output, and the gradients of the input and the weight."""
    x, weight, gradient = inputs(dtype)
    output = norm(x, weight)
    output.backward(gradient)
    return [output.detach(), x.grad, weight.grad]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_values_and_gradients_are_those_of_torch(dtype, tolerance):
    actual_results = results(lambda x, weight: _Norm.apply(x, weight, EPS, 15, OneRank()), dtype)
    for actual, expected in zip(actual_results, results(torch_norm, dtype), strict=True):
        assert actual.dtype == expected.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_a_frozen_weight_has_no_gradient():
    x, weight, gradient = inputs(torch.float32)
    _Norm.apply(x, weight.detach(), EPS, 15, OneRank()).backward(gradient)
    expected, _, _ = inputs(torch.float32)
    torch_norm(expected, weight.detach()).backward(gradient)
    torch.testing.assert_close(x.grad, expected.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("eps", [EPS, 10.0])
def test_ranks_with_a_share_of_the_heads_have_one_mean(eps: float) -> None:
    """The two ranks' outputs and gradients are the parts of the whole norm's outputs and gradients."""
    torch.manual_seed(1)
    x, weight, gradient = torch.randn(7, 1, 4, 5), torch.randn(20), torch.randn(7, 1, 4, 5)

    def run(group: torch.distributed.ProcessGroup) -> list[torch.Tensor]:
        own_x, own_weight, own_gradient = (
            whole.chunk(2, dim)[group.rank()].clone()
            for whole, dim in ((x, 2), (weight, 0), (gradient, 2))
        )
        own_x.requires_grad_()
        own_weight.requires_grad_()
        output = _Norm.apply(own_x, own_weight, eps, 20, group)
        output.backward(own_gradient)
        return [output.detach(), own_x.grad, own_weight.grad]

    outputs, input_gradients, weight_gradients = zip(*on_ranks(2, run), strict=True)
    x.requires_grad_()
    weight.requires_grad_()
    expected = F.rms_norm(x.flatten(-2), (20,), weight, eps).view_as(x)
    expected.backward(gradient)
    torch.testing.assert_close(torch.cat(outputs, 2), expected)
    torch.testing.assert_close(torch.cat(input_gradients, 2), x.grad)
    torch.testing.assert_close(torch.cat(weight_gradients), weight.grad)
