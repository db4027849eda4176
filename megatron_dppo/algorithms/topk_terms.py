"""Terms of the loss with a gradient through log pi at TopK(mu): score centering and TROLL's projection."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.algorithms import projection, rules
from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.decisions import Decisions
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import MetricSums


def score_centering(
    algorithm: Algorithm, inputs: TokenInputs, decisions: Decisions, token_scale: Tensor | None
) -> Tensor:
    """Return the term of score centering. Its value is 0. Its gradient is the sum of A c_v grad log pi_v over trained
    tokens, and over the ids v of each token's TopK(mu). A is the token's advantage times its ``token_scale``, pi_v is
    the probability of v, and ``rules.centering`` computes c_v.
    """
    assert inputs.topk_log_probs is not None
    with torch.no_grad():
        slope = rules.centering(inputs, algorithm.ratio_cap)
        factor = inputs.advantages if token_scale is None else inputs.advantages * token_scale
        slope = torch.where(decisions.trains[..., None], factor[..., None] * slope, 0.0)
    return with_slope(inputs.topk_log_probs[..., :-1], slope)


def projection_terms(
    algorithm: Algorithm, inputs: TokenInputs, decisions: Decisions, token_scale: Tensor | None
) -> tuple[Tensor, MetricSums]:
    """Return TROLL's terms of the loss, and their metrics.

    The first term is the regression KL(pi || p) of trained tokens. The second term has the value 0. Its gradient
    corrects the surrogate's gradient, which ``policy_loss`` computes as if p were pi.
    """
    assert inputs.topk_log_probs is not None
    numbers = algorithm.numbers
    with torch.no_grad():
        projected = projection.projected(inputs, numbers["kl_bound"])
        trains = decisions.trains
        surrogate = -torch.where(trains, decisions.capped * inputs.advantages, 0.0).double()
        distance = numbers["regression"] * torch.where(trains, projected.distance, 0.0)
        slopes = numbers["regression"] * projected.distance_slopes
        slopes = slopes + surrogate[..., None] * projected.column_slopes
        slopes = torch.where(trains[..., None], slopes, 0.0)
        # ``policy_loss`` uses 1 as the derivative of log p(y) by log pi(y). Its explicit part is ``explicit_slope``, so
        # add the difference. The last column of ``slopes``, the sampled token's, is a derivative by log pi(y) too.
        explicit_correction = surrogate * (projected.explicit_slope - 1)
        sampled_slope = explicit_correction + slopes[..., -1]
        metrics = MetricSums(sums={metric_names.PENALTY: distance.sum()})
        if token_scale is not None:
            scale = token_scale.double()
            distance = scale * distance
            sampled_slope = scale * sampled_slope
            slopes = scale[..., None] * slopes
    regression = distance.to(inputs.log_probs.dtype).sum()
    loss = regression + with_slope(inputs.log_probs, sampled_slope)
    return loss + with_slope(inputs.topk_log_probs[..., :-1], slopes[..., :-1]), metrics


def loss_term(
    log_probs: Tensor, value: Tensor, slope: Tensor, token_scale: Tensor | None
) -> Tensor:
    """Return a scalar with the sum of ``value`` as its value, and the gradient ``slope`` by ``log_probs``.

    Args:
        log_probs: ``[...]``, or ``[..., C]`` with C columns of each token.
        value: ``[...]``, a number for each token.
        slope: shaped as ``log_probs``; the gradient is exactly 0 where it is 0.
        token_scale: ``[...]``, a factor of each token's value and slope; None stands for 1.
    """
    if token_scale is not None:
        scale = token_scale.to(value.dtype)
        value = scale * value
        slope = scale.reshape(scale.shape + (1,) * (slope.ndim - scale.ndim)) * slope
    return value.sum().to(log_probs.dtype) + with_slope(log_probs, slope)


def with_slope(log_probs: Tensor, slope: Tensor) -> Tensor:
    """Return a scalar of value 0 whose gradient by ``log_probs`` is ``slope``; exactly 0 where ``slope`` is 0."""
    log_probs = torch.where(slope != 0, log_probs, 0.0)
    return (slope.to(log_probs.dtype) * (log_probs - log_probs.detach())).sum()
