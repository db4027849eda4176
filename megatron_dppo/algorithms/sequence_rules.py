"""Masks and weights that look at a response as a whole, in the form of ``rules.py``'s: sums over it, its largest
number, what came before a token. Where they average, or look for the largest, a token that is no number spoils its
response: nothing is known of it as a whole.

A response must lie whole in the tensors, and each of its branches in order. It does: context parallelism gathers what
its ranks computed before the loss sees it, and packing cuts no response. Rules of a prefix take a branch for a
response: its tokens were sampled one after another, those of another branch before or after them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import (
    Anchor,
    TokenInputs,
    before,
    of_branches,
    prefix_minima,
    prefix_totals,
    recomputed,
    sequence_maxima,
    sequence_means,
    sequence_quantile,
    sequence_totals,
    trained_tokens,
)
from megatron_dppo.algorithms.rules import importance_ratio, inside, inward, measured, ratio_clip


@torch.no_grad()
def sequence_clip(
    inputs: TokenInputs, anchor: Anchor, *, clip_low: float, clip_high: float
) -> Tensor:
    """GSPO's clip (arXiv 2507.18071, Eq. 5): PPO's test on the sequence's ratio, so a response
    trains whole or not at all.
    """
    ratio = sequence_ratio(inputs, anchor)
    return inside(inputs, ratio >= 1 - clip_low, ratio <= 1 + clip_high)


@torch.no_grad()
def sequence_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """GSPO's s (arXiv 2507.18071, Eq. 7): exp(mean over the response's tokens of log(pi / anchor)),
    at every token.

    The mean is over tokens in ``loss_mask``. A response must lie whole in the tensors. ValueError
    without sequence_ids.
    """
    log_ratio = (inputs.log_probs - anchor(inputs)).double()
    return sequence_means(inputs, log_ratio).exp()


@torch.no_grad()
def sequence_importance_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """GSPO's s_i (arXiv 2507.18071, Eq. 7) at each of the response's tokens.

    GSPO's own objective divides a response's sum by its length, sum_i s_i A_i (1/|y_i|) sum_t grad
    log pi: that is the aggregation ``sequence-mean-token-mean``.
    """
    return sequence_ratio(inputs, anchor).to(inputs.log_probs.dtype)


@torch.no_grad()
def geometric_band(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    sequence_low: float,
    sequence_high: float,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Blocked as a whole: a response whose geometric mean of pi' / mu is outside [``sequence_low``, ``sequence_high``],
    whatever the sign of A; and each token by PPO's clip of pi / pi' (``rules.ratio_clip``).

    The "geometric" mask that goes with truncated importance sampling in public code; form and numbers of the band are
    those of SkyRL's documentation ("Off Policy Correction"), where it rejects what engine and trainer disagree on
    before the batch is trained on. pi is no part of it: within a batch it moves away from mu by more than 1%.
    """
    log_ratio = (recomputed(inputs) - inputs.rollout_log_probs).double()
    ratio = sequence_means(inputs, log_ratio).exp()
    agreed = (ratio >= sequence_low) & (ratio <= sequence_high)
    return agreed & ratio_clip(inputs, anchor, clip_low=clip_low, clip_high=clip_high)


@torch.no_grad()
def mean_shift(
    inputs: TokenInputs, anchor: Anchor, *, largest_shift: float, clip_low: float, clip_high: float
) -> Tensor:
    """VACO's filter (arXiv 2603.01365) in a form for language models: with rho = pi' / mu, a token is blocked where the
    mean of |rho - 1| over its response exceeds ``largest_shift`` and A log rho > 0; and by PPO's clip of pi / pi'
    (``rules.ratio_clip``).

    Read: the paper's abstract, and the description of this form (allenai/open-instruct, pull request 1681), whose
    bound of 2 that project's documentation names. The paper's own filter is a mean over a batch; its Algorithm 1 and
    its appendix of hyperparameters would have to be read for its form and its threshold. Its realigned advantages need
    a value model, and are not here.
    """
    log_ratio = (recomputed(inputs) - inputs.rollout_log_probs).double()
    shift = sequence_means(inputs, torch.expm1(log_ratio).abs())
    kept = (shift <= largest_shift) | (inputs.advantages.sign() * log_ratio <= 0)
    return kept & ratio_clip(inputs, anchor, clip_low=clip_low, clip_high=clip_high)


@torch.no_grad()
def drifted_sequence(inputs: TokenInputs, anchor: Anchor, *, drift_threshold: float) -> Tensor:
    """Blocked as a whole: a response with A < 0 whose mean of log(anchor / pi) exceeds ``drift_threshold`` nats.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556), which has its threshold unsaid. Read in the
    descriptions of two implementations of it (agentscope-ai/Trinity-RFT, pull request 420; modelscope/ms-swift, 6978).
    There it goes with PPO's clip; here it stands alone. Not read: the report's section on scaling GRPO, which has the
    mask's equation.
    """
    drift = sequence_means(inputs, (anchor(inputs) - inputs.log_probs).double())
    return (inputs.advantages >= 0) | (drift <= drift_threshold)


@torch.no_grad()
def largest_token(inputs: TokenInputs, anchor: Anchor, *, largest_k2: float) -> Tensor:
    """TRM with its "max" criterion (arXiv 2512.23075): a response is blocked as a whole where (log r)^2 / 2 of one of
    its tokens exceeds ``largest_k2``, r = pi / anchor, whatever the sign of A.

    The paper masks by the largest KL(mu || pi) of a response's tokens, pi the policy that trains: so pi, and not pi',
    is compared here. Read: the abstract; that k2 stands for the KL in this criterion, and k3 in the other, is from an
    implementation that follows the paper (THUDM/slime, pull request 1568). Not read: the paper's algorithm and its
    thresholds, in its section of experiments. The number here lets |log r| be 2.
    """
    log_ratio = (inputs.log_probs - anchor(inputs)).double()
    return sequence_maxima(inputs, 0.5 * log_ratio.square()) <= largest_k2


@torch.no_grad()
def mean_token(inputs: TokenInputs, anchor: Anchor, *, mean_k3: float) -> Tensor:
    """TRM with its "average" criterion: as ``largest_token`` where the mean of r - 1 - log r exceeds ``mean_k3``.

    Implementations that compare pi' with mu have thresholds of 0.001 to 0.01 (verl-project/verl, pull request 4544),
    which a few optimiser steps on a batch use up. The number here is DPPO's KL threshold, for the mean of a response:
    it is a spread of log r of about 0.3.
    """
    log_ratio = (inputs.log_probs - anchor(inputs)).double()
    return sequence_means(inputs, torch.expm1(log_ratio) - log_ratio) <= mean_k3


@torch.no_grad()
def log_ratio_clip(inputs: TokenInputs, anchor: Anchor, *, log_clip: float) -> Tensor:
    """GMPO's clip as a mask: blocked where A > 0 and log r > ``log_clip``, or A < 0 and log r < -``log_clip``."""
    log_ratio = inputs.log_probs.detach() - anchor(inputs)
    return inside(inputs, log_ratio >= -log_clip, log_ratio <= log_clip)


@torch.no_grad()
def clipped_geometric_mean(inputs: TokenInputs, anchor: Anchor, *, log_clip: float) -> Tensor:
    """w = exp(mean over the response of log r, cut where ``log_ratio_clip`` blocks), at each of its tokens: GMPO's
    (arXiv 2507.20673), whose loss per response is -A times that.

    Differentiated, each token that is not cut has -w A / |y|: GMPO's own objective is the aggregation
    ``sequence-mean-token-mean``. Abstract read, and the formula in public code (verl's
    ``compute_policy_loss_geo_mean``, after the authors').
    """
    log_ratio = (inputs.log_probs - anchor(inputs)).double()
    high = torch.where(inputs.advantages > 0, log_clip, torch.inf)
    low = torch.where(inputs.advantages < 0, -log_clip, -torch.inf)
    cut = torch.minimum(torch.maximum(log_ratio, low), high)
    return sequence_means(inputs, cut).exp().to(inputs.log_probs.dtype)


@torch.no_grad()
def minimum_prefix_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """w_t = r_t min(r_1 .. r_(t-1)), and r_1 for the first token: MinPRO's stand-in for the prefix ratio r_1 .. r_t
    (arXiv 2601.22718).

    From its abstract, "a non-cumulative surrogate based on the minimum token-level ratio observed in the preceding
    prefix". Not read: the paper's objective, which says how the weight is cut and whether tokens are masked. Cap and
    lack of a mask are chosen.
    """
    inputs = of_branches(inputs)
    ratio = importance_ratio(inputs, anchor)
    smallest = before(inputs, prefix_minima(inputs, ratio), torch.inf)
    return (ratio * torch.where(smallest == torch.inf, 1.0, smallest)).to(ratio.dtype)


@torch.no_grad()
def position_weights(inputs: TokenInputs, *, weight_min: float) -> tuple[Tensor, Tensor]:
    """CPPO's w_t = 1 - (1 - ``weight_min``)(t - 1) / (T - 1) (arXiv 2606.10968, Eq. 8), t = 1 .. T among the response's
    trained tokens, and the sum of those before t; float64.
    """
    place = prefix_totals(inputs, torch.ones_like(inputs.log_probs)) - 1
    slope = (1 - weight_min) / (trained_tokens(inputs) - 1).clamp(min=1)
    # The weights fall evenly: their sums are known without adding them up.
    return 1 - slope * place, place - slope * place * (place - 1) / 2


@torch.no_grad()
def prefix_budget(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    weight_min: float,
    budget_low: float,
    budget_high: float,
    measure: str,
    **threshold: float,
) -> Tensor:
    """CPPO (arXiv 2606.10968, Eq. 8-11): a token trains where A (r - 1) <= 0 or

        Z_t <= min(d, d + b W_(t-1) - S_(t-1)),    Z_t = w_t D_t,

    with d = ``threshold``, the only one, ``tv_threshold`` or ``kl_threshold``; S and W the sums of Z and w over the
    response's tokens before t (blocked ones and those that lead back included), and b the 90th percentile of the
    response's D, cut to [``budget_low``, ``budget_high``]. w_t: ``position_weights``. ``measure``: D, a name in
    ``divergence.py``.

    Read: its equations, and its authors' code of the Binary form (Tencent-Hunyuan/UniRL, ``_cppo_mask``), whose
    ratio counts from below as here. Not read: its proofs. That D may be a KL is second hand, its numbers are ours.
    """
    (largest,) = threshold.values()
    inputs = of_branches(inputs)
    distance = measured(measure, inputs, anchor)
    weight, weights_before = position_weights(inputs, weight_min=weight_min)
    spent = weight * distance
    budget = sequence_quantile(inputs, distance, 0.9).clamp(budget_low, budget_high)
    spent_before = before(inputs, prefix_totals(inputs, spent), 0.0)
    allowed = (largest + budget * weights_before - spent_before).clamp(max=largest)
    return (inward(inputs, anchor) | (spent <= allowed)) & distance.isfinite()


# TRIAGE (arXiv 2610.07043): what engine and trainer disagree on counts where the update would widen it.

GATE_TIERS = ((-0.5, 0.3), (-1.5, 0.1))
"""Mean of log pi' - log mu of a segment -> its weight below that."""
TAIL_GAP = -6.0
"""log pi' - log mu below which a token is in the tail; two of them leave a segment the least weight."""
REPAIR_TARGET, REPAIR_SCALE = -0.03, math.sqrt(0.0005)
"""Mean of log pi - log mu below which a segment is repaired, and beta of the penalty, the bound of its slope."""


def _segments(inputs: TokenInputs, size: int) -> TokenInputs:
    """``inputs`` whose sequences are runs of ``size`` trained tokens of a branch; the last one may be shorter."""
    inputs = of_branches(inputs)
    assert inputs.sequence_ids is not None
    place = prefix_totals(inputs, torch.ones_like(inputs.log_probs)) - 1
    number = (place.clamp(min=0) / size).floor().flatten()
    ids = inputs.sequence_ids.flatten()
    begins = (ids.diff() != 0) | (number.diff() != 0)
    numbered = torch.nn.functional.pad(begins.long().cumsum(0), (1, 0))
    return replace(inputs, sequence_ids=numbered.view_as(inputs.sequence_ids))


@torch.no_grad()
def gated_ratio(inputs: TokenInputs, anchor: Anchor, *, gate_segment: float) -> Tensor:
    """w = g r: TRIAGE's gate g at tokens with pi' < mu in segments of ``gate_segment`` tokens whose mean advantage is
    negative, where lowering pi widens the gap; elsewhere 1.

    g is the smaller of two numbers of the segment: by its mean of log pi' - log mu (``GATE_TIERS``), and 1 - 0.9
    min(k / 2, 1), k the tokens of it in the tail (``TAIL_GAP``).

    Read: the authors' description of their code and its default numbers (InfiXAI/TRIAGE, METHODS and TRAINING), with
    the scopes that they reported (``q3`` and ``adv_positive``). There the ratio is pi / pi' times min(pi' / mu, 2),
    here r = pi / mu with the cap; there the loss is divided by the sum of the weights, here by the aggregation's count.
    Not read: the paper's text.
    """
    segments = _segments(inputs, int(gate_segment))
    gap = (anchor(inputs) - inputs.rollout_log_probs).double()
    mean, advantage = sequence_means(segments, gap), sequence_means(segments, inputs.advantages)
    gate = torch.ones_like(gap)
    for below, weight in GATE_TIERS:
        gate = torch.where(mean < below, weight, gate)
    tail = sequence_totals(segments, (gap < TAIL_GAP).double())
    gate = torch.minimum(gate, 1 - 0.9 * (tail / 2).clamp(max=1))
    gate = torch.where((advantage < 0) & (gap < 0), gate, 1.0)
    return importance_ratio(inputs, anchor) * gate.to(inputs.log_probs.dtype)


@torch.no_grad()
def repair(
    inputs: TokenInputs, anchor: Anchor, *, repair_segment: float, repair: float
) -> tuple[Tensor, Tensor]:
    """TRIAGE's repair at each token: ``repair`` times beta^2 (sqrt(1 + (q / beta)^2) - 1), q = max(target - d, 0). d is
    the mean of log pi - log mu over its segment of ``repair_segment`` tokens, whose mean advantage is positive. And the
    derivative of the sum over tokens by each log pi, at most ``repair`` times beta in size.

    In the authors' code it is a mean over segments of the whole update, here each token has its segment's value: with
    ``token-mean`` the same, but that a last, shorter segment counts less. Sources: ``gated_ratio``'s.
    """
    segments = _segments(inputs, int(repair_segment))
    gap = (inputs.log_probs - inputs.rollout_log_probs).double()
    mean, advantage = sequence_means(segments, gap), sequence_means(segments, inputs.advantages)
    missing = torch.where(advantage > 0, REPAIR_TARGET - mean, 0.0).clamp(min=0)
    # A segment with a token that is no number is left as it is.
    missing = torch.where(missing.isfinite(), missing, 0.0)
    root = (1 + (missing / REPAIR_SCALE).square()).sqrt()
    return repair * REPAIR_SCALE**2 * (root - 1), -repair * missing / root
