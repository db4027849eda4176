"""Weights w of the policy gradient: the update is the sum over tokens of M min(w, C) A grad log pi.

Eq. 23 of arXiv 2602.04879 v2 has w = r = pi / mu. Algorithms that weigh tokens otherwise differ
here and nowhere else. No weight carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import Anchor, TokenInputs
from megatron_dppo.algorithms.masks import sequence_ratio

Weight = Callable[[TokenInputs], Tensor]
"""Shaped as ``log_probs``."""


@torch.no_grad()
def importance_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """r = pi / mu, always against the rollout policy, whatever the mask is anchored on."""
    return (inputs.log_probs - inputs.rollout_log_probs).exp()


@torch.no_grad()
def sequence_importance_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """GSPO's s_i (arXiv 2507.18071, Eq. 7) at each of the response's tokens.

    GSPO's own objective divides a response's sum by its length, sum_i s_i A_i (1/|y_i|) sum_t grad
    log pi: that is the aggregation ``sequence-mean-token-mean``.
    """
    return sequence_ratio(inputs, anchor).to(inputs.log_probs.dtype)


@torch.no_grad()
def drpo(inputs: TokenInputs, anchor: Anchor, *, penalty_threshold: float) -> Tensor:
    """w = r (1 - sign(A) (pi - mu) / delta): the gradient weight of DRPO (arXiv 2606.09821, section
    3).

    Implemented from what is public: the paper, and its authors' code (Tencent-Hunyuan/UniRL,
    ``_drpo_loss``), whose loss per token is -A r + |A| mu (r - 1)^2 / (2 delta). Differentiated,
    that is -w A grad log pi with the w above: DPPO's Binary-TV geometry with a smooth penalty in
    place of the mask. w falls to 0 where a harmful |pi - mu| reaches delta and turns against the
    update beyond it; delta = 12.5 is the authors' number ("the regularization threshold"), at which
    w / r stays within 8% of 1. The authors' code clips log r to [-20, 20]; here it is not.
    """
    shift = inputs.log_probs.exp() - inputs.rollout_log_probs.exp()
    ratio = (inputs.log_probs - inputs.rollout_log_probs).exp()
    return ratio * (1 - inputs.advantages.sign() * shift / penalty_threshold)
