"""The metrics of the tokens of a loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_dppo.algorithms import rules
from megatron_dppo.algorithms.decisions import Decisions
from megatron_dppo.algorithms.inputs import TokenInputs, rollout
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import FREQUENCY_SUMS, MetricSums
from megatron_dppo.system.imports import reason_of

BAD_UPDATE_DROP = 0.5
"""A token with A < 0 is a "bad update" if mu - pi is at least this (arXiv 2602.04879, section 5)."""
PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
"""The bounds of Clip-Higher: metrics compare every mask with PPO's clip at these bounds."""


@torch.no_grad()
def token_metrics(inputs: TokenInputs, decisions: Decisions, ratio_cap: float) -> MetricSums:
    """Compute the metrics of ``metrics.table`` over the tokens in ``loss_mask``.

    If an optional tensor of ``inputs`` is missing, its metrics are missing too. Nothing else changes the set of
    metrics. Values are float64 scalars on the inputs' device; computing them does not wait for the device. Sums and
    extrema of probabilities and of r exclude tokens whose log r is not finite.
    """
    counted = inputs.loss_mask
    advantages = inputs.advantages
    log_ratio = inputs.log_probs.double() - inputs.rollout_log_probs.double()
    mu = inputs.rollout_log_probs.double().exp()
    gap = inputs.log_probs.double().exp() - mu
    finite = counted & log_ratio.isfinite()
    positive = counted & (advantages > 0)
    negative = counted & (advantages < 0)
    blocked = counted & ~decisions.trains
    clipped = counted & ~rules.ratio_clip(inputs, rollout, **PPO_CLIP)
    sums = {
        metric_names.TRAINED_TOKENS: count_of(counted),
        metric_names.GAP: sum_over(finite, gap.abs()),
        metric_names.SIGNED_GAP: sum_over(finite, gap),
        metric_names.KL: sum_over(finite, torch.expm1(log_ratio) - log_ratio),
        metric_names.BAD_UPDATE: count_of(negative & (-gap >= BAD_UPDATE_DROP)),
        metric_names.POSITIVE: count_of(positive),
        metric_names.NEGATIVE: count_of(negative),
        metric_names.MASKED: count_of(blocked),
        metric_names.MASKED_POSITIVE: count_of(blocked & positive),
        metric_names.MASKED_NEGATIVE: count_of(blocked & negative),
        metric_names.CAP_HIT: count_of(counted & (decisions.weight > ratio_cap)),
        metric_names.NONFINITE: count_of(counted & ~decisions.finite),
        metric_names.ROLLOUT_PROB_OF_MASKED: sum_over(blocked & finite, mu),
        metric_names.PPO_ONLY: count_of(clipped & ~blocked),
        metric_names.DPPO_ONLY: count_of(blocked & ~clipped),
        **_entropy(inputs, blocked),
        **_surprise(inputs),
        **_topk_mass(inputs),
        **_own_metrics(inputs, decisions),
    }
    maxima = {
        metric_names.GAP_MAX: _largest(finite, gap),
        metric_names.RATIO_MAX: _largest(finite, log_ratio.exp()),
    }
    minima = {metric_names.GAP_MIN: -_largest(finite, -gap)}
    return MetricSums(sums, maxima, minima)


def _entropy(inputs: TokenInputs, blocked: Tensor) -> dict[str, Tensor]:
    """Return the sums of pi's entropy, nats. Empty without ``inputs.entropy``."""
    if inputs.entropy is None:
        return {}
    entropy = inputs.entropy.double()
    return {
        metric_names.ENTROPY: sum_over(inputs.loss_mask, entropy),
        metric_names.ENTROPY_OF_MASKED: sum_over(blocked, entropy),
    }


LONGEST_SURPRISE = 20.0
"""Nats. ``_surprise`` raises values below -LONGEST_SURPRISE to -LONGEST_SURPRISE."""
CUT_MEAN = 2e-4
"""Nats. The most by which the cut raises the mean of xi (``_surprise``) if pi = mu. Only ids with a probability p below
e^-20 are cut. Each of them raises the mean by at most p (-log p - 20), which is at most e^-21 for any p. So V ids raise
it by at most V e^-21, which is 2e-4 for V = 260,000."""


def _surprise(inputs: TokenInputs) -> dict[str, Tensor]:
    """Compute the sums of the frequency canary: xi and xi^2 of each token y, for both signs of

        xi = +-(-log mu(y) - H(pi)) - g,    g = |1 - r| |log pi(y)| + |log r| + CUT_MEAN,    r = pi(y) / mu(y),

    cut from below at -LONGEST_SURPRISE. If y is drawn from mu, the mean of -log mu(y) is mu's entropy H(mu). With E for
    the mean over y,

        H(mu) - H(pi) = sum (pi - mu) log pi - KL(mu || pi) = E (r - 1) log pi + E log r.

    So |H(mu) - H(pi)| is at most E g, and E xi is at most 0 for both signs before the cut. If pi = mu, this also holds
    after the cut, because g has CUT_MEAN. If pi is many times mu at some ids, E xi may be positive after the cut.

    If trainer and engine report the same wrong distribution, g is about 0, and the mean of xi is positive for one sign:
    the mean of log mu under the distribution that the engine samples differs from the mean under the reported one.
    """
    if inputs.entropy is None:
        return {}
    log_pi = inputs.log_probs.double()
    log_mu = inputs.rollout_log_probs.double()
    log_ratio = log_pi - log_mu
    finite = inputs.loss_mask & log_ratio.isfinite()
    # This is g, the part of the surprise that the gap between pi and mu explains.
    explained = torch.expm1(log_ratio).abs() * log_pi.abs() + log_ratio.abs() + CUT_MEAN
    surprise = -log_mu - inputs.entropy.double()
    high = (surprise - explained).clamp(min=-LONGEST_SURPRISE)
    low = (-surprise - explained).clamp(min=-LONGEST_SURPRISE)
    sums = [sum_over(finite, x) for x in (high, high.square(), low, low.square())]
    return dict(zip(FREQUENCY_SUMS, sums, strict=True))


def _topk_mass(inputs: TokenInputs) -> dict[str, Tensor]:
    """Sum mu's probability of TopK(mu), without the last column, the sampled token."""
    if inputs.rollout_topk_log_probs is None or inputs.topk_valid is None:
        return {}
    valid = inputs.topk_valid[..., :-1]
    log_mu = inputs.rollout_topk_log_probs[..., :-1]
    mass = torch.where(valid & ~log_mu.isnan(), log_mu.exp(), 0.0)
    return {metric_names.TOPK_MASS: sum_over(inputs.loss_mask, mass.sum(-1, dtype=torch.float64))}


def _own_metrics(inputs: TokenInputs, decisions: Decisions) -> dict[str, Tensor]:
    """Compute the sums of the user's own metrics. Raises ValueError that names the metric whose function fails."""
    sums = {}
    for row in metric_names.own_metrics():
        assert row.measure is not None
        try:
            values = row.measure(inputs, decisions)
        # User code may raise any exception.
        except Exception as error:
            raise ValueError(
                f"metric {row.name!r} (tracking.metrics): {reason_of(error)}"
            ) from error
        shape = getattr(values, "shape", type(values).__name__)
        if shape != inputs.log_probs.shape:
            raise ValueError(
                f"metric {row.name!r} (tracking.metrics): its function returned {shape}, expected a tensor of "
                f"the shape {tuple(inputs.log_probs.shape)}"
            )
        sums[row.name] = sum_over(inputs.loss_mask & values.isfinite(), values)
    return sums


def sum_over(selection: Tensor, value: Tensor) -> Tensor:
    """Sum ``value`` over the tokens in ``selection``, float64."""
    return torch.where(selection, value, 0.0).sum(dtype=torch.float64)


def count_of(selection: Tensor) -> Tensor:
    """Count the tokens in ``selection``, float64."""
    return selection.sum().double()


def _largest(selection: Tensor, value: Tensor) -> Tensor:
    # A rank may have a micro-batch without tokens, and amax raises for an empty tensor.
    if not value.numel():
        return value.new_tensor(-math.inf)
    return torch.where(selection, value, -math.inf).amax()
