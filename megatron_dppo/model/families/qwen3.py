"""Qwen3 dense (Qwen3-8B, Qwen3-1.7B): qk-norm, no biases."""

from __future__ import annotations

from megatron_dppo.model.rules import ATTENTION, DENSE_MLP, QK_NORM, Family
from megatron_dppo.model.shape import (
    ConfigFacts,
    ModelShape,
    read_decoder_shape,
)


def read(facts: ConfigFacts) -> ModelShape:
    """Raises UnsupportedModelError where projections have biases."""
    facts.require("attention_bias", False, False)
    return read_decoder_shape(facts, "qwen3", head_dim_default=128)


FAMILY = Family("qwen3", read, layer=(*ATTENTION, *QK_NORM, *DENSE_MLP))
