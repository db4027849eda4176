"""Qwen2 and Qwen2.5 dense (DeepSeek-R1-Distill-Qwen): biases on Q, K and V only."""

from __future__ import annotations

from megatron_dppo.model.config_facts import ConfigFacts, read_decoder_shape
from megatron_dppo.model.family import Family
from megatron_dppo.model.rules import ATTENTION, DENSE_MLP, QKV_BIAS
from megatron_dppo.model.shape import ModelShape


def read(facts: ConfigFacts) -> ModelShape:
    """The family has no option that changes its tensors."""
    return read_decoder_shape(facts, "qwen2")


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP))
