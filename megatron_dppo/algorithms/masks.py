"""Masks M of the unified update (arXiv 2602.04879 v2, Eq. 23): True where the token trains.

Each takes ``TokenInputs`` first, then an anchor (``inputs.rollout`` or ``inputs.recomputed``: what
pi is compared with), then its thresholds by keyword. A token exactly at a threshold trains. A token
without advantage has no gradient and is not blocked. A comparison with NaN blocks: a mask lets a
token train only where its test says so. No mask carries a gradient. ``presets.py`` binds anchor and
thresholds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dppo.algorithms import divergence
from megatron_dppo.algorithms.inputs import Anchor, TokenInputs, recomputed
from megatron_dppo.algorithms.sequences import sequence_totals, trained_tokens

Mask = Callable[[TokenInputs], Tensor]
"""Bool, shaped as ``log_probs``; True where the token trains."""


@torch.no_grad()
def train_all(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """Blocks nothing: PG-IS, and with a finite ratio cap PG-TIS = CISPO."""
    return torch.ones_like(inputs.loss_mask)


@torch.no_grad()
def ratio_clip(inputs: TokenInputs, anchor: Anchor, *, clip_low: float, clip_high: float) -> Tensor:
    """PPO's clip as a mask: blocked when A > 0 and r > 1 + clip_high, or A < 0 and r < 1 -
    clip_low.

    r = pi / anchor: mu for GRPO, the recomputed policy for MiniRL.
    """
    ratio = _ratio(inputs, anchor)
    return _inside(inputs, ratio >= 1 - clip_low, ratio <= 1 + clip_high)


@torch.no_grad()
def binary_tv(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    tv_threshold: float,
    tv_threshold_negative: float | None = None,
) -> Tensor:
    """DPPO-Binary-TV: blocked when the update moves pi further away and |anchor - pi| >
    ``tv_threshold``; where A < 0, > ``tv_threshold_negative`` if that is given.
    """
    distance = divergence.binary_tv(inputs.log_probs, anchor(inputs))
    return near(inputs, anchor, distance, tv_threshold, tv_threshold_negative)


@torch.no_grad()
def binary_kl(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    kl_threshold: float,
    kl_threshold_negative: float | None = None,
) -> Tensor:
    """DPPO-Binary-KL: blocked when the update moves pi further away and the binary KL exceeds
    ``kl_threshold`` nats; where A < 0, ``kl_threshold_negative`` if that is given.
    """
    distance = divergence.binary_kl(inputs.log_probs, anchor(inputs))
    return near(inputs, anchor, distance, kl_threshold, kl_threshold_negative)


@torch.no_grad()
def topk_tv(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    tv_threshold: float,
    tv_threshold_negative: float | None = None,
) -> Tensor:
    """DPPO-TopK-TV: as ``binary_tv`` with TV over TopK(mu), the sampled token and "other".

    With K = V this is DPPO-Exact-TV.
    """
    distance = divergence.topk_tv(*topk_of(inputs))
    return near(inputs, anchor, distance, tv_threshold, tv_threshold_negative)


@torch.no_grad()
def topk_kl(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    kl_threshold: float,
    kl_threshold_negative: float | None = None,
) -> Tensor:
    """DPPO-TopK-KL: as ``binary_kl`` with KL over TopK(mu), the sampled token and "other".

    With K = V this is DPPO-Exact-KL.
    """
    distance = divergence.topk_kl(*topk_of(inputs))
    return near(inputs, anchor, distance, kl_threshold, kl_threshold_negative)


@torch.no_grad()
def large_drop(inputs: TokenInputs, anchor: Anchor, *, max_drop: float) -> Tensor:
    """Minimal mask "Mask-x": blocked when A < 0 and anchor(a) - pi(a) >= ``max_drop``."""
    drop = anchor(inputs).double().exp() - inputs.log_probs.double().exp()
    return (inputs.advantages >= 0) | (drop < max_drop)


@torch.no_grad()
def relaxed_clip(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    clip_low: float,
    clip_high: float,
    rare_below: float,
    relax_low: bool,
    relax_high: bool,
) -> Tensor:
    """Relax-high, -low, -both: ``ratio_clip``, but without the upper / lower bound where anchor(a)
    < ``rare_below``.
    """
    ratio = _ratio(inputs, anchor)
    rare = anchor(inputs).exp() < rare_below
    return _inside(
        inputs,
        (ratio >= 1 - clip_low) | (rare & relax_low),
        (ratio <= 1 + clip_high) | (rare & relax_high),
    )


@torch.no_grad()
def icepop(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    mismatch_low: float,
    mismatch_high: float,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """IcePop (arXiv 2510.18855): blocked when k = pi' / mu is outside [mismatch_low,
    mismatch_high], or by PPO's clip of r'.

    r' = pi / pi'. The first test holds for either sign of A. IcePop weighs a kept token by k r' =
    pi / mu, which is Eq. 23's r: so it is this mask with an infinite cap.
    """
    mismatch = (recomputed(inputs) - inputs.rollout_log_probs).exp()
    agreed = (mismatch >= mismatch_low) & (mismatch <= mismatch_high)
    return agreed & ratio_clip(inputs, anchor, clip_low=clip_low, clip_high=clip_high)


@torch.no_grad()
def sequence_clip(
    inputs: TokenInputs, anchor: Anchor, *, clip_low: float, clip_high: float
) -> Tensor:
    """GSPO's clip (arXiv 2507.18071, Eq. 5): PPO's test on the sequence's ratio, so a response
    trains whole or not at all.
    """
    ratio = sequence_ratio(inputs, anchor)
    return _inside(inputs, ratio >= 1 - clip_low, ratio <= 1 + clip_high)


@torch.no_grad()
def sequence_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """GSPO's s (arXiv 2507.18071, Eq. 7): exp(mean over the response's tokens of log(pi / anchor)),
    at every token.

    The mean is over tokens in ``loss_mask``. A response must lie whole in the tensors. ValueError
    without sequence_ids.
    """
    log_ratio = (inputs.log_probs - anchor(inputs)).double()
    return (sequence_totals(inputs, log_ratio) / trained_tokens(inputs)).exp()


def _ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    return (inputs.log_probs.detach() - anchor(inputs)).exp()


def _inside(inputs: TokenInputs, above_low: Tensor, below_high: Tensor) -> Tensor:
    """True unless the update would push a token further out on the side on which it already is."""
    return ((inputs.advantages <= 0) | below_high) & ((inputs.advantages >= 0) | above_low)


def near(
    inputs: TokenInputs,
    anchor: Anchor,
    distance: Tensor,
    threshold: float,
    threshold_negative: float | None = None,
) -> Tensor:
    """True where ``distance`` is within the threshold, or the update leads back to the anchor."""
    close = distance <= threshold
    if threshold_negative is not None:
        close = torch.where(inputs.advantages < 0, distance <= threshold_negative, close)
    # Outward are A > 0 with r > 1 and A < 0 with r < 1: further the way pi has gone.
    shift = inputs.log_probs.detach() - anchor(inputs)
    inward = inputs.advantages.sign() * shift <= 0
    return (close | inward) & distance.isfinite()


def topk_of(inputs: TokenInputs) -> tuple[Tensor, Tensor, Tensor]:
    """log pi, log mu and validity at TopK(mu) and the sampled token. Raises ValueError without them."""
    if inputs.topk_log_probs is None:
        raise ValueError("the mask needs Top-K log-probabilities, but TokenInputs has none")
    assert inputs.rollout_topk_log_probs is not None  # TokenInputs: all three or none
    assert inputs.topk_valid is not None
    return inputs.topk_log_probs, inputs.rollout_topk_log_probs, inputs.topk_valid
