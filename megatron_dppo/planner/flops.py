"""Floating-point operations of a token."""

from __future__ import annotations

from megatron_dppo.model.shape import ModelShape

_BACKWARD = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Passes' worth of linear layers in a training step: forward, backward twice, and again forward under full
recomputation."""
_ATTENTION = {"none": 3.5, "selective": 4.5, "full": 4.5}
"""The same of flash attention, whose backward pass costs 2.5 forward ones (Dao, arXiv 2307.08691, section 4.1)."""


def active_parameters(shape: ModelShape) -> int:
    """Weights that multiply one token: projections, its experts (or the MLP), router and output layer; not the
    embedding, which is looked up."""
    sizes, hidden = shape.sizes(), shape.hidden_size
    attention = hidden * (2 * sizes["query"] + 2 * sizes["kv"])
    if shape.is_moe:
        mlp = 3 * hidden * shape.moe_ffn_hidden_size * shape.experts_per_token
        mlp += hidden * shape.num_experts
    else:
        mlp = 3 * hidden * shape.ffn_hidden_size
    return shape.num_layers * (attention + mlp) + hidden * shape.vocab_size


def linear_flops(shape: ModelShape) -> float:
    """Of one token's forward pass: 2 x active parameters."""
    return 2.0 * active_parameters(shape)


def attention_flops(shape: ModelShape, length: float) -> float:
    """Of one token's forward pass, on average over a causal sequence of ``length`` tokens: scores and values each 2 x
    query size x length / 2, in every layer."""
    return 2.0 * shape.sizes()["query"] * length * shape.num_layers


def forward_flops(shape: ModelShape, length: float) -> float:
    """Of one token of a sequence of ``length`` tokens."""
    return linear_flops(shape) + attention_flops(shape, length)


def training_flops(shape: ModelShape, length: float, recompute: str) -> float:
    """Of one token's forward and backward pass under a setting of ``training.recompute``."""
    linear, attention = linear_flops(shape), attention_flops(shape, length)
    return _BACKWARD[recompute] * linear + _ATTENTION[recompute] * attention
