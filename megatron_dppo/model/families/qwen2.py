"""Qwen2 and Qwen2.5 dense (DeepSeek-R1-Distill-Qwen): biases on Q, K and V only."""

from __future__ import annotations

from megatron_dppo.model.rules import ATTENTION, DENSE_MLP, QKV_BIAS, Family
from megatron_dppo.model.shape import (
    ConfigFacts,
    ModelShape,
    read_decoder_shape,
)


def read(facts: ConfigFacts) -> ModelShape:
    """The family has no option that changes its tensors."""
    return read_decoder_shape(facts, "qwen2")


FAMILY = Family("qwen2", read, layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP))
