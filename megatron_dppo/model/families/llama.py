"""Llama 2 and 3 (OctoThinker is Llama 3.2): no biases; ``llama3`` rotary scaling."""

from __future__ import annotations

from megatron_dppo.model.rules import ATTENTION, DENSE_MLP, Family
from megatron_dppo.model.shape import (
    ConfigFacts,
    ModelShape,
    read_decoder_shape,
)


def read(facts: ConfigFacts) -> ModelShape:
    """Raises UnsupportedModelError where projections have biases."""
    facts.require("attention_bias", False, False)
    facts.require("mlp_bias", False, False)
    return read_decoder_shape(facts, "llama")


FAMILY = Family("llama", read, layer=(*ATTENTION, *DENSE_MLP))
