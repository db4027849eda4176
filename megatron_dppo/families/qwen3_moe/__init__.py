"""Qwen3-MoE."""

from __future__ import annotations

from megatron_dppo.families.shared.decoder import ATTENTION, QK_NORM, expert_mlp, moe_router
from megatron_dppo.families.shared.reading import read_decoder_shape
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Qwen3-MoE (Qwen3-30B-A3B and kin): qk-norm, every layer's MLP routed, no shared expert."""
    facts.require("attention_bias", False, False)
    return read_decoder_shape(
        facts,
        key_value_heads_default=4,
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", False),
    )


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    read,
    layer=(*ATTENTION, *QK_NORM, *moe_router()),
    expert=expert_mlp(),
    engine_keeps_output=True,
    attention_replicas=True,
    has_fp8_engine=True,
    has_head_dim=True,
)
