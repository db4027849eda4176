"""Floating-point operations of a token, from those of a sequence (``model/shape.py``)."""

from __future__ import annotations

from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.shape import forward_flops as model_flops

_BACKWARD = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Passes' worth of linear layers in a training step: forward, backward twice, and again forward under full
recomputation."""
_ATTENTION = {"none": 3.5, "selective": 4.5, "full": 4.5}
"""The same of flash attention, whose backward pass costs 2.5 forward ones (Dao, arXiv 2307.08691, section 4.1)."""


def linear_flops(shape: ModelShape) -> float:
    """Of one token's forward pass in matrix products: twice the weights that multiply it."""
    return model_flops(shape).linear


def attention_flops(shape: ModelShape, length: float) -> float:
    """Of one token's forward pass, on average over a causal sequence of ``length`` tokens."""
    return model_flops(shape).quadratic * length


def forward_flops(shape: ModelShape, length: float) -> float:
    """Of one token of a sequence of ``length`` tokens."""
    return linear_flops(shape) + attention_flops(shape, length)


def training_flops(shape: ModelShape, length: float, recompute: str) -> float:
    """Of one token's forward and backward pass under a setting of ``training.recompute``."""
    linear, attention = linear_flops(shape), attention_flops(shape, length)
    return _BACKWARD[recompute] * linear + _ATTENTION[recompute] * attention
