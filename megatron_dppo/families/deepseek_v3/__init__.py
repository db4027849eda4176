"""DeepSeek-V3 and R1, Moonlight."""

from __future__ import annotations

from megatron_dppo.families.shared import decoder, latent_attention, sigmoid_router
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.rows import later_layers
from megatron_dppo.model.shape import ModelShape, Router


def read(facts: ConfigFacts) -> ModelShape:
    """DeepSeek-V3 and R1, Moonlight: latent attention, in some models with a latent of queries and YaRN."""
    # Only SGLang reads this key.
    facts.require("router_fp32", False, False)
    first_layers = sigmoid_router.read_first_layers(facts, 3)
    router = Router("sigmoid", has_bias=True, groups=8, chosen_groups=4, scale=2.5)
    return latent_attention.read_latent_moe(facts, router, 1536, dense_layers=first_layers)


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read,
    layer=(*latent_attention.LATENT_ATTENTION, *sigmoid_router.dense_then_moe()),
    engine=(latent_attention.LATENTS_IN_ENGINE,),
    expert=decoder.expert_mlp(),
    carries=later_layers,
    engine_keys=lambda shape: {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    attention_replicas=True,
    cpu_engine=latent_attention.CPU_ENGINE,
    tiny_values=latent_attention.tiny_values,
)
