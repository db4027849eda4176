"""The trainer's weights rounded to block FP8: each rank's part is rounded as in the whole matrix, and then restored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_dppo.block_fp8 import dequantize, quantize
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.quantization import is_quantized
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.fp8_weights import rounded_to_fp8
from tests.unit.test_fp8_engine import model_shape, weights

Local = dict[ParameterKey, Tensor]


def local_values(shape: ModelShape, hf: dict[str, Tensor], layout: Layout, rank: int) -> Local:
    values: Local = {}
    for parameter in local_parameters(shape, layout, rank):
        tensor = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        for segment in parameter.segments:
            segment.of_local(tensor).copy_(segment.of_hf(hf[segment.hf_name]))
        values[parameter.chunk, parameter.name] = tensor
    return values


def round_matrices(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: dequantize(*quantize(t), dtype=t.dtype) if is_quantized(name) else t
        for name, t in hf.items()
    }


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("layout", [Layout.smallest(1), Layout.smallest(2, expert=2)])
def test_a_ranks_part_is_rounded_as_the_whole_matrix_is(layout: Layout, head_dim: int) -> None:
    # With heads of 64, a query group has half a block of key rows. All groups of a rank have whole blocks.
    shape = model_shape(head_dim=head_dim, num_attention_heads=8, num_query_groups=4)
    hf = weights(shape)
    for rank in range(layout.world_size):
        values = local_values(shape, hf, layout, rank)
        before = {key: tensor.clone() for key, tensor in values.items()}
        expected = local_values(shape, round_matrices(hf), layout, rank)
        with rounded_to_fp8(values, shape, layout, rank):
            changed = [key for key in values if not torch.equal(values[key], before[key])]
            assert changed
            for key, tensor in values.items():
                assert torch.equal(tensor, expected[key]), key
        for key, tensor in values.items():
            assert torch.equal(tensor, before[key])


def test_parts_of_blocks_keep_their_values() -> None:
    """Each of two expert tensor parallel ranks has 64 rows of gate and up, half a block, so they are not rounded."""
    layout = Layout.smallest(2, expert_tensor=2)
    shape = model_shape(moe_ffn_hidden_size=128)
    values = local_values(shape, weights(shape), layout, 0)
    before = {key: tensor.clone() for key, tensor in values.items()}
    with rounded_to_fp8(values, shape, layout, 0):
        changed = {
            name
            for chunk, name in values
            if not torch.equal(values[chunk, name], before[chunk, name])
        }
    attention = "decoder.layers.0.self_attention."
    assert changed == {f"{attention}linear_qkv.weight", f"{attention}linear_proj.weight"}


def test_a_failure_in_the_block_restores_the_values() -> None:
    layout = Layout.smallest(1)
    shape = model_shape()
    values = local_values(shape, weights(shape), layout, 0)
    before = {key: tensor.clone() for key, tensor in values.items()}

    def fail() -> None:
        with rounded_to_fp8(values, shape, layout, 0):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(torch.equal(values[key], before[key]) for key in values)


def test_other_dtypes_than_bfloat16_are_rounded_too() -> None:
    shape = replace(model_shape(), dtype="float32")
    layout = Layout.smallest(1)
    hf = {name: torch.ones(dims) for name, dims in hf_tensors(shape).items()}
    values = {key: t.float() * 0.3 for key, t in local_values(shape, hf, layout, 0).items()}
    with rounded_to_fp8(values, shape, layout, 0):
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        torch.testing.assert_close(values[0, name], torch.full_like(values[0, name], 0.3))
