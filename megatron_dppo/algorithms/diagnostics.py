"""What the policy, the mask and the cap did to the tokens of a micro-batch: sums and counts, no
device sync.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_dppo.algorithms import masks
from megatron_dppo.algorithms.decisions import Decisions
from megatron_dppo.algorithms.inputs import TokenInputs, rollout
from megatron_dppo.metrics.sums import MetricSums

BAD_UPDATE_DROP = 0.5
"""A token with A < 0 whose probability fell by this much is a "bad update" (arXiv 2602.04879,
section 5).
"""
PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
"""Clip-Higher, with which every mask is compared."""


@torch.no_grad()
def token_metrics(inputs: TokenInputs, decisions: Decisions, ratio_cap: float) -> MetricSums:
    """The metrics of ``metrics.definitions`` over the tokens in ``loss_mask``.

    The names depend only on which optional tensors ``inputs`` has. Values are float64 scalars on
    the inputs' device. A token whose log r is not finite adds nothing to the
    sums of probabilities and of r.
    """
    on, advantages = inputs.loss_mask, inputs.advantages
    log_ratio = inputs.log_probs.double() - inputs.rollout_log_probs.double()
    mu = inputs.rollout_log_probs.double().exp()
    gap = inputs.log_probs.double().exp() - mu
    known = on & log_ratio.isfinite()
    positive, negative, blocked = (
        on & (advantages > 0),
        on & (advantages < 0),
        on & ~decisions.trains,
    )
    clipped = on & ~masks.ratio_clip(inputs, rollout, **PPO_CLIP)
    sums = {
        "policy/tokens": _count(on),
        "policy/abs_prob_gap": _sum(known, gap.abs()),
        "policy/prob_gap": _sum(known, gap),
        "policy/kl": _sum(known, torch.expm1(log_ratio) - log_ratio),
        "policy/bad_update": _count(negative & (-gap >= BAD_UPDATE_DROP)),
        "mask/tokens_positive": _count(positive),
        "mask/tokens_negative": _count(negative),
        "mask/masked": _count(blocked),
        "mask/masked_positive": _count(blocked & positive),
        "mask/masked_negative": _count(blocked & negative),
        "mask/cap_hit": _count(on & (decisions.weight > ratio_cap)),
        "mask/nonfinite": _count(on & ~decisions.finite),
        "mask/rollout_prob_of_masked": _sum(blocked & known, mu),
        "mask/ppo_only": _count(clipped & ~blocked),
        "mask/dppo_only": _count(blocked & ~clipped),
        **_entropy(inputs, blocked),
        **_topk_mass(inputs),
    }
    ratio = log_ratio.exp()
    maxima = {
        "policy/prob_gap_max": torch.where(known, gap, -math.inf).amax()
        if gap.numel()
        else gap.new_tensor(-math.inf),
        "policy/ratio_max": torch.where(known, ratio, -math.inf).amax()
        if gap.numel()
        else gap.new_tensor(-math.inf),
    }
    minima = {
        "policy/prob_gap_min": torch.where(known, gap, math.inf).amin()
        if gap.numel()
        else gap.new_tensor(math.inf)
    }
    return MetricSums(sums, maxima, minima)


def _entropy(inputs: TokenInputs, blocked: Tensor) -> dict[str, Tensor]:
    if inputs.entropy is None:
        return {}
    entropy = inputs.entropy.double()
    return {
        "policy/entropy": _sum(inputs.loss_mask, entropy),
        "mask/entropy_of_masked": _sum(blocked, entropy),
    }


def _topk_mass(inputs: TokenInputs) -> dict[str, Tensor]:
    """Of TopK(mu) itself: without the sampled token, which stands last."""
    if inputs.rollout_topk_log_probs is None or inputs.topk_valid is None:
        return {}
    valid = inputs.topk_valid[..., :-1]
    log_mu = inputs.rollout_topk_log_probs[..., :-1]
    mass = torch.where(valid & ~log_mu.isnan(), log_mu.exp(), 0.0)
    return {"policy/topk_mass": _sum(inputs.loss_mask, mass.sum(-1, dtype=torch.float64))}


def _sum(where: Tensor, value: Tensor) -> Tensor:
    return torch.where(where, value, 0.0).sum(dtype=torch.float64)


def _count(where: Tensor) -> Tensor:
    return where.sum().double()
