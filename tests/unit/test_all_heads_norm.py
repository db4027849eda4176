"""The norm of all heads against torch's own operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.trainer.all_heads_norm import _Norm

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
