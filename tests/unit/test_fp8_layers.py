"""The emulated W8A8 layers of a CPU server, against products in float64 of independently rounded operands."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_dppo.block_fp8 import DTYPE, quantize
from megatron_dppo.cpu.engine.block_fp8_layers import dispatch_linear, experts_output
from megatron_dppo.model.quantization import BLOCK

TOKENS, HIDDEN, INNER = 6, 2 * BLOCK, BLOCK


def round_activations(x: Tensor) -> Tensor:
    """Return ``x`` rounded to FP8, in float64. Each group of 128 columns is scaled so that its maximum becomes 448."""
    groups = []
    for group in x.double().split(BLOCK, -1):
        scale = group.abs().amax(-1, keepdim=True) / 448
        groups.append((group / scale).float().to(DTYPE).double() * scale)
    return torch.cat(groups, -1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in float64, with both operands rounded to FP8."""
    values, scales = quantize(weight)
    whole = values.double() * torch.kron(scales.double(), torch.ones(BLOCK, BLOCK).double())
    return round_activations(x) @ whole.T


def bf16(*dims: int) -> Tensor:
    return torch.randn(*dims).to(torch.bfloat16)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    scale = expected.abs().max()
    # An activation near the middle of two FP8 numbers may be rounded to the other one.
    assert (got.double() - expected).abs().mean() < 2e-3 * scale
    assert (got.double() - expected).abs().max() < 2e-2 * scale


def test_a_linear_layer() -> None:
    torch.manual_seed(0)
    x, weight, bias = bf16(2, TOKENS, HIDDEN), bf16(INNER, HIDDEN), bf16(INNER)
    values, scales = quantize(weight)
    linear = dispatch_linear([BLOCK, BLOCK])
    got = linear(x, values, [BLOCK, BLOCK], scales, bias=bias)
    assert got.shape == (2, TOKENS, INNER)
    assert_near(got, product(x, weight) + bias.double())
    # The product without any rounding is at least ten times farther from the result.
    plain = x.double() @ weight.double().T + bias.double()
    error = (got.double() - product(x, weight) - bias.double()).abs().mean()
    assert error < 0.1 * (got.double() - plain).abs().mean()


def test_experts() -> None:
    torch.manual_seed(1)
    x = bf16(TOKENS, HIDDEN)
    w13 = [bf16(2 * INNER, HIDDEN) / 16 for _ in range(3)]
    w2 = [bf16(HIDDEN, INNER) / 16 for _ in range(3)]
    layer = SimpleNamespace(
        w13_weight=torch.stack([quantize(w).values for w in w13]),
        w13_weight_scale_inv=torch.stack([quantize(w).scales for w in w13]),
        w2_weight=torch.stack([quantize(w).values for w in w2]),
        w2_weight_scale_inv=torch.stack([quantize(w).scales for w in w2]),
    )
    experts = torch.tensor([[0, 1], [1, 0], [2, 1], [0, 2], [1, 2], [2, 0]])
    weights = torch.rand(TOKENS, 2)
    got = experts_output(layer, x, weights, experts)
    expected = torch.zeros(TOKENS, HIDDEN).double()
    for token in range(TOKENS):
        for expert, weight in zip(experts[token].tolist(), weights[token].double(), strict=True):
            gate, up = product(x[token], w13[expert]).to(torch.bfloat16).double().chunk(2)
            inner = (gate * gate.sigmoid() * up).to(torch.bfloat16)
            expected[token] += weight * product(inner, w2[expert])
    assert_near(got, expected)


@pytest.mark.parametrize(("block", "ue8m0"), [([1, 32], False), (None, False), ([128, 128], True)])
def test_other_kinds_of_fp8_are_refused(block: list[int] | None, ue8m0: bool) -> None:
    with pytest.raises(ValueError, match="weight_block_size"):
        dispatch_linear(block, ue8m0)
