"""The one policy gradient of every algorithm (arXiv 2602.04879 v2, Eq. 23)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.diagnostics import token_metrics
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.presets import Algorithm
from megatron_dppo.metrics.sums import MetricSums


@dataclass(frozen=True)
class LossSums:
    """``loss``: scalar, a SUM over tokens, undivided, with the gradient. ``metrics``: sums of the
    same tokens, without. ``blocked``: bool [T], the tokens in ``loss_mask`` that a mask keeps from
    training; None where the loss has no mask.
    """

    loss: Tensor
    metrics: MetricSums
    blocked: Tensor | None = None


def policy_loss(algorithm: Algorithm, inputs: TokenInputs) -> LossSums:
    """Sum over tokens in ``loss_mask`` of -M min(w, C) A, whose gradient is -sum M min(w, C) A grad
    log pi.

    w is r = pi / mu except where the algorithm says otherwise (``weights.py``). M, w, C and A carry
    no gradient; it flows through ``inputs.log_probs`` only. Tokens with a zero coefficient get a
    gradient of exactly 0, even where log pi is -inf; a NaN or infinite weight reaches the loss, for
    the trainer to stop on. Nothing is divided: the caller divides once by a global count.
    """
    with torch.no_grad():
        trains = algorithm.mask(inputs) & inputs.loss_mask
        weight = algorithm.weight(inputs)
        capped = weight.clamp(max=algorithm.ratio_cap)
        coefficient = torch.where(trains, capped * inputs.advantages, 0.0)
        metrics = token_metrics(inputs, trains, weight, algorithm.ratio_cap)
    used = torch.where(coefficient != 0, inputs.log_probs, 0.0)
    # 1 + log pi - stop(log pi) has the value 1 and log pi's gradient: the loss reads as the
    # surrogate, not as A log pi.
    loss = -(coefficient * (1 + used - used.detach())).sum()
    blocked = inputs.loss_mask & ~trains
    return LossSums(loss, metrics.add("loss/sum", loss.detach()), blocked)
