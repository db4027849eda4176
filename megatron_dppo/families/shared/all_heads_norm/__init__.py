"""Norms of queries and keys over all heads."""

from __future__ import annotations

from megatron_dppo.model import splits
from megatron_dppo.model.rows import layer_rule

ALL_HEADS_NORM = (
    layer_rule(
        "self_attention.q_layernorm.weight",
        splits.column_parallel,
        ("self_attn.q_norm.weight", ("query",)),
    ),
    layer_rule(
        "self_attention.k_layernorm.weight",
        splits.column_parallel,
        ("self_attn.k_norm.weight", ("kv",)),
    ),
)
"""Norms that span the heads of all tensor-parallel ranks. Each rank has the weights of the heads that it holds."""
TRAINER_LAYERS = "megatron_dppo.families.shared.all_heads_norm.trainer:norm_all_heads"
