"""Causal grouped-query attention over packed sequences with torch's scaled_dot_product_attention.

Shapes: T packed tokens, S sequences, H query heads and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_SHORT = 32
"""Tokens; shorter sequences share one batch, however much padded: a call costs more than padding."""


class PaddedBatch(NamedTuple):
    """Sequences of similar length, computed as one padded batch."""

    gather: Tensor
    """int64 [sequences * longest]; index of the packed token at each position; in padding, the index
    of the sequence's first token.
    """
    sequences: int
    longest: int


class AttentionPlan(NamedTuple):
    """Indices that turn a pack into padded batches and the outputs back into a pack."""

    batches: tuple[PaddedBatch, ...]
    scatter: Tensor
    """int64 [T]; for each packed token, its row in the concatenated padded outputs."""

    def to(self, device: torch.device) -> AttentionPlan:
        """The plan with its indices on ``device``."""
        batches = tuple(batch._replace(gather=batch.gather.to(device)) for batch in self.batches)
        return AttentionPlan(batches, self.scatter.to(device))


_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


def attention_plan(cu_seqlens: Tensor) -> AttentionPlan:
    """Plan for the sequences with boundaries ``cu_seqlens`` [S + 1]; cached as long as that tensor.

    The sequences of a batch are at least half as long as its longest; one batch holds all short
    ones (up to ``_SHORT`` tokens).
    """
    plan = _plans.get(cu_seqlens)
    if plan is None:
        plan = _plans[cu_seqlens] = _plan(cu_seqlens.tolist()).to(cu_seqlens.device)
    return plan


def _plan(bounds: list[int]) -> AttentionPlan:
    lengths = [b - a for a, b in pairwise(bounds)]
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    batches, scatter, rows, first = [], torch.empty(bounds[-1], dtype=torch.int64), 0, 0
    while first < len(order):
        longest = lengths[order[first]]
        floor = 1 if longest <= _SHORT else (longest + 1) // 2
        last = first
        while last < len(order) and lengths[order[last]] >= floor:
            last += 1
        members = order[first:last]
        starts = torch.tensor([bounds[i] for i in members])[:, None]
        sizes = torch.tensor([lengths[i] for i in members])[:, None]
        column = torch.arange(longest)[None]
        real = column < sizes
        gather = torch.where(real, starts + column, starts)
        row = rows + torch.arange(gather.numel()).view_as(gather)
        scatter[gather[real]] = row[real]
        batches.append(PaddedBatch(gather.reshape(-1), len(members), longest))
        rows, first = rows + gather.numel(), last
    return AttentionPlan(tuple(batches), scatter)


def packed_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float | None
) -> Tensor:
    """softmax(q k^T * scale) v, causal within each sequence: q [T, H, D], k, v [T, G, D] -> [T, H, D].

    Padding comes after the tokens of its sequence, so under the causal mask no token attends to it;
    its own outputs are dropped. So its gradient is exactly zero.
    """
    outputs = []
    for gather, sequences, longest in plan.batches:
        padded_q, padded_k, padded_v = (
            x.index_select(0, gather).view(sequences, longest, *x.shape[1:]).transpose(1, 2)
            for x in (q, k, v)
        )  # [n, heads, longest, D]
        out = F.scaled_dot_product_attention(
            padded_q, padded_k, padded_v, is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2).reshape(sequences * longest, *q.shape[1:]))
    return torch.cat(outputs).index_select(0, plan.scatter)


class TorchAttention(MegatronModule):
    """Core attention that replaces Transformer Engine's: packed (thd) inputs, causal, no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        if config.context_parallel_size != 1 or config.attention_dropout:
            raise ValueError(
                "attention without Transformer Engine has no context parallelism and no dropout; "
                f"got context_parallel_size={config.context_parallel_size}, "
                f"attention_dropout={config.attention_dropout}"
            )
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, G, D] -> [T, H * D]."""
        if packed_seq_params is None:
            raise ValueError("sequences come packed: packed_seq_params is missing")
        plan = attention_plan(packed_seq_params.cu_seqlens_q)
        return packed_causal_attention(query, key, value, plan, self.scale).reshape(
            query.shape[0], -1
        )
