"""The layouts that are rejected, by the key of each fault, and the layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.config import schema as s
from megatron_dppo.config.layout import layout_faults
from megatron_dppo.cpu.torch_layers import layout_faults as cpu_layout_faults
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.layout import (
    Layout,
    LayoutSizes,
    check_layout,
    local_layers,
    model_faults,
    size_faults,
)
from megatron_dppo.model.shape import ModelShape
from tests.small_shapes import DENSE, MOE


def fault_keys(shape: ModelShape, **sizes: Any) -> list[str]:
    layout = LayoutSizes(**sizes)
    return [fault.key for fault in [*size_faults(layout), *model_faults(layout, shape)]]


def test_defaults():
    def sizes(**parallel: Any) -> tuple[int, int, int]:
        layout = Layout.of(s.ParallelConfig(**parallel).sizes)
        return layout.expert_tensor, layout.data, layout.expert_data

    assert sizes(world_size=2, tensor=2) == (2, 1, 1)
    assert sizes(world_size=4, tensor=2, expert=2) == (1, 2, 2)
    assert sizes(world_size=8, tensor=2, expert=2, expert_tensor=2) == (2, 4, 2)
    assert sizes(world_size=4, pipeline=2) == (1, 2, 2)
    # Context parallelism does not apply to experts: they are spread over all ranks of a stage.
    assert sizes(world_size=8, context=2, expert=4) == (1, 4, 2)
    assert sizes(world_size=8, tensor=2, context=2, pipeline=2) == (2, 1, 2)
    two = LayoutSizes(2, tensor=2)
    assert two.sequence_parallel(MOE)
    assert not two.sequence_parallel(DENSE)
    assert not LayoutSizes().sequence_parallel(MOE)
    assert replace(two, sequence=True).sequence_parallel(DENSE)


def test_fewer_key_value_heads_than_ranks_are_held_in_parts():
    """Megatron divides the rows of the fused projection evenly. The ranks must be a multiple of the key-value heads."""
    assert fault_keys(DENSE, world_size=4, tensor=4) == []
    six = replace(DENSE, num_attention_heads=12, num_query_groups=4, ffn_hidden_size=120)
    assert fault_keys(six, world_size=6, tensor=6) == ["tensor"]
    assert fault_keys(replace(six, num_query_groups=3), world_size=6, tensor=6) == []
    # (8 + 2 * 1) heads of 2 elements are 20 rows, which 8 does not divide.
    odd = replace(DENSE, num_attention_heads=8, num_query_groups=1, head_dim=2)
    assert fault_keys(odd, world_size=8, tensor=8) == ["tensor"]
    assert fault_keys(replace(odd, head_dim=4), world_size=8, tensor=8) == []


@pytest.mark.parametrize(
    ("shape", "sizes", "wrong"),
    [
        (MOE, {"world_size": 3, "tensor": 2}, ["world_size", "world_size"]),
        (MOE, {"world_size": 2, "tensor": 2, "expert_tensor": 1}, ["expert_tensor"]),
        (MOE, {"world_size": 2, "tensor": 2, "sequence": False}, ["sequence"]),
        (DENSE, {"world_size": 2, "tensor": 2, "sequence": False}, []),
        (MOE, {"sequence": True}, ["sequence"]),
        (MOE, {"virtual_pipeline": 2}, ["virtual_pipeline"]),
        (DENSE, {"world_size": 2, "expert": 2}, ["expert"]),
        (DENSE, {"world_size": 2, "expert_tensor": 2}, ["expert_tensor"]),
        (DENSE, {"world_size": 2, "tensor": 2, "expert_tensor": 1}, []),
        (MOE, {"tensor": 0, "pipeline": 0}, ["tensor", "pipeline"]),
        (MOE, {"context": 0}, ["context"]),
        (MOE, {"world_size": 6, "tensor": 2, "context": 2}, ["world_size"]),
        (MOE, {"world_size": 8, "tensor": 2, "context": 2, "expert": 8}, []),
        (MOE, {"world_size": 3, "tensor": 3}, ["tensor", "tensor", "expert_tensor"]),
        (MOE, {"first_stage_layers": 1}, ["first_stage_layers"]),
        (MOE, {"world_size": 2, "pipeline": 2, "last_stage_layers": 0}, ["last_stage_layers"]),
    ],
)
def test_what_is_refused(shape, sizes, wrong):
    assert fault_keys(shape, **sizes) == wrong


def test_a_world_that_context_parallelism_does_not_divide_is_told_all_factors():
    (fault,) = size_faults(LayoutSizes(6, tensor=2, context=2))
    assert fault.text("parallel.") == (
        "parallel.world_size: got 6, expected a multiple of tensor x context x pipeline = 2 x 2 x 1 = 4"
    )
    layout = Layout.of(LayoutSizes(8, tensor=2, context=2, pipeline=2))
    assert Layout.of(layout.sizes) == layout
    assert layout.describe() == "TP2 CP2 PP2 ETP2"


@pytest.mark.parametrize(
    ("exchange", "sizes", "fault"),
    [
        (None, {"context": 3}, None),
        ("p2p", {"context": 8}, None),
        ("a2a", {"context": 2}, None),
        (
            "a2a",
            {"context": 2, "tensor": 2},
            "got 'a2a' with parallel.context 2 and parallel.tensor 2, expected a context that divides 1, the greatest "
            "common divisor of a rank's query heads and key heads; or p2p",
        ),
        (
            "all_gather",
            {"context": 2},
            "got 'all_gather', expected p2p or a2a, which take packed sequences",
        ),
        (["p2p"] * 4, {"context": 2}, "got ['p2p', 'p2p', 'p2p', 'p2p'], expected p2p or a2a"),
        ("p2p", {}, "got 'p2p', expected nothing: parallel.context is 1"),
    ],
)
def test_attention_s_exchange_must_fit_packed_sequences_and_heads(exchange, sizes, fault):
    layout = LayoutSizes(sizes.get("tensor", 1) * sizes.get("context", 1), **sizes)
    found = list(layout_faults(layout, {"cp_comm_type": exchange}, MOE))
    assert len(found) == (fault is not None)
    assert fault is None or found[0].startswith(f"megatron.cp_comm_type: {fault}")


def test_without_gpus_heads_are_exchanged_for_tokens():
    three_heads = replace(DENSE, num_attention_heads=6, num_query_groups=3)
    for sizes in (LayoutSizes(2, context=2), LayoutSizes(2, tensor=1, context=6)):
        assert not list(cpu_layout_faults(sizes, three_heads))
    (fault,) = cpu_layout_faults(LayoutSizes(4, tensor=2, context=2), three_heads)
    assert fault.text("parallel.") == (
        "parallel.context: got 2, expected a divisor of the 3 attention heads of a tensor-parallel rank: layers of "
        "torch modules exchange heads for tokens"
    )


SEVEN = replace(DENSE, num_layers=7)


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({"pipeline": 2}, ["pipeline"]),
        ({"pipeline": 2, "first_stage_layers": 3}, []),
        ({"pipeline": 2, "last_stage_layers": 7}, ["last_stage_layers"]),
        ({"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 4}, []),
        ({"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 3}, ["last_stage_layers"]),
        ({"pipeline": 4, "first_stage_layers": 1}, []),
        ({"pipeline": 4, "first_stage_layers": 2}, ["first_stage_layers"]),
        ({"pipeline": 4, "first_stage_layers": 2, "last_stage_layers": 1}, []),
        ({"pipeline": 2, "virtual_pipeline": 2, "last_stage_layers": 3}, ["last_stage_layers"]),
    ],
)
def test_stages_of_different_sizes_must_leave_equal_shares_to_the_others(sizes, wrong):
    assert fault_keys(SEVEN, world_size=sizes["pipeline"], **sizes) == wrong


@pytest.mark.parametrize(
    ("num_layers", "sizes", "stages"),
    [
        (7, {"pipeline": 2, "first_stage_layers": 3}, [[range(3)], [range(3, 7)]]),
        (
            7,
            {"pipeline": 3, "first_stage_layers": 2, "last_stage_layers": 1},
            [[range(2)], [range(2, 6)], [range(6, 7)]],
        ),
        # Each stage has two chunks. The first chunks of all stages have layers 0 to 4, the second chunks 5 to 9.
        (
            10,
            {"pipeline": 3, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 4},
            [[range(1), range(5, 6)], [range(1, 3), range(6, 8)], [range(3, 5), range(8, 10)]],
        ),
    ],
)
def test_layers_of_unequal_stages_are_those_that_megatron_builds(num_layers, sizes, stages):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layout = Layout(**sizes)
    shape = replace(DENSE, num_layers=num_layers)
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
    )
    for stage, chunks in enumerate(stages):
        assert layout.stage_layers(num_layers, stage) == sum(map(len, chunks))
        for chunk, layers in enumerate(chunks):
            assert local_layers(shape, layout, stage, chunk) == layers
            vp_stage = None if layout.virtual_pipeline is None else chunk
            assert get_transformer_layer_offset(config, vp_stage, stage) == layers.start
            assert get_num_layers_to_build(config, vp_stage, stage) == len(layers)
    assert layout.most_stage_layers(num_layers) == max(sum(map(len, chunks)) for chunks in stages)


def test_all_problems_are_one_error():
    with pytest.raises(LayoutError) as caught:
        check_layout(LayoutSizes(15, tensor=3, pipeline=5), MOE, "parallel.")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "parallel.pipeline", "parallel.tensor", "parallel.tensor", "parallel.expert_tensor",
    ]  # fmt: skip
