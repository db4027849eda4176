"""Norms over all heads of the queries or keys. SGLang computes these norms in Triton kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def use_pytorch() -> None:
    """Put the functions of this module in place of SGLang's functions. Call it before the model is made."""
    from sglang.srt.models import minimax_m2

    for function in (rms_sumsq_serial, rms_apply_serial):
        setattr(minimax_m2, function.__name__, function)


def rms_sumsq_serial(x1: Tensor, x2: Tensor) -> Tensor:
    """Sums of squares of the rows of x1 [B, D1], then of x2 [B, D2]: fp32, 2B values padded to a multiple of 4."""
    rows = x1.shape[0]
    size = math.ceil(2 * rows / 4) * 4
    sums = torch.zeros(size, dtype=torch.float32)
    sums[:rows] = x1.float().square().sum(-1)
    sums[rows : 2 * rows] = x2.float().square().sum(-1)
    return sums


def rms_apply_serial(
    x1: Tensor,
    x2: Tensor,
    w1: Tensor,
    w2: Tensor,
    sum_sq: Tensor,
    tp_world: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Norm the rows of x1 and x2.

    ``sum_sq``: the results of ``rms_sumsq_serial``, summed over ``tp_world`` ranks with equally many columns.
    """
    rows = x1.shape[0]
    first = _normed(x1, w1, sum_sq[:rows], tp_world, eps)
    second = _normed(x2, w2, sum_sq[rows : 2 * rows], tp_world, eps)
    return first, second


def _normed(x: Tensor, weight: Tensor, sums: Tensor, tp_world: int, eps: float) -> Tensor:
    scale = torch.rsqrt(sums[:, None] / (x.shape[1] * tp_world) + eps)
    return (x.float() * scale * weight.float()).to(x.dtype)
