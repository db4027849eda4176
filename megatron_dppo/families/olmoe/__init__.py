"""OLMoE."""

from __future__ import annotations

from megatron_dppo.families.shared.all_heads_norm import ALL_HEADS_NORM, TRAINER_LAYERS
from megatron_dppo.families.shared.decoder import ATTENTION, expert_mlp, moe_router
from megatron_dppo.families.shared.reading import read_decoder_shape
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """OLMoE (OLMoE-1B-7B): queries and keys normed over all heads; refuses values that SGLang's model does not read."""
    facts.require("attention_bias", False, False)
    facts.require("sliding_window", None, None)
    facts.require("norm_topk_prob", False, False)
    facts.require("rms_norm_eps", 1e-5, 1e-5)
    shape = read_decoder_shape(
        facts,
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("intermediate_size"),
        norm_topk_prob=False,
        norm_eps=1e-5,
        norms_all_heads=True,
    )
    heads = shape.num_attention_heads
    facts.require("num_key_value_heads", heads, heads)
    derived_head_dim = shape.hidden_size // heads
    facts.require("head_dim", derived_head_dim, derived_head_dim)
    return shape


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    read,
    layer=(*ATTENTION, *ALL_HEADS_NORM, *moe_router()),
    expert=expert_mlp(),
    engine_keeps_output=True,
    # SGLang's model norms the heads of one rank with the weights of all heads.
    most_engine_ranks=1,
    trainer_layers=TRAINER_LAYERS,
    has_fp8_engine=True,
)
