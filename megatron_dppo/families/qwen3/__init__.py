"""Qwen3, dense."""

from __future__ import annotations

from megatron_dppo.families.shared.decoder import ATTENTION, DENSE_MLP, QK_NORM
from megatron_dppo.families.shared.reading import read_decoder_shape
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Qwen3 dense (Qwen3-8B, Qwen3-1.7B): qk-norm, no biases."""
    facts.require("attention_bias", False, False)
    return read_decoder_shape(facts, head_dim_default=128, key_value_heads_default=32)


FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    read,
    layer=(*ATTENTION, *QK_NORM, *DENSE_MLP),
    attention_replicas=True,
    has_fp8_engine=True,
    has_head_dim=True,
)
