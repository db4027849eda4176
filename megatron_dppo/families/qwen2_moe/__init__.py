"""Qwen2-MoE."""

from __future__ import annotations

from megatron_dppo.families.shared import decoder, reading
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biases on Q, K and V, a gated shared expert in every layer."""
    facts.require("qkv_bias", True, True)
    facts.ignore("attention_bias")
    return reading.read_decoder_shape(
        facts,
        key_value_heads_default=16,
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", False),
        shared_ffn_hidden_size=facts.positive("shared_expert_intermediate_size"),
        gates_shared_expert=True,
    )


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    read,
    layer=(
        *decoder.ATTENTION,
        decoder.QKV_BIAS,
        *decoder.moe_router(),
        *decoder.shared_expert(),
        decoder.SHARED_EXPERT_GATE,
    ),
    expert=decoder.expert_mlp(),
    engine_keeps_output=True,
    attention_replicas=True,
    has_fp8_engine=True,
)
