"""Qwen3 dense (Qwen3-8B, Qwen3-1.7B): qk-norm, no biases."""

from __future__ import annotations

from megatron_dppo.model.config_facts import ConfigFacts, read_decoder_shape
from megatron_dppo.model.family import Family
from megatron_dppo.model.rules import ATTENTION, DENSE_MLP, QK_NORM
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Refuses projections with biases."""
    facts.require("attention_bias", False, False)
    return read_decoder_shape(facts, "qwen3", head_dim_default=128)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, layer=(*ATTENTION, *QK_NORM, *DENSE_MLP))
