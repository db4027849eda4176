"""Masks M, weights w and additive penalties of the unified update: the sum over tokens of M min(w, C) A grad log pi
(arXiv 2602.04879 v3, Eq. 23).

A row of ``table.py`` names these functions. None of them carries a gradient. Rules that need a whole response are in
``sequence_rules.py``, rules that need a whole optimiser step in ``step_rules.py``.

pi is the policy that trains, mu the engine's policy that sampled, and pi' the trainer's policy at the rollout's
weights. Masks and weights take ``TokenInputs`` first, then an anchor, then their numbers by keyword. The anchor is the
policy that pi is compared with: mu (``inputs.rollout``) or pi' (``inputs.recomputed``). A mask is True for tokens that
train. A token exactly at a threshold trains, except at ``max_drop``. A test that depends on the sign of A is True for
A = 0: such a token has no gradient to block. Comparisons with NaN are False, and the tests are written so that a False
blocks the token; ``decide`` blocks tokens with a NaN in any case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dppo.algorithms import divergence
from megatron_dppo.algorithms.inputs import Anchor, TokenInputs, recomputed, rollout
from megatron_dppo.algorithms.table import Tail

Mask = Callable[[TokenInputs], Tensor]
"""A mask, with its anchor and numbers already bound by ``build_algorithm``. Returns a bool tensor, shaped as
``log_probs``; True where the token trains."""


@torch.no_grad()
def train_all(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """Block no token: PG-IS, and with a finite ratio cap PG-TIS = CISPO."""
    return torch.ones_like(inputs.loss_mask)


@torch.no_grad()
def ratio_clip(inputs: TokenInputs, anchor: Anchor, *, clip_low: float, clip_high: float) -> Tensor:
    """PPO's clip as a mask: block tokens with A > 0 and r > 1 + ``clip_high``, or A < 0 and r < 1 - ``clip_low``.

    r = pi / anchor. The anchor is mu for GRPO, and the recomputed policy for MiniRL.
    """
    ratio = _ratio(inputs, anchor)
    return inside(inputs, ratio >= 1 - clip_low, ratio <= 1 + clip_high)


@torch.no_grad()
def binary_tv(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    tv_threshold: float,
    tv_threshold_negative: float | None = None,
) -> Tensor:
    """DPPO-Binary-TV: block tokens where the update moves pi further away and |anchor - pi| > ``tv_threshold``. For
    A < 0, ``tv_threshold_negative`` replaces the threshold if it is set.
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
    """DPPO-Binary-KL: block tokens where the update moves pi further away and the binary KL exceeds ``kl_threshold``
    nats. For A < 0, ``kl_threshold_negative`` replaces the threshold if it is set.
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
    """DPPO-TopK-TV: the rule of ``binary_tv`` with the TV over TopK(mu), the sampled token and "other".

    If K is the size V of the vocabulary, this is DPPO-Exact-TV.
    """
    distance = divergence.topk_tv(*topk_of(inputs, anchor))
    return near(inputs, anchor, distance, tv_threshold, tv_threshold_negative)


@torch.no_grad()
def topk_kl(
    inputs: TokenInputs,
    anchor: Anchor,
    *,
    kl_threshold: float,
    kl_threshold_negative: float | None = None,
) -> Tensor:
    """DPPO-TopK-KL: the rule of ``binary_kl`` with the KL over TopK(mu), the sampled token and "other".

    If K is the size V of the vocabulary, this is DPPO-Exact-KL.
    """
    distance = divergence.topk_kl(*topk_of(inputs, anchor))
    return near(inputs, anchor, distance, kl_threshold, kl_threshold_negative)


@torch.no_grad()
def large_drop(inputs: TokenInputs, anchor: Anchor, *, max_drop: float) -> Tensor:
    """Minimal mask "Mask-x": block tokens with A < 0 and anchor(a) - pi(a) >= ``max_drop``. a is the sampled token."""
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
    """Relax-high, -low, -both: ``ratio_clip``, but tokens with anchor(a) < ``rare_below`` have no upper bound if
    ``relax_high``, and no lower bound if ``relax_low``.
    """
    ratio = _ratio(inputs, anchor)
    is_rare = anchor(inputs).exp() < rare_below
    return inside(
        inputs,
        (ratio >= 1 - clip_low) | (is_rare & relax_low),
        (ratio <= 1 + clip_high) | (is_rare & relax_high),
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
    """IcePop (arXiv 2510.18855): block tokens whose k = pi' / mu is outside [``mismatch_low``, ``mismatch_high``], for
    either sign of A, and tokens that PPO's clip of r' = pi / pi' blocks.

    IcePop's weight of a trained token is k r' = pi / mu = r, as in Eq. 23. So IcePop is this mask with an infinite cap.
    """
    mismatch = (recomputed(inputs) - inputs.rollout_log_probs).exp()
    is_within = (mismatch >= mismatch_low) & (mismatch <= mismatch_high)
    return is_within & ratio_clip(inputs, anchor, clip_low=clip_low, clip_high=clip_high)


@torch.no_grad()
def symmetric_binary_tv(inputs: TokenInputs, anchor: Anchor, *, tv_threshold: float) -> Tensor:
    """Block tokens with |anchor - pi| > ``tv_threshold``, for either sign of A and either direction of the update.

    This is the mask of prime-rl's IPO loss. Source: prime-rl's description of the loss (pull requests 1930 and 3586 of
    PrimeIntellect-ai/prime-rl); its code was not read.
    """
    return divergence.binary_tv(inputs.log_probs, anchor(inputs)) <= tv_threshold


@torch.no_grad()
def kpop(inputs: TokenInputs, anchor: Anchor, *, kl_threshold: float) -> Tensor:
    """KPop: block tokens if KL(anchor || pi) or KL(pi || anchor) of the binary distributions exceeds ``kl_threshold``
    nats, for either sign of A.

    Sources: two implementations have this formula and threshold (PrimeIntellect-ai/prime-rl, pull request 3283;
    verl-project/verl, 6800). Both compare pi' with mu; this mask compares the trained policy pi with the anchor. Only
    the motivation of the authors' note (ringtech.notion.site/kpop) was read.
    """
    return divergence.binary_kl_both_ways(inputs.log_probs, anchor(inputs)) <= kl_threshold


@torch.no_grad()
def complementary_clip(
    inputs: TokenInputs, anchor: Anchor, *, clip_low: float, clip_high: float, smoothing: float
) -> Tensor:
    """Bellman policy optimization's mask: PPO's clip of ``complementary_ratio``."""
    ratio = complementary_ratio(inputs, anchor, smoothing=smoothing)
    return inside(inputs, ratio >= 1 - clip_low, ratio <= 1 + clip_high)


@torch.no_grad()
def pdm(inputs: TokenInputs, anchor: Anchor, *, kl_threshold: float, tail: Tail) -> Tensor:
    """Predictive divergence mask (arXiv 2607.10848): block tokens if the Top-K KL(mu || pi) exceeds ``kl_threshold``
    nats and the update raises this KL: A times ``divergence.topk_kl_change`` > 0.

    Sources: the abstract, a description, and quotations of the formula in the authors' code. The paper's text was not
    read.

    Args:
        inputs: The tokens.
        anchor: The policy that pi is compared with.
        kl_threshold: Nats.
        tail: How the tokens outside TopK(mu) count. ``one``: as one token. ``uniform``: as equally likely tokens.
            ``proportional``: as tokens with equal mu / pi. The first two estimators are the paper's, the third is this
            project's. With K = V all three are equal and exact.

    Raises:
        ValueError: ``tail`` needs the number of tokens outside TopK(mu), or the sum of pi^2, and ``inputs`` lacks it.
    """
    field_name = {"one": None, "uniform": "tail_ids", "proportional": "sum_squares"}[tail]
    tail_inputs: dict[str, Tensor] = {}
    if field_name is not None:
        values = getattr(inputs, field_name)
        if values is None:
            raise ValueError(f"the mask has a {tail} tail, but TokenInputs has no {field_name}")
        tail_inputs[field_name] = values
    topk = topk_of(inputs, anchor)
    distance = divergence.topk_kl(*topk)
    change = divergence.topk_kl_change(*topk, **tail_inputs)
    decreases = inputs.advantages.sign() * change <= 0
    return ((distance <= kl_threshold) | decreases) & distance.isfinite()


def log_ratio_to(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """Compute log r = log(pi / anchor), without a gradient."""
    return inputs.log_probs.detach() - anchor(inputs)


def _ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    return log_ratio_to(inputs, anchor).exp()


def inside(inputs: TokenInputs, above_low: Tensor, below_high: Tensor) -> Tensor:
    """Return True unless the token is outside a bound and the update would move it further out."""
    return ((inputs.advantages <= 0) | below_high) & ((inputs.advantages >= 0) | above_low)


def near(
    inputs: TokenInputs,
    anchor: Anchor,
    distance: Tensor,
    threshold: float,
    threshold_negative: float | None = None,
) -> Tensor:
    """Return True where ``distance`` is within the threshold, or the update moves pi back towards the anchor.

    ``threshold_negative`` replaces the threshold for A < 0. None: ``threshold`` is used for both signs.
    """
    is_near = distance <= threshold
    if threshold_negative is not None:
        is_near = torch.where(inputs.advantages < 0, distance <= threshold_negative, is_near)
    return (is_near | inward(inputs, anchor)) & distance.isfinite()


def inward(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """Return True where the update moves pi back towards the anchor."""
    # The update moves pi further away if A > 0 and r > 1, or A < 0 and r < 1.
    return inputs.advantages.sign() * log_ratio_to(inputs, anchor) <= 0


def topk_of(inputs: TokenInputs, anchor: Anchor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log pi and log ``anchor`` at the anchor's TopK and at the sampled token, and which columns are valid.

    Raises ValueError without Top-K tensors.
    """
    if inputs.topk_log_probs is None:
        raise ValueError("the mask needs Top-K log-probabilities, but TokenInputs has none")
    # TokenInputs has all three Top-K tensors or none.
    assert inputs.rollout_topk_log_probs is not None
    assert inputs.topk_valid is not None
    anchor_topk = inputs.rollout_topk_log_probs
    if anchor is not rollout:
        # The anchor is pi', and the trainer has put pi' into the first K columns. The last column still holds log mu.
        sampled = anchor(inputs)[..., None].to(anchor_topk.dtype)
        anchor_topk = torch.cat([anchor_topk[..., :-1], sampled], -1)
    return inputs.topk_log_probs, anchor_topk, inputs.topk_valid


def measure_divergence(name: str, inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """Compute the function ``name`` of ``divergence.py`` at each token, float64.

    Functions whose names begin with "topk" read the Top-K tensors. Other functions read pi and the anchor at the
    sampled token.
    """
    measure: Callable[..., Tensor] = getattr(divergence, name)
    if name.startswith("topk"):
        return measure(*topk_of(inputs, anchor))
    return measure(inputs.log_probs, anchor(inputs))


Weight = Callable[[TokenInputs], Tensor]
"""w, shaped as ``log_probs``. In Eq. 23 it is r = pi / mu; some algorithms have another weight."""


@torch.no_grad()
def importance_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """Compute r = pi / mu. The denominator is always the rollout policy, also if the mask's anchor is pi'."""
    return (inputs.log_probs - inputs.rollout_log_probs).exp()


@torch.no_grad()
def drpo(inputs: TokenInputs, anchor: Anchor, *, penalty_threshold: float) -> Tensor:
    """w = r (1 - sign(A) (pi - mu) / delta): the gradient weight of DRPO (arXiv 2606.09821, section 3).

    Sources: the paper, and its authors' code (Tencent-Hunyuan/UniRL, ``_drpo_loss``), whose loss per token is
    -A r + |A| mu (r - 1)^2 / (2 delta). The gradient of this loss is -w A grad log pi with the w above. So DRPO
    measures |pi - mu| as DPPO-Binary-TV does, with a smooth penalty instead of the mask. Where the update increases
    |pi - mu|, w is 0 at |pi - mu| = delta and negative beyond it. The authors' number is delta = 12.5 ("the
    regularization threshold"). |pi - mu| is at most 1, so w / r then stays within 8% of 1. The authors' code clips
    log r to [-20, 20]; this function does not.
    """
    shift = inputs.log_probs.exp() - inputs.rollout_log_probs.exp()
    ratio = (inputs.log_probs - inputs.rollout_log_probs).exp()
    return ratio * (1 - inputs.advantages.sign() * shift / penalty_threshold)


@torch.no_grad()
def complementary_ratio(inputs: TokenInputs, anchor: Anchor, *, smoothing: float) -> Tensor:
    """w = (1 + e - mu) / (1 + e - pi), e = ``smoothing``: the weight of Bellman policy optimization (arXiv 2609.15987).

    At e = 0, w is 1 plus the derivative of the binary KL(mu || pi) by log pi. Sources: the abstract, and a third
    party's summary of the loss (weight, cap and "a GRPO-style clip mask" on the weight). The paper's text was not
    read; there is no public code.
    """
    upper = 1 + smoothing
    return (upper - inputs.rollout_log_probs.exp()) / (upper - inputs.log_probs.exp())


@torch.no_grad()
def soft_gate(
    inputs: TokenInputs, anchor: Anchor, *, tau_positive: float, tau_negative: float
) -> Tensor:
    """w = 4 s (1 - s) r, s = sigmoid(tau (r - 1)), tau by the sign of A: the gradient weight of SAPO (arXiv
    2511.20347), whose loss per token is -A (4 / tau) sigmoid(tau (r - 1)). w = 1 at r = 1.

    Sources: the abstract, and public code (verl's ``compute_policy_loss_sapo`` and others); they agree on gate and
    temperatures. SAPO's own objective averages a response's tokens: ``sequence-mean-token-mean``. If r overflows, w is
    0 times inf = NaN, and the token is blocked.
    """
    ratio = importance_ratio(inputs, anchor)
    tau = torch.where(inputs.advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    gate = tau * (ratio - 1)
    return 4 * gate.sigmoid() * (-gate).sigmoid() * ratio


@torch.no_grad()
def centering(inputs: TokenInputs, ratio_cap: float) -> Tensor:
    """c of score centering (arXiv 2609.20807, Eq. 12), [..., K]: the loss per token, with the sampled token y, is

        -A [ min(r, C) log pi(y) - sum over TopK(mu) of c_v log pi_v ],    c_v = min(pi_v, C mu_v) - min(1, C rho) pi_v,

    rho = (1 - sum mu) / (1 - sum pi), both sums over TopK(mu). If y is sampled from mu, and mu is proportional to pi
    outside TopK(mu), the gradient of the bracket has the mean 0. At pi = mu every c is 0. c is 0 in columns
    that are not valid. The sums exclude the sampled token's own column, because they must not depend on the sampled
    token.

    Sources: the abstract, and the derivation and terms of two public implementations (vime, and one in SkyRL's style),
    which agree. The paper's experiments were not read.
    """
    topk, rollout_topk, valid = (x[..., :-1] for x in topk_of(inputs, rollout))
    pi = torch.where(valid, topk.detach().double().clamp(max=0).exp(), 0.0)
    mu = torch.where(valid, rollout_topk.double().clamp(max=0).exp(), 0.0)
    # If pi is peaked, 1 - sum pi is only a rounding error of about ``resolution``.
    resolution = 4 * torch.finfo(topk.dtype).eps
    rest_mu = (1 - mu.sum(-1, keepdim=True)).clamp(min=resolution)
    rest_pi = (1 - pi.sum(-1, keepdim=True)).clamp(min=resolution)
    # ``scale`` is min(1, C rho). The clamp also keeps the rounding error from making c large.
    scale = (ratio_cap * rest_mu / rest_pi).clamp(max=1)
    return torch.minimum(pi, ratio_cap * mu) - scale * pi


Penalty = Callable[[Tensor], tuple[Tensor, Tensor]]
"""log r = log pi - log mu -> (value of an additive term of the token's loss, its derivative by log pi). The term
applies to every token in ``loss_mask`` with finite numbers, also to tokens that the mask blocks, at any advantage."""

Correction = Callable[[TokenInputs], tuple[Tensor, Tensor]]
"""(value of the additive term at each token, derivative of the sum of these values by each log pi), float64."""

LARGEST_LOG_RATIO = 20.0
"""Penalties cut log ratios to this number. e^20 is 4.9e8, so the sum of (e^20)^2 over a batch fits a float32."""


@torch.no_grad()
def kl(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate KL(mu || pi) by r - 1 - log r, whose derivative is r - 1. log r is cut to ``LARGEST_LOG_RATIO``."""
    # The largest float32 is e^88.7. Without the cut, r could be infinite. The infinite term would block the token, also
    # if a finite cap bounds the token's weight. Two finite terms just below e^88.7 could have an infinite sum.
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    shift = torch.expm1(log_ratio)
    return shift - log_ratio, shift


@torch.no_grad()
def squared_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (log r)^2 / 2, whose derivative is log r."""
    return 0.5 * log_ratio.square(), log_ratio


PENALTIES: dict[str, Penalty] = {"kl_coefficient": kl, "log_ratio_coefficient": squared_log_ratio}
"""Option with the term's coefficient -> the term."""
