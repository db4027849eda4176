"""Mixtral: grouped-query attention without biases, every layer's MLP routed; experts are called w1, w3 and w2."""

from __future__ import annotations

from megatron_dppo.model.config_facts import ConfigFacts, read_decoder_shape
from megatron_dppo.model.family import Family
from megatron_dppo.model.rules import ATTENTION, expert_mlp, moe_router
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Refuses attention windows, and heads of another size than SGLang's model derives."""
    facts.require("sliding_window", None, None)
    shape = read_decoder_shape(
        facts,
        "mixtral",
        num_experts=facts.positive("num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("intermediate_size"),
        norm_topk_prob=True,
    )
    derived = shape.hidden_size // shape.num_attention_heads
    facts.require("head_dim", derived, derived)
    return shape


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    read,
    layer=(*ATTENTION, *moe_router("block_sparse_moe")),
    expert=expert_mlp("block_sparse_moe", gate="w1", up="w3", down="w2"),
    megatron={"moe_router_score_function": "softmax"},
    engine_keeps_output=True,
)
