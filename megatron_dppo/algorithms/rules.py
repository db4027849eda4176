"""The functions that a row of ``table.py`` names: masks M and weights w of the unified update, the sum over tokens of
M min(w, C) A grad log pi (arXiv 2602.04879 v2, Eq. 23), and additive penalties. None carries a gradient. Rules that
look at a response as a whole are in ``sequence_rules.py``.

Masks and weights take ``TokenInputs`` first, then an anchor (``inputs.rollout`` or ``inputs.recomputed``: what
pi is compared with), then their numbers by keyword. A mask is True where the token trains: also exactly at a
threshold, and without advantage, where there is no gradient to block. A comparison with NaN blocks: a mask lets a
token train only where its test says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dppo.algorithms import divergence
from megatron_dppo.algorithms.inputs import Anchor, TokenInputs, recomputed, rollout
from megatron_dppo.algorithms.table import Tail

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
    return inside(inputs, ratio >= 1 - clip_low, ratio <= 1 + clip_high)


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
    """DPPO-TopK-KL: as ``binary_kl`` with KL over TopK(mu), the sampled token and "other".

    With K = V this is DPPO-Exact-KL.
    """
    distance = divergence.topk_kl(*topk_of(inputs, anchor))
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
    return inside(
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
def symmetric_binary_tv(inputs: TokenInputs, anchor: Anchor, *, tv_threshold: float) -> Tensor:
    """Blocked where |anchor - pi| > ``tv_threshold``, whatever the sign of A and the way that the update leads.

    The mask of prime-rl's IPO loss, read in that project's description of it (pull requests 1930 and 3586 of
    PrimeIntellect-ai/prime-rl), not in its code.
    """
    return divergence.binary_tv(inputs.log_probs, anchor(inputs)) <= tv_threshold


@torch.no_grad()
def kpop(inputs: TokenInputs, anchor: Anchor, *, kl_threshold: float) -> Tensor:
    """KPop: blocked where the binary KL of anchor and pi exceeds ``kl_threshold`` nats in either direction, whatever
    the sign of A.

    Its authors' note (ringtech.notion.site/kpop) was read to its motivation only; the formula and the threshold are
    those of two implementations of it (PrimeIntellect-ai/prime-rl, pull request 3283; verl-project/verl, 6800). Where
    they compare pi' with mu, here the policy that is trained is compared.
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
    """Predictive divergence mask (arXiv 2607.10848): blocked where the Top-K KL(mu || pi) exceeds ``kl_threshold``
    nats and the update raises it, A times ``divergence.topk_kl_change`` > 0.

    ``tail``: what TopK(mu) leaves out counts as one token, or as equally likely ones (the paper's two estimators), or
    as proportional to pi (ours); at K = V they are one, and exact. ValueError where the number of those tokens, or the
    sum of pi^2, is not known. From its abstract, a description of it and the formula as its authors' code has it, at
    second hand; the paper's text was not read.
    """
    wanted = {"one": None, "uniform": "tail_ids", "proportional": "sum_squares"}[tail]
    given = {} if wanted is None else {wanted: getattr(inputs, wanted)}
    if None in given.values():
        raise ValueError(f"the mask has a {tail} tail, but TokenInputs has no {wanted}")
    topk = topk_of(inputs, anchor)
    distance = divergence.topk_kl(*topk)
    change = divergence.topk_kl_change(*topk, **given)
    falls = inputs.advantages.sign() * change <= 0
    return ((distance <= kl_threshold) | falls) & distance.isfinite()


def _ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    return (inputs.log_probs.detach() - anchor(inputs)).exp()


def inside(inputs: TokenInputs, above_low: Tensor, below_high: Tensor) -> Tensor:
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
    return (close | inward(inputs, anchor)) & distance.isfinite()


def inward(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """True where the update leads back to the anchor."""
    # Outward are A > 0 with r > 1 and A < 0 with r < 1: further the way pi has gone.
    return inputs.advantages.sign() * (inputs.log_probs.detach() - anchor(inputs)) <= 0


def topk_of(inputs: TokenInputs, anchor: Anchor) -> tuple[Tensor, Tensor, Tensor]:
    """log pi, log of ``anchor`` and validity at its TopK and at the sampled token. Raises ValueError without them."""
    if inputs.topk_log_probs is None:
        raise ValueError("the mask needs Top-K log-probabilities, but TokenInputs has none")
    # TokenInputs has all three or none.
    assert inputs.rollout_topk_log_probs is not None
    assert inputs.topk_valid is not None
    others = inputs.rollout_topk_log_probs
    if anchor is not rollout:
        # The columns are the anchor's; beside them stands mu of the sampled token, which is no part of its policy.
        others = torch.cat([others[..., :-1], anchor(inputs)[..., None].to(others.dtype)], -1)
    return inputs.topk_log_probs, others, inputs.topk_valid


# Rules that look at all tokens of an optimiser step, whatever replica, micro-batch or pack they are in. What they need
# to know of them is one number, found before the step by a pass without gradient; a mask reads it.

StepTotal = Callable[[Tensor], Tensor]
"""Sums a tensor over the replicas, in place."""

StepBound = Callable[[Tensor, Tensor, StepTotal], float]
"""(log r and A of this replica's trained tokens, the sum over replicas) -> the number. The same on every rank."""


def of_step(inputs: TokenInputs) -> Tensor:
    """``step_bound``. Raises ValueError where it is missing."""
    if inputs.step_bound is None:
        raise ValueError(
            "the mask looks at the whole optimiser step, but TokenInputs has no step_bound"
        )
    return inputs.step_bound


@torch.no_grad()
def outward_moment_cut(
    log_ratio: Tensor, advantages: Tensor, total: StepTotal, *, second_moment: float
) -> float:
    """The level c at which the mean of min((log r)^2, c) over the tokens that the update moves further out is
    ``second_moment``; inf where the mean of their (log r)^2 is no more than that. By halving: 32 sums of one number.
    """
    values = log_ratio.float().square().nan_to_num(nan=torch.inf)
    values = values[advantages.sign() * log_ratio > 0]
    number = float(
        total(torch.tensor(float(values.numel()), dtype=torch.float64).to(values.device))
    )

    def holds(cut: float) -> bool:
        return (
            float(total(values.clamp(max=cut).sum(dtype=torch.float64))) <= second_moment * number
        )

    return torch.inf if holds(torch.inf) else _largest_float32(holds)


@torch.no_grad()
def second_moment_cut(
    log_ratio: Tensor, advantages: Tensor, total: StepTotal, *, second_moment: float
) -> float:
    """The (log r)^2 up to which tokens train, so that the mean over them is at most ``second_moment``, and over no more
    of them; inf where all may. Equal values are on one side. By halving: 62 sums of two numbers.
    """
    values = log_ratio.float().square().nan_to_num(nan=torch.inf)

    def kept(cut: float) -> tuple[float, float]:
        """(sum, number) of the values up to ``cut``."""
        inside = values <= cut
        sums = torch.where(inside, values, 0.0).sum(dtype=torch.float64), inside.sum().double()
        found = total(torch.stack(sums)).tolist()
        return found[0], found[1]

    def is_within(cut: float) -> bool:
        moment, number = kept(cut)
        return moment <= second_moment * number

    below = _largest_float32(is_within)
    count = kept(below)[1]
    if count == total(
        torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
    ):
        return torch.inf
    # Between the last token that trains and the first that doesn't: the pass with a gradient may round otherwise.
    return 0.5 * (below + _largest_float32(lambda cut: kept(cut)[1] < count))


def _largest_float32(holds: Callable[[float], bool]) -> float:
    """The largest finite float32 of at least 0 at which ``holds``, as it does at every smaller one and at 0."""
    low, high = 0, int(torch.tensor(torch.finfo(torch.float32).max).view(torch.int32))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(_of_bits(middle)) else (low, middle - 1)
    return _of_bits(low)


def _of_bits(bits: int) -> float:
    """The float32 whose bits are this int32; between 0 and the largest one, they are in the same order."""
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


@torch.no_grad()
def outward_moment(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """M2PO (arXiv 2510.01161) as its authors released it: blocked where the update moves pi further away and (log r)^2
    exceeds the cut of ``outward_moment_cut``, which is PPO's clip with the bounds e^-sqrt(cut) and e^sqrt(cut).

    Read: the authors' code (Infini-AI-Lab/M2PO, ``compute_m2po_policy_loss`` and its scripts), whose r is against the
    policy that sampled, as here. There the moment is that of a micro-batch, so that the cut depends on how a batch is
    packed; here it is that of the optimiser step, over all replicas. There the cut is the largest of the tokens' own
    values below the level, here the level itself, which blocks the same tokens unless one of them is exactly at it. Not
    read: the paper's text.
    """
    squares = (inputs.log_probs.detach() - anchor(inputs)).double().square()
    return inward(inputs, anchor) | (squares <= of_step(inputs))


@torch.no_grad()
def second_moment(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """M2PO as AReaL reads it: the tokens with the largest (log r)^2 are blocked, as few as bring the mean over the
    others in the optimiser step to at most ``second_moment`` (``second_moment_cut``), whatever the sign of A.

    Read: the description and the code of AReaL, where the mean is over a rank's part of the step, and r is pi' / mu.
    ``outward_moment`` is the rule that the paper's authors released.
    """
    return (inputs.log_probs.detach() - anchor(inputs)).double().square() <= of_step(inputs)


def measured(name: str, inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """The divergence of ``divergence.py`` with that name at each token, float64: of Top-K tensors, else of pi and
    anchor.
    """
    measure: Callable[..., Tensor] = getattr(divergence, name)
    if name.startswith("topk"):
        return measure(*topk_of(inputs, anchor))
    return measure(inputs.log_probs, anchor(inputs))


Weight = Callable[[TokenInputs], Tensor]
"""w, shaped as ``log_probs``. Algorithms that weigh tokens otherwise than Eq. 23, by r = pi / mu, differ here."""


@torch.no_grad()
def importance_ratio(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """r = pi / mu, always against the rollout policy, whatever the mask is anchored on."""
    return (inputs.log_probs - inputs.rollout_log_probs).exp()


@torch.no_grad()
def drpo(inputs: TokenInputs, anchor: Anchor, *, penalty_threshold: float) -> Tensor:
    """w = r (1 - sign(A) (pi - mu) / delta): the gradient weight of DRPO (arXiv 2606.09821, section
    3).

    Implemented from what is public: the paper, and its authors' code (Tencent-Hunyuan/UniRL,
    ``_drpo_loss``), whose loss per token is -A r + |A| mu (r - 1)^2 / (2 delta). Differentiated,
    that is -w A grad log pi with the w above: DPPO's Binary-TV geometry with a smooth penalty in
    place of the mask. w falls to 0 where a harmful |pi - mu| reaches delta and turns against the
    update beyond it; delta = 12.5 is the authors' number ("the regularization threshold"), at which
    w / r stays within 8% of 1. The authors' code clips log r to [-20, 20]; here it is not.
    """
    shift = inputs.log_probs.exp() - inputs.rollout_log_probs.exp()
    ratio = (inputs.log_probs - inputs.rollout_log_probs).exp()
    return ratio * (1 - inputs.advantages.sign() * shift / penalty_threshold)


@torch.no_grad()
def complementary_ratio(inputs: TokenInputs, anchor: Anchor, *, smoothing: float) -> Tensor:
    """w = (1 + e - mu) / (1 + e - pi), e = ``smoothing``: the weight of Bellman policy optimization (arXiv 2609.15987).

    At e = 0 it is 1 plus the derivative of the binary KL(mu || pi) by log pi. The abstract and a third party's summary
    of the loss were read (weight, cap and "a GRPO-style clip mask" on the weight), not the paper's text; there is no
    public code of it.
    """
    kept = 1 + smoothing
    return (kept - inputs.rollout_log_probs.exp()) / (kept - inputs.log_probs.exp())


@torch.no_grad()
def soft_gate(
    inputs: TokenInputs, anchor: Anchor, *, tau_positive: float, tau_negative: float
) -> Tensor:
    """w = 4 s (1 - s) r, s = sigmoid(tau (r - 1)), tau by the sign of A: SAPO's (arXiv 2511.20347), whose loss per
    token is -A (4 / tau) sigmoid(tau (r - 1)); 1 at r = 1.

    Read in its abstract and in public code (verl's ``compute_policy_loss_sapo``, among others), which agree on gate
    and temperatures. SAPO's own objective averages a response's tokens: ``sequence-mean-token-mean``. A ratio that
    overflows, at which the weight is 0, blocks its token as one that is no number.
    """
    ratio = importance_ratio(inputs, anchor)
    tau = torch.where(inputs.advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    gate = tau * (ratio - 1)
    return 4 * gate.sigmoid() * (-gate).sigmoid() * ratio


@torch.no_grad()
def centering(inputs: TokenInputs, ratio_cap: float) -> Tensor:
    """c of score centering (arXiv 2609.20807, Eq. 12), [..., K]: the loss per token is

        -A [ min(r, C) log pi(y) - sum over TopK(mu) of c_v log pi_v ],    c_v = min(pi_v, C mu_v) - min(1, C rho) pi_v,

    rho = (1 - sum mu) / (1 - sum pi), both sums over TopK(mu). Under mu the weighted score of what is sampled then has
    the mean 0, where outside TopK(mu) mu is proportional to pi; at pi = mu every c is 0. 0 where an entry is not valid.
    The sampled token does not belong to the sums where TopK(mu) lacks it: they may not depend on it.

    Read: the abstract, and the derivation and the terms of two public implementations (vime, SkyRL's kind), which
    agree; not the paper's experiments.
    """
    topk, rollout_topk, valid = (x[..., :-1] for x in topk_of(inputs, rollout))
    pi = torch.where(valid, topk.detach().double().clamp(max=0).exp(), 0.0)
    mu = torch.where(valid, rollout_topk.double().clamp(max=0).exp(), 0.0)
    # The rest of a peaked pi is rounding; its factor is 1 at most, whatever it is.
    smallest = 4 * torch.finfo(topk.dtype).eps
    rests = [(1 - p.sum(-1, keepdim=True)).clamp(min=smallest) for p in (mu, pi)]
    scale = (ratio_cap * rests[0] / rests[1]).clamp(max=1)
    return torch.minimum(pi, ratio_cap * mu) - scale * pi


Penalty = Callable[[Tensor], tuple[Tensor, Tensor]]
"""log r = log pi - log mu -> (value of an additive term of the token's loss, its derivative by log pi). Holds for every
trained token, whatever the advantage, those that a mask blocks included."""

Correction = Callable[[TokenInputs], tuple[Tensor, Tensor]]
"""(value of a row's own additive term at each token, derivative of their sum by each log pi), float64."""

LARGEST_LOG_RATIO = 20.0
"""Exponents of penalties above it count as it: e^20 = 4.9e8, whose square, summed over a batch, is a float32."""


@torch.no_grad()
def kl(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """r - 1 - log r, whose mean under mu is KL(mu || pi); its derivative is r - 1. A log r above
    ``LARGEST_LOG_RATIO`` counts as it.
    """
    # e^88.7 is float32's largest number: unbounded, the term would block a token whose weight a finite cap cuts, and
    # two tokens just below it would make the batch's loss infinite.
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    shift = torch.expm1(log_ratio)
    return shift - log_ratio, shift


@torch.no_grad()
def squared_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(log r)^2 / 2; its derivative is log r."""
    return 0.5 * log_ratio.square(), log_ratio


PENALTIES: dict[str, Penalty] = {
    "kl_coefficient": kl,
    "log_ratio_coefficient": squared_log_ratio,
}
"""Option that holds the term's coefficient -> the term."""
