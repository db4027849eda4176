"""Qwen2 and Qwen2.5 dense (DeepSeek-R1-Distill-Qwen): biases on Q, K and V only."""

from __future__ import annotations

from megatron_dppo.checkpoint_conversion.model_shape import (
    ConfigFacts,
    ModelShape,
    read_decoder_shape,
)
from megatron_dppo.checkpoint_conversion.rules import ATTENTION, DENSE_MLP, QKV_BIAS, Family


def read(facts: ConfigFacts) -> ModelShape:
    """The family has no option that changes its tensors."""
    return read_decoder_shape(facts, "qwen2")


FAMILY = Family("qwen2", read, layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP))
