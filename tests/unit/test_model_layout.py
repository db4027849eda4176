"""What the one validator of layouts refuses, and that configuration, conversion and trainer all ask it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.config import schema as s
from megatron_dppo.config.layout import layout_faults
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.layout import (
    Layout,
    LayoutSizes,
    check_layout,
    model_faults,
    size_faults,
)
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.cpu.layer_spec import layout_faults as cpu_layout_faults

MOE = ModelShape(
    family="qwen3_moe", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2,
    head_dim=16, ffn_hidden_size=128, vocab_size=515, tied_embeddings=False, norm_eps=1e-6,
    rope_theta=1e6, rope_scaling=None, max_position_embeddings=2048, dtype="float32",
    num_experts=8, experts_per_token=2, moe_ffn_hidden_size=32, norm_topk_prob=True,
)  # fmt: skip
DENSE = replace(MOE, family="qwen2", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0)


def keys(shape: ModelShape, **sizes: Any) -> list[str]:
    asked = LayoutSizes(**sizes)
    return [p.key for p in [*size_faults(asked), *model_faults(asked, shape)]]


def test_defaults():
    def sizes(**parallel: Any) -> tuple[int, int, int]:
        layout = Layout.of(s.ParallelConfig(**parallel).sizes)
        return layout.expert_tensor, layout.data, layout.expert_data

    assert sizes(world_size=2, tensor=2) == (2, 1, 1)
    assert sizes(world_size=4, tensor=2, expert=2) == (1, 2, 2)
    assert sizes(world_size=8, tensor=2, expert=2, expert_tensor=2) == (2, 4, 2)
    assert sizes(world_size=4, pipeline=2) == (1, 2, 2)
    # Experts know nothing of context parallelism: they are spread over all ranks of a stage.
    assert sizes(world_size=8, context=2, expert=4) == (1, 4, 2)
    assert sizes(world_size=8, tensor=2, context=2, pipeline=2) == (2, 1, 2)
    two = LayoutSizes(2, tensor=2)
    assert two.sequence_parallel(MOE)
    assert not two.sequence_parallel(DENSE)
    assert not LayoutSizes().sequence_parallel(MOE)
    assert replace(two, sequence=True).sequence_parallel(DENSE)


def test_fewer_key_value_heads_than_ranks_are_held_in_parts():
    """Megatron cuts the fused rows and gathers them: 2 heads over 4 ranks fit, over 3 they don't."""
    assert keys(DENSE, world_size=4, tensor=4) == []
    six = replace(DENSE, num_attention_heads=12, num_query_groups=4, ffn_hidden_size=120)
    assert keys(six, world_size=6, tensor=6) == ["tensor"]
    assert keys(replace(six, num_query_groups=3), world_size=6, tensor=6) == []
    # (8 + 2 * 1) heads of 2 elements are 20 rows, which 8 ranks can't share.
    odd = replace(DENSE, num_attention_heads=8, num_query_groups=1, head_dim=2)
    assert keys(odd, world_size=8, tensor=8) == ["tensor"]
    assert keys(replace(odd, head_dim=4), world_size=8, tensor=8) == []


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
    ],
)
def test_what_is_refused(shape, sizes, wrong):
    assert keys(shape, **sizes) == wrong


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
            "got 'a2a' with parallel.context 2 and parallel.tensor 2, expected a context that divides 1, the heads "
            "of queries and of keys that a rank has; or p2p",
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
    asked = LayoutSizes(sizes.get("tensor", 1) * sizes.get("context", 1), **sizes)
    told = list(layout_faults(asked, {"cp_comm_type": exchange}, MOE))
    assert len(told) == (fault is not None)
    assert fault is None or told[0].startswith(f"megatron.cp_comm_type: {fault}")


def test_without_gpus_heads_are_exchanged_for_tokens():
    three_heads = replace(DENSE, num_attention_heads=6, num_query_groups=3)
    for sizes in (LayoutSizes(2, context=2), LayoutSizes(2, tensor=1, context=6)):
        assert not list(cpu_layout_faults(sizes, three_heads))
    (fault,) = cpu_layout_faults(LayoutSizes(4, tensor=2, context=2), three_heads)
    assert fault.text("parallel.") == (
        "parallel.context: got 2, expected without GPUs a divisor of the 3 attention heads of a tensor-parallel "
        "rank, which attention exchanges for tokens"
    )


def test_all_problems_are_one_error():
    with pytest.raises(LayoutError) as caught:
        check_layout(LayoutSizes(15, tensor=3, pipeline=5), MOE, "parallel.")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "parallel.pipeline", "parallel.tensor", "parallel.tensor", "parallel.expert_tensor",
    ]  # fmt: skip
