"""MiniMax-M2."""

from __future__ import annotations

from megatron_dppo.families.shared import decoder, reading
from megatron_dppo.families.shared.all_heads_norm import ALL_HEADS_NORM, TRAINER_LAYERS
from megatron_dppo.families.shared.sigmoid_router import router_bias
from megatron_dppo.model.config_facts import ConfigFacts, Entries
from megatron_dppo.model.families import Family
from megatron_dppo.model.rows import later_layers
from megatron_dppo.model.shape import ModelShape, Router


def _engine_keys(shape: ModelShape) -> Entries:
    return {
        "rotary_dim": round(shape.rotary_fraction * shape.head_dim),
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def read(facts: ConfigFacts) -> ModelShape:
    """MiniMax-M2: norms of all heads, a part of each head rotated, a router of sigmoids with a bias."""
    facts.require("scoring_func", "sigmoid", "sigmoid")
    facts.require("use_qk_norm", True, True)
    facts.require("qk_norm_type", "per_layer", "per_layer")
    facts.require("use_routing_bias", True, True)
    facts.require("shared_intermediate_size", 0, 0)
    facts.require_each("attn_type_list", 1)
    # Further layers predict more tokens. Checkpoints carry their tensors.
    facts.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    head_dim = facts.positive("head_dim", default=128)
    rotary_dim = facts.positive("rotary_dim", default=reading.rotary_size(facts, head_dim))
    return reading.read_decoder_shape(
        facts,
        key_value_heads_default=8,
        theta_default=5e6,
        rotary_fraction=rotary_dim / head_dim,
        head_dim=head_dim,
        num_experts=facts.positive("num_local_experts", "num_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("intermediate_size"),
        router=Router("sigmoid", has_bias=True),
        norms_all_heads=True,
    )


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    read,
    layer=(
        *decoder.ATTENTION,
        *ALL_HEADS_NORM,
        *decoder.moe_router("block_sparse_moe", engine_dtype="float32"),
        router_bias("block_sparse_moe.e_score_correction_bias"),
    ),
    expert=decoder.expert_mlp("block_sparse_moe", gate="w1", up="w3", down="w2"),
    carries=later_layers,
    engine_keys=_engine_keys,
    attention_replicas=True,
    # SGLang's model divides its output matrix among all ranks, even with enable_dp_lm_head.
    output_per_replica=False,
    cpu_engine="megatron_dppo.families.minimax_m2.cpu_engine:use_pytorch",
    trainer_layers=TRAINER_LAYERS,
)
