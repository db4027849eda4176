"""The RMSNorm of hidden states, with a weight or with 1 + a weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float | None, *, adds_one: bool) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight. With ``adds_one``, 1 + weight replaces the weight, computed in fp32.

    x [..., hidden], weight [hidden] -> the shape and type of x.
    """
    if not adds_one:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], 1 + weight.float(), eps).to(x.dtype)
