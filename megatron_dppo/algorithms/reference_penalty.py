"""The penalty for a policy that moves away from a reference policy. Every algorithm may add it.

The penalty estimates KL(pi || reference) or KL(reference || pi) from the sampled tokens (derivations:
docs/algorithms.md, "Reference policy").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.algorithms import table
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.algorithms.rules import LARGEST_LOG_RATIO
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import MetricSums

ReferencePenalty = Callable[[LossSums, TokenInputs, Tensor, Tensor | None], LossSums]
"""(the algorithm's sums, its inputs, reference log-probabilities, factor of each token) -> sums with the penalty."""

Estimator = Callable[[Tensor], tuple[Tensor, Tensor]]
"""s = log reference - log pi -> (value, factor of grad log pi), both without gradient."""


@torch.no_grad()
def k1_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate KL(pi || reference) by -s. The mean of -s grad log pi under pi is the gradient of this KL.

    The factor is not the derivative of -s by log pi. With that factor, 1, the mean gradient would be 0.
    """
    return -s, -s


@torch.no_grad()
def k2(s: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate KL(pi || reference) or KL(reference || pi) by s^2 / 2, whose mean is right to second order in s. The
    mean of -s grad log pi under pi is the gradient of KL(pi || reference).
    """
    return 0.5 * s.square(), -s


@torch.no_grad()
def k3(s: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate KL(pi || reference) by e^s - 1 - s. Its derivative by log pi is 1 - e^s. The mean of
    (1 - e^s) grad log pi under pi is the gradient of KL(reference || pi).
    """
    growth = torch.expm1(s)
    return growth - s, -growth


@torch.no_grad()
def k3_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate KL(pi || reference) by e^s - 1 - s, with the gradient of the KL."""
    return torch.expm1(s) - s, -s


@torch.no_grad()
def reverse_k3_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate KL(reference || pi) by s e^s - e^s + 1, with the gradient of the KL."""
    growth = torch.expm1(s)
    return s * s.exp() - growth, -growth


ESTIMATORS: dict[table.EstimatorName, Estimator] = {
    "k1-on-policy": k1_on_policy,
    "k2": k2,
    "k3": k3,
    "k3-on-policy": k3_on_policy,
    "reverse-k3-on-policy": reverse_k3_on_policy,
}
"""``algorithm.reference_estimator`` -> the estimator. k1, k2, k3: http://joschu.net/blog/kl-approx.html."""


def reference_penalty(
    coefficient: float, estimator: table.EstimatorName = "k3", weight_cap: float | None = None
) -> ReferencePenalty:
    """Build the penalty: the sum of ``coefficient`` times an estimate over the tokens in ``loss_mask``.

    The algorithm may block some of these tokens in its own loss. The penalty includes them. The gradient flows through
    ``inputs.log_probs`` only. If the aggregation has a factor for each token, the factor multiplies the token's term.
    The caller divides the sum, as it divides the algorithm's own terms. s and log(pi / mu) are cut at
    ``LARGEST_LOG_RATIO``, and a metric counts the tokens with a larger s. The penalty is computed in float64. If log pi
    or the reference is -inf or NaN, the loss is not finite, and the trainer stops.

    Args:
        coefficient: Factor of the estimate.
        estimator: A name in ``ESTIMATORS``.
        weight_cap: Multiply each token's term by min(pi / mu, ``weight_cap``), without gradient. With this weight, a
            mean over mu's samples estimates a mean under pi. None: no weight.
    """
    estimate = ESTIMATORS[estimator]

    def add(
        sums: LossSums, inputs: TokenInputs, reference: Tensor, scale: Tensor | None
    ) -> LossSums:
        mask = inputs.loss_mask
        dtype = inputs.log_probs.dtype
        with torch.no_grad():
            s = torch.where(mask, reference.double() - inputs.log_probs.double(), 0.0)
            value, slope = estimate(s.clamp(max=LARGEST_LOG_RATIO))
            if weight_cap is not None:
                weight = torch.where(mask, _weight(inputs, weight_cap), 0.0)
                value = weight * value
                slope = weight * slope
            metrics = {
                metric_names.REFERENCE_KL: value.sum(),
                metric_names.REFERENCE_CLAMPED: (s > LARGEST_LOG_RATIO).sum(dtype=torch.float64),
            }
            factor = coefficient if scale is None else coefficient * scale.double()
            value = (factor * value).to(dtype)
            slope = (factor * slope).to(dtype)
        # log pi may be -inf where the slope is 0, for example outside ``loss_mask``. Replace these values, because
        # 0 * (-inf - -inf) is NaN.
        log_probs = torch.where(slope != 0, inputs.log_probs, 0.0)
        # log pi - stop(log pi) has the value 0 and log pi's gradient.
        penalty = (value + slope * (log_probs - log_probs.detach())).sum()
        return replace(
            sums, loss=sums.loss + penalty, metrics=sums.metrics + MetricSums(sums=metrics)
        )

    return add


def _weight(inputs: TokenInputs, cap: float) -> Tensor:
    """Compute min(pi / mu, cap), float64."""
    largest = min(LARGEST_LOG_RATIO, math.log(cap))
    log_ratio = inputs.log_probs.double() - inputs.rollout_log_probs.double()
    return log_ratio.clamp(max=largest).exp()
