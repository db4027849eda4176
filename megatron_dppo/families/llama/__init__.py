"""Llama 2 and 3."""

from __future__ import annotations

from megatron_dppo.families.shared.decoder import ATTENTION, DENSE_MLP
from megatron_dppo.families.shared.reading import read_decoder_shape
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """Llama 2 and 3 (OctoThinker is Llama 3.2): no biases; ``llama3`` rotary scaling."""
    facts.require("attention_bias", False, False)
    facts.require("sliding_window", None, None)
    return read_decoder_shape(facts)


FAMILY = Family(
    "llama", "LlamaForCausalLM", read, layer=(*ATTENTION, *DENSE_MLP), has_fp8_engine=True
)
