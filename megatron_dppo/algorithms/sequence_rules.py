"""Masks and weights that look at a response as a whole, in the form of ``rules.py``'s: sums over it, its largest
number, what came before a token. Where they average, or look for the largest, a token that is no number spoils its
response: nothing is known of it as a whole.

A response must lie whole in the tensors, and each of its branches in order. It does: context parallelism gathers what
its ranks computed before the loss sees it, and packing cuts no response. Rules of a prefix take a branch for a
response: its tokens were sampled one after another, those of another branch before or after them.
"""

from __future__ import annotations

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
