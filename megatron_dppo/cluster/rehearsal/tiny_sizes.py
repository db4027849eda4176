"""The smallest sizes of a model that the ranks of a recipe's layout divide evenly."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_dppo.model.families import family_of
from megatron_dppo.model.layout import LayoutSizes
from megatron_dppo.model.quantization import BLOCK
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import ceil_to
from megatron_dppo.model.tiny_sizes import HEAD_DIM, TinySizes

HIDDEN = 64
_EXPERT_ROWS = 32
"""Rows of an expert on one rank, after the ranks have divided the expert. A dense MLP has twice as many rows."""
_LEAST_LAYERS = 2
_MOST_CHOICES = 4
"""Largest number of experts of a token."""
_LEAST_POSITIONS = 512
_SPARE_POSITIONS = 64


def tiny_sizes(
    layout: LayoutSizes, shape: ModelShape, longest: int, *, all_to_all: bool = False
) -> TinySizes:
    """Return the smallest sizes that the ranks of ``layout`` divide evenly.

    The model has the same kinds of parts as the recipe's model.

    Args:
        layout: layout of the trainer.
        shape: the recipe's own model.
        longest: tokens of the longest sequence.
        all_to_all: whether the recipe sets ``cp_comm_type: a2a``. On GPUs, context-parallel ranks then divide the
            query heads and the key-value heads of a tensor-parallel rank. On CPUs, context-parallel ranks always
            divide the query heads, and repeat key-value heads whose number they do not divide.
    """
    tensor = layout.tensor
    group_ranks = tensor
    if all_to_all:
        group_ranks *= layout.context
    if shape.num_query_groups % tensor == 0:
        # The ranks divide the key-value heads. A recipe's model with several such heads gets at least two.
        groups = max(group_ranks, min(2, shape.num_query_groups))
    else:
        # There are fewer key-value heads than ranks, as in the recipe's model, and each rank holds a part of a head.
        groups = shape.num_query_groups
    if shape.num_attention_heads > shape.num_query_groups:
        # Several query heads share a key-value head, as in the recipe's model.
        heads = math.lcm(2 * groups, tensor * layout.context)
    else:
        heads = groups = math.lcm(groups, tensor * layout.context)
    hidden = HIDDEN if family_of(shape).has_head_dim else heads * HEAD_DIM
    experts = choices = moe_ffn = 0
    if shape.is_moe:
        experts = max(4, 2 * layout.expert)
        choices = min(shape.experts_per_token, _MOST_CHOICES, experts // 2)
        moe_ffn = _EXPERT_ROWS * layout.expert_tensor_size
        if shape.router.has_bias:
            # In models whose router has a bias, the shared expert is as wide as one or several experts. Tensor-parallel
            # ranks divide the shared expert.
            moe_ffn = _EXPERT_ROWS * math.lcm(layout.expert_tensor_size, tensor)
    chunks = layout.virtual_pipeline or 1
    layers = layout.pipeline * chunks
    if layout.given_stages:
        # The recipe sets the layers of some stages. In these stages, each chunk gets one layer (``small_stages``). In
        # all other stages, each chunk gets two layers, so that the stages stay uneven.
        layers += (layout.pipeline - len(layout.given_stages)) * chunks
    positions = ceil_to(longest + _SPARE_POSITIONS, 256)
    return TinySizes(
        layers=max(layers, _LEAST_LAYERS),
        heads=heads,
        groups=groups,
        hidden=hidden,
        ffn=_EXPERT_ROWS * 2 * tensor,
        experts=experts,
        choices=choices,
        moe_ffn=moe_ffn,
        positions=max(_LEAST_POSITIONS, positions),
    )


_KERNEL_ROWS = 128
"""Rows of an expert on each rank, for GPU kernels. A dense MLP has twice as many rows."""


def sizes_for_kernels(
    sizes: TinySizes, layout: LayoutSizes, shape: ModelShape, server_ranks: int
) -> TinySizes:
    """Return ``sizes`` with widths that GPU kernels support, and heads that servers of ``server_ranks`` ranks divide.

    A head is as wide as in the recipe's model, because attention kernels support only few widths. These sizes have not
    run on a GPU yet.
    """
    groups = sizes.groups
    heads = math.lcm(sizes.heads, server_ranks)
    # The ranks of a server divide the key-value heads, or several ranks hold the same head. If neither is possible with
    # ``groups`` heads, raise the numbers of heads.
    if groups % server_ranks and server_ranks % groups:
        groups = math.lcm(groups, server_ranks)
        heads = math.lcm(heads, groups)
    hidden = 4 * _KERNEL_ROWS
    if not family_of(shape).has_head_dim:
        hidden = heads * shape.head_dim
    moe_ffn = 0
    if sizes.experts:
        moe_ffn = _KERNEL_ROWS * math.lcm(layout.expert_tensor_size, server_ranks)
    return replace(
        sizes,
        heads=heads,
        groups=groups,
        hidden=hidden,
        ffn=2 * _KERNEL_ROWS * math.lcm(layout.tensor, server_ranks),
        moe_ffn=moe_ffn,
        head_dim=shape.head_dim,
    )


def sizes_for_blocks(
    sizes: TinySizes, layout: LayoutSizes, shape: ModelShape, server_ranks: int
) -> TinySizes:
    """Return ``sizes`` for FP8 weights: each of ``server_ranks`` ranks has whole blocks of 128 x 128 elements."""
    wide_sizes = sizes_for_kernels(sizes, layout, shape, server_ranks)
    hidden = wide_sizes.hidden
    if not family_of(shape).has_head_dim:
        hidden = wide_sizes.heads * BLOCK
    return replace(wide_sizes, head_dim=BLOCK, hidden=hidden)
