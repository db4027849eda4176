"""Block FP8 against hand-worked values, a search over all e4m3 values in float64, and transformers' reader."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megatron_dppo.block_fp8 import dequantize, quantize, round_activations
from megatron_dppo.model.quantization import BLOCK, scale_dims

E4M3 = sorted(
    {
        (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    }
)
"""The magnitudes that e4m3 has, by its definition: 448 is the largest, and the code of 480 is NaN."""


def nearest_e4m3(value: float) -> float:
    """The e4m3 number nearest to ``value``; of two, the one with the even mantissa."""
    magnitude = abs(value)
    distances = [(abs(magnitude - number), index % 2) for index, number in enumerate(E4M3)]
    best = min(range(len(E4M3)), key=distances.__getitem__)
    return math.copysign(E4M3[best], value)


def test_every_value_is_the_nearest_that_e4m3_has() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(BLOCK, BLOCK) * torch.rand(BLOCK, 1)).to(torch.bfloat16)
    result = quantize(weight)
    scale = torch.tensor(weight.abs().max().item() / 448, dtype=torch.float32)
    assert result.scales.item() == scale.item()
    scaled = (weight.float() / scale).double()
    for row in (0, 17, 127):
        expected = [nearest_e4m3(value) for value in scaled[row].tolist()]
        assert result.values[row].double().tolist() == expected
    assert result.values.double().abs().max() == 448


def test_a_block_worked_by_hand() -> None:
    weight = torch.zeros(BLOCK, BLOCK)
    # The scale is 2, so that these are 448, -224, 17, 19, 2^-10 and 3 * 2^-10 in units of the scale. 17 lies midway
    # between 16 and 18, and 19 between 18 and 20; the last two lie midway between multiples of 2^-9.
    weight[0, :6] = torch.tensor([896.0, -448.0, 34.0, 38.0, 2.0**-9, 3 * 2.0**-9])
    values, scales = quantize(weight)
    assert scales.tolist() == [[2.0]]
    assert values[0, :7].tolist() == [448.0, -224.0, 16.0, 20.0, 0.0, 2 * 2.0**-9, 0.0]
    assert dequantize(values, scales)[0, :4].tolist() == [896.0, -448.0, 32.0, 40.0]


def test_each_block_has_its_own_scale_and_a_block_of_zeros_has_scale_one() -> None:
    weight = torch.zeros(2 * BLOCK, 3 * BLOCK)
    weight[0, 0], weight[BLOCK - 1, 2 * BLOCK], weight[BLOCK, BLOCK] = 448, -44.8, 4.48
    values, scales = quantize(weight)
    expected = torch.tensor([[448, 0, 44.8], [0, 4.48, 0]]) / 448
    assert torch.equal(scales, torch.where(expected == 0, 1.0, expected))
    assert torch.equal(dequantize(values, scales), weight)


@pytest.mark.parametrize(("n", "k"), [(130, 200), (1, 1), (128, 129)])
def test_smaller_blocks_at_the_edges(n: int, k: int) -> None:
    torch.manual_seed(n)
    weight = torch.randn(n, k)
    values, scales = quantize(weight)
    assert values.shape == weight.shape
    assert values.is_contiguous()
    assert scales.shape == scale_dims((n, k))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (
                slice(row * BLOCK, row * BLOCK + BLOCK),
                slice(column * BLOCK, column * BLOCK + BLOCK),
            )
            assert scales[row, column] == weight[block].abs().max() / 448
            # Half a unit in the last place, with three bits after the leading one. Subnormal values are multiples of
            # 2^-9 of the scale.
            error = (dequantize(values, scales)[block] - weight[block]).abs()
            bound = (weight[block].abs() / 16).clamp_min(scales[row, column] * 2.0**-10)
            assert (error <= bound * (1 + 1e-6)).all()


def test_numbers_that_are_not_finite_stay_visible() -> None:
    weight = torch.ones(2 * BLOCK, 2 * BLOCK)
    weight[3, 5], weight[BLOCK + 1, BLOCK + 2] = math.nan, math.inf
    restored = dequantize(*quantize(weight))
    assert restored[3, 5].isnan()
    assert not restored[BLOCK + 1, BLOCK + 2].isfinite()
    assert torch.equal(restored[:BLOCK, BLOCK:], torch.ones(BLOCK, BLOCK))


def test_the_smallest_weights_have_a_scale_that_is_no_zero() -> None:
    weight = torch.full((BLOCK, BLOCK), 1e-44)
    values, scales = quantize(weight)
    assert scales.item() == torch.finfo(torch.float32).tiny
    assert dequantize(values, scales).isfinite().all()


def test_scales_of_another_shape_are_refused() -> None:
    values, scales = quantize(torch.ones(BLOCK, 2 * BLOCK))
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        dequantize(values, scales.T)


def test_transformers_reads_the_same_weights() -> None:
    torch.manual_seed(1)
    weight = torch.randn(2 * BLOCK, 3 * BLOCK) * 0.02
    values, scales = quantize(weight)
    reader = Fp8Dequantize(SimpleNamespace(quantization_config=None))
    restored = reader._dequantize_one(values, scales, torch.float32)
    assert torch.equal(restored, dequantize(values, scales))
    # An FP8 checkpoint that is read and quantised again keeps its values.
    again = quantize(restored)
    assert torch.equal(again.values.float(), values.float())
    torch.testing.assert_close(again.scales, scales, rtol=2.0**-23, atol=0)


def test_activations_are_rounded_by_groups_of_one_row() -> None:
    x = torch.zeros(2, 2 * BLOCK, dtype=torch.bfloat16)
    x[0, 0], x[0, 1], x[0, BLOCK], x[1, 2] = 448, 17, 3, -4480
    result = round_activations(x)
    assert result.dtype == torch.float32
    assert result[0, :2].tolist() == [448.0, 16.0]
    assert result[0, BLOCK].item() == pytest.approx(3, rel=1e-7)
    assert result[1].tolist() == [0.0, 0.0, -4480.0] + [0.0] * (2 * BLOCK - 3)
    with pytest.raises(ValueError, match="200"):
        round_activations(torch.ones(1, 200))
