"""The one policy gradient of every algorithm (arXiv 2602.04879 v2, Eq. 23)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.decisions import Decisions, decide
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


def policy_loss(
    algorithm: Algorithm, inputs: TokenInputs, token_scale: Tensor | None = None
) -> LossSums:
    """Sum over tokens in ``loss_mask`` of -M min(w, C) A, whose gradient is -sum M min(w, C) A grad
    log pi, plus the algorithm's penalties.

    w is r = pi / mu except where the algorithm says otherwise (``token_weights.py``). M, w, C and A
    carry no gradient; it flows through ``inputs.log_probs`` only. ``token_scale``: a factor of each
    token's loss, 1 where it is None. Tokens with a zero coefficient get a gradient of exactly 0,
    even where log pi is -inf. A token at which something else is not finite is blocked and counted
    (``decisions.py``); log pi or A that are NaN reach the loss, for the trainer to stop on. Nothing
    is divided: the caller divides once by a global count.
    """
    decisions = decide(algorithm, inputs)
    with torch.no_grad():
        value, slope, metrics = _coefficients(algorithm, inputs, decisions)
        metrics = token_metrics(inputs, decisions, algorithm.ratio_cap) + metrics
        if token_scale is not None:
            scale = token_scale.to(value.dtype)
            value, slope = value * scale, slope * scale
    used = torch.where(slope != 0, inputs.log_probs, 0.0)
    # log pi - stop(log pi) has the value 0 and log pi's gradient: the loss reads as the surrogate,
    # not as A log pi.
    loss = (value + slope * (used - used.detach())).sum()
    return LossSums(loss, metrics, inputs.loss_mask & ~decisions.trains)


def _coefficients(
    algorithm: Algorithm, inputs: TokenInputs, decisions: Decisions
) -> tuple[Tensor, Tensor, MetricSums]:
    """Each token's loss, its derivative by log pi, and both kinds of terms as metrics."""
    surrogate = -torch.where(decisions.trains, decisions.capped * inputs.advantages, 0.0)
    lost = inputs.loss_mask & (inputs.log_probs.isnan() | inputs.advantages.isnan())
    surrogate = torch.where(lost, torch.nan, surrogate)
    sums = {"loss/sum": surrogate.sum(dtype=torch.float64)}
    if not algorithm.penalties:
        return surrogate, surrogate, MetricSums(sums=sums)
    counted = inputs.loss_mask & decisions.finite
    log_ratio = torch.where(counted, inputs.log_probs - inputs.rollout_log_probs, 0.0)
    terms = [(c, *term(log_ratio)) for c, term in algorithm.penalties]
    penalty = torch.stack([c * value for c, value, _ in terms]).sum(0)
    slope = torch.stack([c * derivative for c, _, derivative in terms]).sum(0)
    sums["loss/penalty"] = penalty.sum(dtype=torch.float64)
    return surrogate + penalty, surrogate + slope, MetricSums(sums=sums)
