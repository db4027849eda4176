"""Llama 2 and 3 (OctoThinker is Llama 3.2): no biases; ``llama3`` rotary scaling."""

from __future__ import annotations

from megatron_dppo.model.config_facts import ConfigFacts, read_decoder_shape
from megatron_dppo.model.family import Family
from megatron_dppo.model.rules import ATTENTION, DENSE_MLP
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Refuses projections with biases."""
    facts.require("attention_bias", False, False)
    facts.require("mlp_bias", False, False)
    return read_decoder_shape(facts, "llama")


FAMILY = Family("llama", "LlamaForCausalLM", read, layer=(*ATTENTION, *DENSE_MLP))
