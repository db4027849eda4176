"""The policy loss of every algorithm (arXiv 2602.04879 v3, Eq. 23): -sum over tokens of M min(w, C) A.

``algorithm.py`` builds an algorithm, ``decisions.py`` evaluates its mask M and weight w, and ``token_metrics.py``
computes the metrics. ``aggregation.py`` has the count that divides the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.decisions import Decisions, decide
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.token_metrics import token_metrics
from megatron_dppo.algorithms.topk_terms import loss_term, projection_terms, score_centering
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import MetricSums


@dataclass(frozen=True)
class LossSums:
    """A loss and its metrics, both summed over tokens and not divided.

    Attributes:
        loss: Scalar, with the gradient.
        metrics: Sums over the same tokens, without gradient.
        blocked: Bool [T]; the tokens in ``loss_mask`` that do not train (``decide``). None for losses without a mask.
    """

    loss: Tensor
    metrics: MetricSums
    blocked: Tensor | None = None


def policy_loss(
    algorithm: Algorithm,
    inputs: TokenInputs,
    token_scale: Tensor | None = None,
    *,
    with_surrogate: bool = True,
) -> LossSums:
    """Sum -M min(w, C) A over the tokens in ``loss_mask``, and add the algorithm's penalties.

    The gradient of the first term is -sum M min(w, C) A grad log pi. w is r = pi / mu, or the algorithm's own weight
    (``rules.py``). M, w, C and A carry no gradient: the gradient flows through ``inputs.log_probs`` and, for the
    algorithms in ``topk_terms.py``, through ``inputs.topk_log_probs``. Tokens with a zero coefficient get a gradient of
    exactly 0, even if their log pi is -inf.

    If log pi or A of a token in ``loss_mask`` is NaN, the loss is NaN, and the trainer stops. Other numbers that are
    not finite block their token, and a metric counts these tokens (``decide``). The caller divides the loss once, by a
    global count.

    Args:
        algorithm: The algorithm.
        inputs: The tokens.
        token_scale: A factor for each token's loss. None stands for 1.
        with_surrogate: False: only the penalties. A decides what the mask blocks, and has no other effect.
    """
    decisions = decide(algorithm, inputs)
    with torch.no_grad():
        value, slope, metrics = _coefficients(algorithm, inputs, decisions, with_surrogate)
        metrics = token_metrics(inputs, decisions, algorithm.ratio_cap) + metrics
    # The loss has the value of the surrogate, and not of A log pi.
    loss = loss_term(inputs.log_probs, value, slope, token_scale)
    if with_surrogate and algorithm.preset.centers:
        loss = loss + score_centering(algorithm, inputs, decisions, token_scale)
    if with_surrogate and algorithm.preset.projects:
        projection_loss, projection_metrics = projection_terms(
            algorithm, inputs, decisions, token_scale
        )
        loss = loss + projection_loss
        metrics = metrics + projection_metrics
    return LossSums(loss, metrics, inputs.loss_mask & ~decisions.trains)


def _coefficients(
    algorithm: Algorithm, inputs: TokenInputs, decisions: Decisions, with_surrogate: bool
) -> tuple[Tensor, Tensor, MetricSums]:
    """Return each token's loss, its derivative by log pi, and the sums of surrogate and penalties as metrics.

    The surrogate's derivative is the surrogate itself: both are -M min(w, C) A.
    """
    learns = decisions.trains if with_surrogate else torch.zeros_like(decisions.trains)
    surrogate = -torch.where(learns, decisions.capped * inputs.advantages, 0.0)
    # A NaN of pi or A makes the loss NaN. Otherwise the mask would hide the NaN, and training would go on without the
    # token.
    is_nan = inputs.loss_mask & (inputs.log_probs.isnan() | inputs.advantages.isnan())
    surrogate = torch.where(is_nan, torch.nan, surrogate)
    sums = {metric_names.LOSS: surrogate.sum(dtype=torch.float64)}
    if not algorithm.penalties and algorithm.correction is None:
        return surrogate, surrogate, MetricSums(sums=sums)
    counted = inputs.loss_mask & decisions.finite
    log_ratio = torch.where(counted, inputs.log_probs - inputs.rollout_log_probs, 0.0)
    values = []
    derivatives = []
    for coefficient, term in algorithm.penalties:
        value, derivative = term(log_ratio)
        values.append(coefficient * value)
        derivatives.append(coefficient * derivative)
    if algorithm.correction is not None:
        value, derivative = algorithm.correction(inputs)
        values.append(torch.where(counted, value, 0.0).to(surrogate.dtype))
        derivatives.append(torch.where(counted, derivative, 0.0).to(surrogate.dtype))
    penalty = torch.stack(values).sum(0)
    penalty_slope = torch.stack(derivatives).sum(0)
    sums[metric_names.PENALTY] = penalty.sum(dtype=torch.float64)
    return surrogate + penalty, surrogate + penalty_slope, MetricSums(sums=sums)
