"""Hy3."""

from __future__ import annotations

from megatron_dppo.families.shared import decoder, reading, sigmoid_router
from megatron_dppo.model import rows
from megatron_dppo.model.config_facts import ConfigFacts, Entries
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape, Router
from megatron_dppo.model.tiny_sizes import TinySizes


def _engine_keys(shape: ModelShape) -> Entries:
    return {"first_k_dense_replace": len(shape.dense_layers), "qk_norm": True, "route_norm": True}


def read(facts: ConfigFacts) -> ModelShape:
    """Hy3: norms of heads, a router of sigmoids with a bias, dense first layers, a shared expert."""
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        facts.require(key, True, True)
    facts.require("attention_bias", False, False)
    # Checkpoints carry the tensors of further layers. The other keys are types of intermediate results.
    facts.ignore("num_nextn_predict_layers", "enable_moe_fp32_combine", "enable_lm_head_fp32")
    facts.ignore("enable_attention_fp32_softmax")
    width = facts.positive("moe_intermediate_size")
    facts.require("expert_hidden_dim", width, width)
    return reading.read_decoder_shape(
        facts,
        head_dim_default=128,
        key_value_heads_default=8,
        theta_default=11_158_840,
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        shared_ffn_hidden_size=facts.positive("num_shared_experts", default=1) * width,
        dense_layers=sigmoid_router.read_agreed_dense_layers(facts),
        router=Router("sigmoid", has_bias=True, scale=facts.number("router_scaling_factor", 2.826)),
        norm_eps=facts.number("rms_norm_eps", 1e-5),
    )


def tiny_values(shape: ModelShape, values: Entries, sizes: TinySizes) -> Entries:
    """Return the sizes of the router, and the width of an expert under its second name."""
    tiny = dict(sigmoid_router.tiny_values(shape, values, sizes))
    if "expert_hidden_dim" in values:
        tiny["expert_hidden_dim"] = sizes.moe_ffn
    return tiny


FAMILY = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    read,
    layer=(
        *decoder.ATTENTION,
        *decoder.QK_NORM,
        *rows.in_layers(rows.dense_layers, *decoder.DENSE_MLP),
        *rows.in_layers(
            rows.routed_layers, *decoder.moe_router("mlp.router", "float32", engine_block="mlp")
        ),
        *rows.in_layers(
            rows.routed_layers,
            sigmoid_router.router_bias("mlp.expert_bias"),
            *decoder.shared_expert("mlp.shared_mlp"),
        ),
    ),
    expert=decoder.expert_mlp(),
    carries=rows.later_layers,
    engine_keys=_engine_keys,
    tiny_values=tiny_values,
)
