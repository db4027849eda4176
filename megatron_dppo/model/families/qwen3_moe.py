"""Qwen3-MoE (Qwen3-30B-A3B and kin): qk-norm, every layer's MLP routed, no shared expert."""

from __future__ import annotations

from megatron_dppo.model.config_facts import ConfigFacts, read_decoder_shape
from megatron_dppo.model.family import Family
from megatron_dppo.model.rules import ATTENTION, QK_NORM, expert_mlp, moe_router
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Refuses dense layers among the routed ones, and projections with biases."""
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


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    read,
    layer=(*ATTENTION, *QK_NORM, *moe_router()),
    expert=expert_mlp(),
    megatron={"moe_router_score_function": "softmax"},
    engine_keeps_output=True,
)
