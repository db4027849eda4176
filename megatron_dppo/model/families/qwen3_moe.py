"""Qwen3-MoE (Qwen3-30B-A3B and kin): qk-norm, every layer's MLP routed, no shared expert."""

from __future__ import annotations

from megatron_dppo.model.rules import (
    ATTENTION,
    EXPERT_MLP,
    MOE_ROUTER,
    QK_NORM,
    Family,
)
from megatron_dppo.model.shape import (
    ConfigFacts,
    ModelShape,
    read_decoder_shape,
)


def read(facts: ConfigFacts) -> ModelShape:
    """Raises UnsupportedModelError where some layers are dense, or projections have biases."""
    facts.require("attention_bias", False, False)
    facts.require("decoder_sparse_step", 1, 1)
    facts.require("mlp_only_layers", [], [])
    return read_decoder_shape(
        facts,
        "qwen3_moe",
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", False),
    )


FAMILY = Family("qwen3_moe", read, layer=(*ATTENTION, *QK_NORM, *MOE_ROUTER), expert=EXPERT_MLP)
