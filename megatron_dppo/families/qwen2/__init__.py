"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from megatron_dppo.families.shared.decoder import ATTENTION, DENSE_MLP, QKV_BIAS
from megatron_dppo.families.shared.reading import read_decoder_shape
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Qwen2 and Qwen2.5 dense (DeepSeek-R1-Distill-Qwen): biases on Q, K and V only."""
    facts.ignore("attention_bias")
    return read_decoder_shape(facts, key_value_heads_default=32)


FAMILY = Family(
    "qwen2", "Qwen2ForCausalLM", read, layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP), has_fp8_engine=True
)
