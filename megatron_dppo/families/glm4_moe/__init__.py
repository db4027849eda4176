"""GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

from megatron_dppo.families.shared import decoder, sigmoid_router
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.rows import in_layers, later_layers
from megatron_dppo.model.shape import ModelShape, Router


def _norms_heads(shape: ModelShape, layer: int) -> bool:
    return shape.norms_heads


def read(facts: ConfigFacts) -> ModelShape:
    """GLM-4.5, 4.6 and 4.7: biases on Q, K and V, half of each head rotated, in some models norms of heads."""
    # A missing key means False in transformers, so it is refused.
    facts.require("attention_bias", True, False)
    return sigmoid_router.read_dense_then_moe(
        facts,
        Router("sigmoid", has_bias=True),
        key_value_heads_default=8,
        rotary_fraction=0.5,
        norms_heads=facts.flag("use_qk_norm", False),
        dense_layers=sigmoid_router.read_first_layers(facts, 1),
        norm_eps=facts.number("rms_norm_eps", 1e-5),
    )


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read,
    layer=(
        *decoder.ATTENTION,
        decoder.QKV_BIAS,
        *in_layers(_norms_heads, *decoder.QK_NORM),
        *sigmoid_router.dense_then_moe(engine_dtype="float32"),
    ),
    expert=decoder.expert_mlp(),
    carries=later_layers,
    attention_replicas=True,
    tiny_values=sigmoid_router.tiny_values,
)
