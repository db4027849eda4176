"""A penalty for leaving a reference policy, beside any algorithm's loss: estimates of KL(pi || reference) and of
KL(reference || pi) from the sampled tokens. Derivations: docs/algorithms.md, "Reference policy".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.algorithms.rules import LARGEST_LOG_RATIO
from megatron_dppo.algorithms.table import EstimatorName
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.sums import MetricSums

ReferencePenalty = Callable[[LossSums, TokenInputs, Tensor, Tensor | None], LossSums]
"""(the algorithm's sums, its inputs, reference log-probabilities, factor of each token) -> sums with the penalty."""

Estimator = Callable[[Tensor], tuple[Tensor, Tensor]]
"""s = log reference - log pi -> (value, what multiplies grad log pi), both without gradient."""


@torch.no_grad()
def k1_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """-s, of mean KL(pi || reference); gradient: that of the mean. (Its own derivative, 1, has the mean gradient 0.)"""
    return -s, -s


@torch.no_grad()
def k2(s: Tensor) -> tuple[Tensor, Tensor]:
    """s^2 / 2, whose mean is either KL only to second order; its own derivative -s has the mean gradient of
    KL(pi || reference)."""
    return 0.5 * s.square(), -s


@torch.no_grad()
def k3(s: Tensor) -> tuple[Tensor, Tensor]:
    """e^s - 1 - s, of mean KL(pi || reference); but its own derivative 1 - e^s has the mean gradient of
    KL(reference || pi)."""
    growth = torch.expm1(s)
    return growth - s, -growth


@torch.no_grad()
def k3_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """e^s - 1 - s, of mean KL(pi || reference); gradient: that of the mean."""
    return torch.expm1(s) - s, -s


@torch.no_grad()
def reverse_k3_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """s e^s - e^s + 1, of mean KL(reference || pi); gradient: that of the mean."""
    growth = torch.expm1(s)
    return s * s.exp() - growth, -growth


ESTIMATORS: dict[EstimatorName, Estimator] = {
    "k1-on-policy": k1_on_policy,
    "k2": k2,
    "k3": k3,
    "k3-on-policy": k3_on_policy,
    "reverse-k3-on-policy": reverse_k3_on_policy,
}
"""``algorithm.reference_estimator`` -> the estimator. k1, k2, k3: http://joschu.net/blog/kl-approx.html."""


def reference_penalty(
    coefficient: float, estimator: EstimatorName = "k3", weight_cap: float | None = None
) -> ReferencePenalty:
    """``coefficient`` times an estimate in ``ESTIMATORS``, summed over the tokens in ``loss_mask``, masked ones
    included.

    ``weight_cap``: each token's term is multiplied by min(pi / mu, ``weight_cap``), without gradient, so that means
    over tokens of mu are means under pi; None: by nothing. The gradient flows through ``inputs.log_probs`` only. Like
    the algorithm's own terms it is multiplied by the token's factor, where there is one, and divided by nothing. s and
    log(pi / mu) count as no more than ``LARGEST_LOG_RATIO``; tokens with a larger s are counted. Computed in float64.
    Where log pi or the reference is -inf or NaN the loss is not finite, which the trainer stops on.
    """
    estimate = ESTIMATORS[estimator]

    def add(
        sums: LossSums, inputs: TokenInputs, reference: Tensor, scale: Tensor | None
    ) -> LossSums:
        mask, dtype = inputs.loss_mask, inputs.log_probs.dtype
        with torch.no_grad():
            s = torch.where(mask, reference.double() - inputs.log_probs.double(), 0.0)
            value, slope = estimate(s.clamp(max=LARGEST_LOG_RATIO))
            if weight_cap is not None:
                weight = torch.where(mask, _weight(inputs, weight_cap), 0.0)
                value, slope = weight * value, weight * slope
            metrics = {
                names.REFERENCE_KL: value.sum(),
                names.REFERENCE_CLAMPED: (s > LARGEST_LOG_RATIO).sum(dtype=torch.float64),
            }
            factor = coefficient if scale is None else coefficient * scale.double()
            value, slope = (factor * value).to(dtype), (factor * slope).to(dtype)
        used = torch.where(slope != 0, inputs.log_probs, 0.0)
        penalty = (value + slope * (used - used.detach())).sum()
        return replace(
            sums, loss=sums.loss + penalty, metrics=sums.metrics + MetricSums(sums=metrics)
        )

    return add


def _weight(inputs: TokenInputs, cap: float) -> Tensor:
    """min(pi / mu, cap), float64."""
    largest = min(LARGEST_LOG_RATIO, math.log(cap))
    log_ratio = inputs.log_probs.double() - inputs.rollout_log_probs.double()
    return log_ratio.clamp(max=largest).exp()
