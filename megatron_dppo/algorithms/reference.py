"""A penalty for leaving a reference policy: an estimate of KL(pi || reference) beside any algorithm's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.metrics.sums import MetricSums

REFERENCE_KL = "reference/kl"
ReferencePenalty = Callable[[LossSums, TokenInputs, Tensor, Tensor | None], LossSums]
"""(the algorithm's sums, its inputs, reference log-probabilities, factor of each token) -> sums with the penalty."""


@torch.no_grad()
def k3(log_probs: Tensor, reference_log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """exp(s) - 1 - s with s = log reference - log pi, whose mean under pi is KL(pi || reference); and its derivative
    by log pi, 1 - exp(s). (http://joschu.net/blog/kl-approx.html)"""
    s = reference_log_probs - log_probs
    growth = torch.expm1(s)
    return growth - s, -growth


def reference_penalty(coefficient: float) -> ReferencePenalty:
    """``coefficient`` times the k3 estimate, summed over the tokens in ``loss_mask``, masked ones included.

    The gradient flows through ``inputs.log_probs`` only. Like the algorithm's own terms it is multiplied by the token's
    factor, where there is one, and divided by nothing. Where log pi or the reference is -inf the penalty is infinite,
    which the trainer stops on.
    """

    def add(
        sums: LossSums, inputs: TokenInputs, reference: Tensor, scale: Tensor | None
    ) -> LossSums:
        with torch.no_grad():
            known = torch.where(inputs.loss_mask, inputs.log_probs, 0.0)
            value, slope = k3(known, torch.where(inputs.loss_mask, reference, 0.0))
            estimate = value.sum(dtype=torch.float64)
            value, slope = coefficient * value, coefficient * slope
            if scale is not None:
                value, slope = value * scale.to(value.dtype), slope * scale.to(slope.dtype)
        used = torch.where(slope != 0, inputs.log_probs, 0.0)
        penalty = (value + slope * (used - used.detach())).sum()
        metrics = sums.metrics + MetricSums(sums={REFERENCE_KL: estimate})
        return replace(sums, loss=sums.loss + penalty, metrics=metrics)

    return add
