"""GLM-4.7-Flash."""

from __future__ import annotations

from megatron_dppo.families.shared import decoder, latent_attention, sigmoid_router
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.rows import later_layers
from megatron_dppo.model.shape import ModelShape, Router


def read(facts: ConfigFacts) -> ModelShape:
    """GLM-4.7-Flash: latent attention, also of queries."""
    return latent_attention.read_latent_moe(
        facts,
        Router("sigmoid", has_bias=True, scale=1.8),
        768,
        dense_layers=sigmoid_router.read_agreed_dense_layers(facts),
        norm_eps=facts.number("rms_norm_eps", 1e-5),
    )


FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    read,
    layer=(
        *latent_attention.LATENT_ATTENTION,
        *sigmoid_router.dense_then_moe(engine_dtype="float32"),
    ),
    engine=(latent_attention.LATENTS_IN_ENGINE,),
    expert=decoder.expert_mlp(),
    carries=later_layers,
    engine_keys=lambda shape: {"first_k_dense_replace": len(shape.dense_layers)},
    attention_replicas=True,
    cpu_engine=latent_attention.CPU_ENGINE,
    tiny_values=latent_attention.tiny_values,
)
