"""Additive terms of a token's loss: how far pi may stray from mu, whatever the advantage.

Each takes log r = log pi - log mu and gives the term's value and its derivative by log pi, both
without gradient. They hold for every trained token, those that a mask blocks included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Penalty = Callable[[Tensor], tuple[Tensor, Tensor]]
"""log r -> (value, derivative by log pi)."""


@torch.no_grad()
def kl(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """r - 1 - log r, whose mean under mu is KL(mu || pi); its derivative is r - 1."""
    shift = torch.expm1(log_ratio)
    return shift - log_ratio, shift


@torch.no_grad()
def squared_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(log r)^2 / 2; its derivative is log r."""
    return 0.5 * log_ratio.square(), log_ratio


PENALTIES: dict[str, Penalty] = {
    "kl_coefficient": kl,
    "log_ratio_coefficient": squared_log_ratio,
}
"""Option that holds the term's coefficient -> the term."""
