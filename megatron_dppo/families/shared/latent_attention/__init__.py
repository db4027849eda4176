"""Multi-head latent attention: keys and values of all heads are computed from one latent vector of a token."""

from __future__ import annotations

from typing import Any

from megatron_dppo.families.shared import sigmoid_router
from megatron_dppo.families.shared.decoder import norm
from megatron_dppo.model import splits
from megatron_dppo.model.config_facts import ConfigFacts, Entries
from megatron_dppo.model.rows import Rule, engine_row, in_layers, layer_rule
from megatron_dppo.model.shape import LatentAttention, ModelShape, Router
from megatron_dppo.model.tiny_sizes import HEAD_DIM, TinySizes


def _has_query_latent(shape: ModelShape, layer: int) -> bool:
    return shape.latent is not None and shape.latent.query_rank is not None


def _has_no_query_latent(shape: ModelShape, layer: int) -> bool:
    return not _has_query_latent(shape, layer)


def latent_rule(megatron: str, split: splits.Split, hf: str, *dims: str) -> Rule:
    """Return a row of latent attention, from names without the prefix of the layer's attention."""
    return layer_rule(f"self_attention.{megatron}", split, (f"self_attn.{hf}", dims))


_QUERY = latent_rule(
    "linear_q_proj.weight", splits.column_parallel, "q_proj.weight", "query", "hidden"
)


_QUERY_LATENT = (
    latent_rule(
        "linear_q_down_proj.weight", splits.replicated, "q_a_proj.weight", "query_rank", "hidden"
    ),
    latent_rule(
        "linear_q_up_proj.layer_norm_weight",
        splits.replicated,
        "q_a_layernorm.weight",
        "query_rank",
    ),
    latent_rule(
        "linear_q_up_proj.weight", splits.column_parallel, "q_b_proj.weight", "query", "query_rank"
    ),
)


LATENT_ATTENTION = (
    norm("input_layernorm.weight", "input_layernorm.weight"),
    *in_layers(_has_no_query_latent, _QUERY),
    *in_layers(_has_query_latent, *_QUERY_LATENT),
    latent_rule(
        "linear_kv_down_proj.weight",
        splits.replicated,
        "kv_a_proj_with_mqa.weight",
        "kv_latent",
        "hidden",
    ),
    latent_rule(
        "linear_kv_up_proj.layer_norm_weight", splits.replicated, "kv_a_layernorm.weight", "kv_rank"
    ),
    latent_rule(
        "linear_kv_up_proj.weight",
        splits.column_parallel,
        "kv_b_proj.weight",
        "kv_heads",
        "kv_rank",
    ),
    latent_rule("linear_proj.weight", splits.row_parallel, "o_proj.weight", "hidden", "attention"),
)


LATENTS_IN_ENGINE = engine_row(
    "self_attn.fused_qkv_a_proj_with_mqa.weight",
    splits.replicated,
    ("self_attn.q_a_proj.weight", ("query_rank", "hidden")),
    ("self_attn.kv_a_proj_with_mqa.weight", ("kv_latent", "hidden")),
    layers=_has_query_latent,
)
"""SGLang's matrix that computes both latents at once."""
CPU_ENGINE = "megatron_dppo.families.shared.latent_attention.cpu_engine:use_latent_cache"


def tiny_values(shape: ModelShape, values: Entries, sizes: TinySizes) -> Entries:
    """Return the sizes of latent attention, with a latent of queries if the model has one, and those of its router."""
    has_query_latent = shape.latent is not None and shape.latent.query_rank is not None
    return {
        **sigmoid_router.tiny_values(shape, values, sizes),
        "q_lora_rank": 3 * HEAD_DIM if has_query_latent else None,
        "kv_lora_rank": 2 * HEAD_DIM,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
    }


def read_latent_moe(
    facts: ConfigFacts, router: Router, query_rank: int, **extra: Any
) -> ModelShape:
    """Read a model with LATENT_ATTENTION.

    Args:
        facts: the file's entries.
        router: as for ``read_sigmoid_router``.
        query_rank: transformers' value if q_lora_rank is missing.
        extra: fields of ModelShape to add or to replace.
    """
    facts.require("attention_bias", False, False)
    facts.require("rope_interleave", True, True)
    # transformers writes the size of the rotated part as head_dim.
    facts.ignore("head_dim", "qk_head_dim", "q_lora_rank")
    has_query_latent = facts.values.get("q_lora_rank", query_rank) is not None
    latent = LatentAttention(
        facts.positive("q_lora_rank", default=query_rank) if has_query_latent else None,
        facts.positive("kv_lora_rank"),
        facts.positive("qk_nope_head_dim"),
        facts.positive("qk_rope_head_dim"),
        facts.positive("v_head_dim"),
    )
    heads = facts.positive("num_attention_heads")
    facts.require("num_key_value_heads", heads, heads)
    size = latent.head_size
    return sigmoid_router.read_dense_then_moe(facts, router, latent=latent, head_dim=size, **extra)
