"""Masks and weights that read a whole response. They have the signatures of ``rules.py``. They use sums and maxima over
a response, or over the tokens before a token. A NaN at one token makes the response's mean NaN, and the response's
maximum infinite.

The tensors must have all tokens of a response, and the tokens of a branch in order. The trainer's tensors do: context
parallelism gathers the ranks' results before the loss, and packing does not cut responses. Rules that read the tokens
before a token treat each branch as one response, because only the tokens of one branch were sampled one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import (
    Anchor,
    TokenInputs,
    prefix_minima,
    prefix_totals,
    recomputed,
    sequence_maxima,
    sequence_means,
    sequence_quantile,
    shift_by_one,
    trained_tokens,
    with_branches_as_sequences,
)
from megatron_dppo.algorithms.rules import (
    importance_ratio,
    inside,
    inward,
    log_ratio_to,
    measure_divergence,
    ratio_clip,
)


@torch.no_grad()
def sequence_clip(
    inputs: TokenInputs, anchor: Anchor, *, clip_low: float, clip_high: float
) -> Tensor:
    """GSPO's clip (arXiv 2507.18071, Eq. 5): PPO's test, applied to the ratio of the sequence. If A has the same
    sign at all tokens of a response, all of them train, or all are blocked.
    """
    ratio = sequence_ratio(inputs, anchor)
    return inside(inputs, ratio >= 1 - clip_low, ratio <= 1 + clip_high)


@torch.no_grad()
def sequence_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """Compute GSPO's s (arXiv 2507.18071, Eq. 7) at every token: exp(mean of log(pi / anchor) over its response).

    The mean is over tokens in ``loss_mask``. Raises ValueError without sequence_ids.
    """
    log_ratio = log_ratio_to(inputs, anchor).double()
    return sequence_means(inputs, log_ratio).exp()


@torch.no_grad()
def sequence_importance_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """GSPO's s_i (arXiv 2507.18071, Eq. 7) at each of the response's tokens.

    GSPO's own objective divides a response's sum by its length: sum_i s_i A_i (1/|y_i|) sum_t grad log pi. This is the
    aggregation ``sequence-mean-token-mean``.
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
    """Block a whole response if its geometric mean of pi' / mu is outside [``sequence_low``, ``sequence_high``], for
    either sign of A; and block tokens by PPO's clip of pi / pi' (``rules.ratio_clip``).

    Public code combines this "geometric" mask with truncated importance sampling. SkyRL's documentation ("Off Policy
    Correction") has this form and these numbers. Its band rejects responses on which engine and trainer disagree at the
    same weights. So the band compares pi' with mu. The updates on the batch move pi out of a band of 1%. There is one
    difference: SkyRL's weight is pi / pi' times min(pi' / mu, C), ours is min(pi / mu, C) (``Algorithm.ratio_cap``).
    """
    log_ratio = (recomputed(inputs) - inputs.rollout_log_probs).double()
    ratio = sequence_means(inputs, log_ratio).exp()
    is_within = (ratio >= sequence_low) & (ratio <= sequence_high)
    return is_within & ratio_clip(inputs, anchor, clip_low=clip_low, clip_high=clip_high)


@torch.no_grad()
def mean_shift(
    inputs: TokenInputs, anchor: Anchor, *, largest_shift: float, clip_low: float, clip_high: float
) -> Tensor:
    """VACO's filter (arXiv 2603.01365) in a form for language models: with rho = pi' / mu, block a token if the mean of
    |rho - 1| over its response exceeds ``largest_shift`` and A log rho > 0. PPO's clip of pi / pi' also blocks tokens
    (``rules.ratio_clip``).

    Sources: the paper's abstract, and the description of this form (allenai/open-instruct, pull request 1681);
    open-instruct's documentation has the bound of 2. The paper's own filter uses a mean over a batch. Algorithm 1 and
    the appendix of hyperparameters were not read. There are two differences. Their weight is pi / pi' times a factor of
    rho, ours is min(pi / mu, C) (``Algorithm.ratio_cap``). This package has no value model, so it lacks the paper's
    realigned advantages.
    """
    log_ratio = (recomputed(inputs) - inputs.rollout_log_probs).double()
    shift = sequence_means(inputs, torch.expm1(log_ratio).abs())
    is_kept = (shift <= largest_shift) | (inputs.advantages.sign() * log_ratio <= 0)
    return is_kept & ratio_clip(inputs, anchor, clip_low=clip_low, clip_high=clip_high)


@torch.no_grad()
def drifted_sequence(inputs: TokenInputs, anchor: Anchor, *, drift_threshold: float) -> Tensor:
    """Block a whole response if A < 0 and its mean of log(anchor / pi) exceeds ``drift_threshold`` nats.

    This is the off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556), whose report has no threshold. Sources:
    the descriptions of two implementations (agentscope-ai/Trinity-RFT, pull request 420; modelscope/ms-swift, 6978).
    They combine the mask with PPO's clip; this function is the mask alone. The report's section on scaling GRPO has
    the mask's equation and was not read.
    """
    drift = sequence_means(inputs, (anchor(inputs) - inputs.log_probs).double())
    return (inputs.advantages >= 0) | (drift <= drift_threshold)


@torch.no_grad()
def largest_token(inputs: TokenInputs, anchor: Anchor, *, largest_k2: float) -> Tensor:
    """TRM with its "max" criterion (arXiv 2512.23075): block a whole response if (log r)^2 / 2 of one of its tokens
    exceeds ``largest_k2``, for either sign of A. r = pi / anchor.

    The paper masks by the largest KL(mu || pi) of a response's tokens, and its pi is the policy that trains. So this
    function compares pi, not pi'. Sources: the abstract, and an implementation that follows the paper (THUDM/slime,
    pull request 1568). The implementation estimates the KL by k2 in the "max" criterion and by k3 in the "average"
    criterion (``mean_token``). The paper's algorithm, and the thresholds in its section of experiments, were not read.
    The default number allows |log r| up to 2.
    """
    log_ratio = log_ratio_to(inputs, anchor).double()
    return sequence_maxima(inputs, 0.5 * log_ratio.square()) <= largest_k2


@torch.no_grad()
def mean_token(inputs: TokenInputs, anchor: Anchor, *, mean_k3: float) -> Tensor:
    """TRM with its "average" criterion: block a whole response if its mean of r - 1 - log r exceeds ``mean_k3``.

    Implementations that compare pi' with mu have thresholds of 0.001 to 0.01 (verl-project/verl, pull request 4544).
    The mean for r = pi / mu exceeds these thresholds after a few optimiser steps on a batch. So the default number is
    DPPO's KL threshold, applied to the mean of a response: log r has then a standard deviation of about 0.3.
    """
    log_ratio = log_ratio_to(inputs, anchor).double()
    return sequence_means(inputs, torch.expm1(log_ratio) - log_ratio) <= mean_k3


@torch.no_grad()
def log_ratio_clip(inputs: TokenInputs, anchor: Anchor, *, log_clip: float) -> Tensor:
    """GMPO's clip as a mask: block tokens with A > 0 and log r > ``log_clip``, or A < 0 and log r < -``log_clip``."""
    log_ratio = log_ratio_to(inputs, anchor)
    return inside(inputs, log_ratio >= -log_clip, log_ratio <= log_clip)


@torch.no_grad()
def clipped_geometric_mean(inputs: TokenInputs, anchor: Anchor, *, log_clip: float) -> Tensor:
    """w = exp(mean over the response of log r), with log r cut at the bounds of ``log_ratio_clip``: the weight of GMPO
    (arXiv 2507.20673) at each token of the response. GMPO's loss per response is -A w.

    The loss has the derivative -w A / |y| by log pi of a token whose log r is not cut. So GMPO's own objective is the
    aggregation ``sequence-mean-token-mean``. Sources: the abstract, and the formula in public code (verl's
    ``compute_policy_loss_geo_mean``, which follows the authors' code).
    """
    log_ratio = log_ratio_to(inputs, anchor).double()
    high = torch.where(inputs.advantages > 0, log_clip, torch.inf)
    low = torch.where(inputs.advantages < 0, -log_clip, -torch.inf)
    cut_log_ratio = torch.minimum(torch.maximum(log_ratio, low), high)
    return sequence_means(inputs, cut_log_ratio).exp().to(inputs.log_probs.dtype)


@torch.no_grad()
def minimum_prefix_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """w_t = r_t min(r_1 .. r_(t-1)), and w_1 = r_1: MinPRO (arXiv 2601.22718) uses w_t in place of the prefix ratio,
    which is the product of r_1 .. r_t.

    Source: the abstract, "a non-cumulative surrogate based on the minimum token-level ratio observed in the preceding
    prefix". The paper's objective was not read. The cap, and the lack of a mask, are this project's choices.
    """
    inputs = with_branches_as_sequences(inputs)
    ratio = importance_ratio(inputs, anchor)
    # The minimum is inf if there is no token in ``loss_mask`` before the token.
    minimum = shift_by_one(inputs, prefix_minima(inputs, ratio), torch.inf)
    return (ratio * torch.where(minimum == torch.inf, 1.0, minimum)).to(ratio.dtype)


@torch.no_grad()
def position_weights(inputs: TokenInputs, *, weight_min: float) -> tuple[Tensor, Tensor]:
    """Compute CPPO's w_t = 1 - (1 - ``weight_min``)(t - 1) / (T - 1) (arXiv 2606.10968, Eq. 8) and w_1 + .. + w_(t-1),
    float64. t = 1 .. T counts the response's trained tokens.
    """
    position = prefix_totals(inputs, torch.ones_like(inputs.log_probs)) - 1
    slope = (1 - weight_min) / (trained_tokens(inputs) - 1).clamp(min=1)
    # The weights decrease linearly, so their sums have a closed form.
    return 1 - slope * position, position - slope * position * (position - 1) / 2


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
    """CPPO (arXiv 2606.10968, Eq. 8-11): a token trains if A (r - 1) <= 0 or

        Z_t <= min(d, d + b W_(t-1) - S_(t-1)),    Z_t = w_t D_t,

    D_t is the divergence at token t, and d is its threshold. ``position_weights`` computes w_t. S and W are the sums of
    Z and w over the response's tokens before t. The sums include tokens that are blocked, and tokens whose update moves
    pi back to the anchor. b is the 90th percentile of the response's D, cut to [``budget_low``, ``budget_high``].

    Sources: the paper's equations, and the authors' code of the Binary form (Tencent-Hunyuan/UniRL, ``_cppo_mask``),
    whose ratio is pi / mu as here. The proofs were not read. Other projects report the use of a KL as D; the numbers
    for a KL are this project's choice.

    Args:
        inputs: The tokens.
        anchor: The policy that pi is compared with.
        weight_min: The weight of a response's last token.
        budget_low: Lower bound of b.
        budget_high: Upper bound of b.
        measure: The name of the function in ``divergence.py`` that computes D.
        threshold: d, exactly one of ``tv_threshold`` and ``kl_threshold``.
    """
    (largest_distance,) = threshold.values()
    inputs = with_branches_as_sequences(inputs)
    distance = measure_divergence(measure, inputs, anchor)
    # w_t, W_(t-1), Z_t, b and S_(t-1) of the docstring.
    weight, weights_before = position_weights(inputs, weight_min=weight_min)
    spent = weight * distance
    budget = sequence_quantile(inputs, distance, 0.9).clamp(budget_low, budget_high)
    spent_before = shift_by_one(inputs, prefix_totals(inputs, spent), 0.0)
    remaining = largest_distance + budget * weights_before - spent_before
    is_allowed = spent <= remaining.clamp(max=largest_distance)
    return (inward(inputs, anchor) | is_allowed) & distance.isfinite()
