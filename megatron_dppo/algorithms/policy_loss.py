"""The one policy gradient of every algorithm (arXiv 2602.04879 v2, Eq. 23): a row of the table as functions, what it
decides about each token, the loss, and the metrics of the tokens. And the penalty for leaving a reference policy, which
any of them may have: estimates of KL(pi || reference) and of KL(reference || pi) from the sampled tokens (derivations:
docs/algorithms.md, "Reference policy").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import projection, rules, sequence_rules, table
from megatron_dppo.algorithms.inputs import ANCHORS, Anchor, TokenInputs, rollout, trained_tokens
from megatron_dppo.algorithms.rules import (
    LARGEST_LOG_RATIO,
    PENALTIES,
    Correction,
    Mask,
    Penalty,
    StepBound,
    Weight,
)
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.sums import FREQUENCY_SUMS, MetricSums


@dataclass(frozen=True)
class Algorithm(table.AlgorithmFacts):
    """What the loss needs of an algorithm.

    ``mask``: True where a token trains. ``weight``: w in M min(w, C) A grad log pi. ``step_bound``: finds what the
    mask reads of all tokens of an optimiser step; None where it reads nothing of them. ``penalties``:
    additive terms with their coefficients. ``correction``: an additive term of the algorithm's own; None where it has
    none.
    """

    mask: Mask
    weight: Weight
    step_bound: StepBound | None
    penalties: tuple[tuple[float, Penalty], ...]
    correction: Correction | None = None

    @property
    def anchor(self) -> Anchor:
        """What the mask compares pi with."""
        return ANCHORS[self.preset.anchor]

    def divergence(self, inputs: TokenInputs) -> Tensor | None:
        """D of each token, float64, as the mask computes it; None where the mask measures none."""
        if self.preset.divergence is None:
            return None
        return rules.measured(self.preset.divergence, inputs, self.anchor)


def build_algorithm(
    name: str,
    options: Mapping[str, Any] | None = None,
    settings: table.Settings = "stability",
) -> Algorithm:
    """The preset ``name`` with its functions; arguments and ValueErrors are those of ``algorithm_facts``."""
    facts = table.algorithm_facts(name, options, settings)
    preset, numbers, anchor = facts.preset, facts.numbers, ANCHORS[facts.preset.anchor]
    of_mask, of_weight = (
        {n: value for n, value in numbers.items() if table.OPTIONS[n].role in (role, "both")}
        for role in ("mask", "weight")
    )
    of_step, of_correction = (
        {n: value for n, value in numbers.items() if table.OPTIONS[n].role == role}
        for role in ("step", "correction")
    )
    step_bound = None if preset.step_bound is None else getattr(rules, preset.step_bound)
    modules = (sequence_rules, projection, rules) if preset.sequences else (projection, rules)
    mask, weight = (_function(modules, name) for name in (preset.mask, preset.weight))
    correction = None
    if preset.correction is not None:
        function = _function((sequence_rules,), preset.correction)
        correction = partial(function, anchor=anchor, **of_correction)
    return Algorithm(
        name=name,
        preset=preset,
        numbers=numbers,
        mask=partial(mask, anchor=anchor, **preset.fixed, **of_mask),
        weight=partial(weight, anchor=anchor, **of_weight),
        step_bound=step_bound and partial(step_bound, **of_step),
        penalties=tuple((numbers[n], term) for n, term in PENALTIES.items() if numbers.get(n)),
        correction=correction,
    )


def _function(modules: Sequence[ModuleType], name: str) -> Callable[..., Any]:
    """The function with that name in the first of ``modules`` that has one."""
    owner = next(module for module in modules if hasattr(module, name))
    return getattr(owner, name)


@dataclass(frozen=True)
class Decisions:
    """Per token, shaped as ``log_probs``; without gradient.

    ``trains``: bool; in ``loss_mask``, finite, and not blocked by the mask. ``finite``: bool; every
    number that the algorithm reads there is finite. ``weight``: w. ``capped``: min(w, C).
    """

    trains: Tensor
    finite: Tensor
    weight: Tensor
    capped: Tensor


@torch.no_grad()
def decide(algorithm: Algorithm, inputs: TokenInputs) -> Decisions:
    """Where the mask and finite numbers let a token train.

    A number that is not finite blocks its token, whatever the sign of A: log pi, log mu, the anchor
    pi' and the valid Top-K entries where the algorithm reads them, and the capped weight. So an
    overflowing ratio blocks one token under an infinite cap, and is cut under a finite one.
    """
    weight = algorithm.weight(inputs)
    capped = weight.clamp(max=algorithm.ratio_cap)
    finite = _finite(algorithm, inputs) & capped.isfinite()
    trains = algorithm.mask(inputs) & inputs.loss_mask & finite
    return Decisions(trains, finite, weight, capped)


def _finite(algorithm: Algorithm, inputs: TokenInputs) -> Tensor:
    log_ratio = inputs.log_probs - inputs.rollout_log_probs
    finite = log_ratio.isfinite()
    for _, term in algorithm.penalties:
        finite = finite & term(log_ratio)[0].isfinite()
    if algorithm.needs_recomputed and inputs.recomputed_log_probs is not None:
        finite = finite & inputs.recomputed_log_probs.isfinite()
    if algorithm.reads_topk and inputs.topk_valid is not None:
        assert inputs.topk_log_probs is not None
        assert inputs.rollout_topk_log_probs is not None
        differences = inputs.topk_log_probs - inputs.rollout_topk_log_probs
        finite = finite & (differences.isfinite() | ~inputs.topk_valid).all(-1)
    return finite


@dataclass(frozen=True)
class LossSums:
    """``loss``: scalar, a SUM over tokens, undivided, with the gradient. ``metrics``: sums of the
    same tokens, without. ``blocked``: bool [T], the tokens in ``loss_mask`` that a mask keeps from
    training; None where the loss has no mask.
    """

    loss: Tensor
    metrics: MetricSums
    blocked: Tensor | None = None


def policy_loss(
    algorithm: Algorithm, inputs: TokenInputs, token_scale: Tensor | None = None
) -> LossSums:
    """Sum over tokens in ``loss_mask`` of -M min(w, C) A, whose gradient is -sum M min(w, C) A grad
    log pi, plus the algorithm's penalties.

    w is r = pi / mu except where the algorithm says otherwise (``rules.py``). M, w, C and A
    carry no gradient; it flows through ``inputs.log_probs`` only, and with score centering through
    ``inputs.topk_log_probs``. ``token_scale``: a factor of each
    token's loss, 1 where it is None. Tokens with a zero coefficient get a gradient of exactly 0,
    even where log pi is -inf. A token at which something else is not finite is blocked and counted
    (``decide``); log pi or A that are NaN reach the loss, for the trainer to stop on. Nothing
    is divided: the caller divides once by a global count.
    """
    decisions = decide(algorithm, inputs)
    with torch.no_grad():
        value, slope, metrics = _coefficients(algorithm, inputs, decisions)
        metrics = token_metrics(inputs, decisions, algorithm.ratio_cap) + metrics
        if token_scale is not None:
            scale = token_scale.to(value.dtype)
            value, slope = value * scale, slope * scale
    used = torch.where(slope != 0, inputs.log_probs, 0.0)
    # log pi - stop(log pi) has the value 0 and log pi's gradient: the loss reads as the surrogate,
    # not as A log pi.
    loss = (value + slope * (used - used.detach())).sum()
    if algorithm.preset.centers:
        loss = loss + _centered(algorithm, inputs, decisions, token_scale)
    if algorithm.preset.projects:
        further, added = _projected(algorithm, inputs, decisions, token_scale)
        loss, metrics = loss + further, metrics + added
    return LossSums(loss, metrics, inputs.loss_mask & ~decisions.trains)


def _centered(
    algorithm: Algorithm, inputs: TokenInputs, decisions: Decisions, token_scale: Tensor | None
) -> Tensor:
    """Score centering's part: the value 0, and the gradient sum of A c_v grad log pi_v over trained tokens."""
    assert inputs.topk_log_probs is not None
    with torch.no_grad():
        slope = rules.centering(inputs, algorithm.ratio_cap)
        factor = inputs.advantages if token_scale is None else inputs.advantages * token_scale
        slope = torch.where(decisions.trains[..., None], factor[..., None] * slope, 0.0)
    topk = torch.where(slope != 0, inputs.topk_log_probs[..., :-1], 0.0)
    return (slope.to(topk.dtype) * (topk - topk.detach())).sum()


def _projected(
    algorithm: Algorithm, inputs: TokenInputs, decisions: Decisions, token_scale: Tensor | None
) -> tuple[Tensor, MetricSums]:
    """TROLL's part of the loss, and its metrics: the regression KL(pi || p) of trained tokens, and the difference that
    the projection makes to the surrogate's gradient, which has the value 0.
    """
    assert inputs.topk_log_probs is not None
    numbers = algorithm.numbers
    with torch.no_grad():
        found = projection.projected(inputs, numbers["kl_bound"])
        trains = decisions.trains
        surrogate = -torch.where(trains, decisions.capped * inputs.advantages, 0.0).double()
        distance = numbers["regression"] * torch.where(trains, found.distance, 0.0)
        columns = numbers["regression"] * found.distance_slopes
        columns = columns + surrogate[..., None] * found.of_columns
        columns = torch.where(trains[..., None], columns, 0.0)
        own = surrogate * (found.of_sampled - 1) + columns[..., -1]
        metrics = MetricSums(sums={names.PENALTY: distance.sum()})
        if token_scale is not None:
            scale = token_scale.double()
            distance, own, columns = scale * distance, scale * own, scale[..., None] * columns
    dtype = inputs.log_probs.dtype
    used = torch.where(own != 0, inputs.log_probs, 0.0)
    others = columns[..., :-1]
    topk = torch.where(others != 0, inputs.topk_log_probs[..., :-1], 0.0)
    loss = (distance.to(dtype) + own.to(dtype) * (used - used.detach())).sum()
    return loss + (others.to(topk.dtype) * (topk - topk.detach())).sum(), metrics


def _coefficients(
    algorithm: Algorithm, inputs: TokenInputs, decisions: Decisions
) -> tuple[Tensor, Tensor, MetricSums]:
    """Each token's loss, its derivative by log pi, and both kinds of terms as metrics."""
    surrogate = -torch.where(decisions.trains, decisions.capped * inputs.advantages, 0.0)
    # For the trainer to stop on: a policy that is not a number must not train by its mask alone.
    lost = inputs.loss_mask & (inputs.log_probs.isnan() | inputs.advantages.isnan())
    surrogate = torch.where(lost, torch.nan, surrogate)
    sums = {names.LOSS: surrogate.sum(dtype=torch.float64)}
    if not algorithm.penalties and algorithm.correction is None:
        return surrogate, surrogate, MetricSums(sums=sums)
    counted = inputs.loss_mask & decisions.finite
    log_ratio = torch.where(counted, inputs.log_probs - inputs.rollout_log_probs, 0.0)
    terms = [(c, *term(log_ratio)) for c, term in algorithm.penalties]
    if algorithm.correction is not None:
        value, derivative = (torch.where(counted, x, 0.0) for x in algorithm.correction(inputs))
        terms.append((1.0, value.to(surrogate.dtype), derivative.to(surrogate.dtype)))
    penalty = torch.stack([c * value for c, value, _ in terms]).sum(0)
    slope = torch.stack([c * derivative for c, _, derivative in terms]).sum(0)
    sums[names.PENALTY] = penalty.sum(dtype=torch.float64)
    return surrogate + penalty, surrogate + slope, MetricSums(sums=sums)


def negative_log_likelihood(log_probs: Tensor, loss_mask: Tensor) -> LossSums:
    """Maximum likelihood: -sum of log pi over the tokens that train, nats; the gradient flows through ``log_probs``
    where a token trains, whatever stands elsewhere.

    ``log_probs`` float ``[T]``, ``loss_mask`` bool ``[T]``. Metrics: the sum under
    ``loss/sum``, the number of tokens under ``policy/tokens``.
    """
    loss = -torch.where(loss_mask, log_probs, 0.0).sum()
    sums = {names.LOSS: loss.detach().double(), names.TRAINED_TOKENS: loss_mask.sum().double()}
    return LossSums(loss, MetricSums(sums=sums))


BAD_UPDATE_DROP = 0.5
"""A token with A < 0 whose probability fell by this much is a "bad update" (arXiv 2602.04879,
section 5).
"""
PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
"""Clip-Higher, with which every mask is compared."""


@torch.no_grad()
def token_metrics(inputs: TokenInputs, decisions: Decisions, ratio_cap: float) -> MetricSums:
    """The metrics of ``metrics.table`` over the tokens in ``loss_mask``.

    The names depend only on which optional tensors ``inputs`` has. Values are float64 scalars on
    the inputs' device; no device sync. A token whose log r is not finite adds nothing to the
    sums of probabilities and of r.
    """
    counted, advantages = inputs.loss_mask, inputs.advantages
    log_ratio = inputs.log_probs.double() - inputs.rollout_log_probs.double()
    mu = inputs.rollout_log_probs.double().exp()
    gap = inputs.log_probs.double().exp() - mu
    finite = counted & log_ratio.isfinite()
    positive, negative = counted & (advantages > 0), counted & (advantages < 0)
    blocked = counted & ~decisions.trains
    clipped = counted & ~rules.ratio_clip(inputs, rollout, **PPO_CLIP)
    sums = {
        names.TRAINED_TOKENS: _count(counted),
        names.GAP: _sum(finite, gap.abs()),
        names.SIGNED_GAP: _sum(finite, gap),
        names.KL: _sum(finite, torch.expm1(log_ratio) - log_ratio),
        names.BAD_UPDATE: _count(negative & (-gap >= BAD_UPDATE_DROP)),
        names.POSITIVE: _count(positive),
        names.NEGATIVE: _count(negative),
        names.MASKED: _count(blocked),
        names.MASKED_POSITIVE: _count(blocked & positive),
        names.MASKED_NEGATIVE: _count(blocked & negative),
        names.CAP_HIT: _count(counted & (decisions.weight > ratio_cap)),
        names.NONFINITE: _count(counted & ~decisions.finite),
        names.ROLLOUT_PROB_OF_MASKED: _sum(blocked & finite, mu),
        names.PPO_ONLY: _count(clipped & ~blocked),
        names.DPPO_ONLY: _count(blocked & ~clipped),
        **_entropy(inputs, blocked),
        **_surprise(inputs),
        **_topk_mass(inputs),
    }
    maxima = {
        names.GAP_MAX: _largest(finite, gap),
        names.RATIO_MAX: _largest(finite, log_ratio.exp()),
    }
    minima = {names.GAP_MIN: -_largest(finite, -gap)}
    return MetricSums(sums, maxima, minima)


def _entropy(inputs: TokenInputs, blocked: Tensor) -> dict[str, Tensor]:
    if inputs.entropy is None:
        return {}
    entropy = inputs.entropy.double()
    return {
        names.ENTROPY: _sum(inputs.loss_mask, entropy),
        names.ENTROPY_OF_MASKED: _sum(blocked, entropy),
    }


LONGEST_SURPRISE = 20.0
"""Nats. What lies further below the mean counts as this much below it (``_surprise``)."""
CUT_MEAN = 2e-4
"""Nats: what that cut adds to a mean at most: sum of p (-log p - 20) over p < e^-20, which is below V e^-21, for a
vocabulary of V = 260,000."""


def _surprise(inputs: TokenInputs) -> dict[str, Tensor]:
    """Sums of the frequency canary: xi and xi^2 of each token y, for both signs of

        xi = +-(-log mu(y) - H(pi)) - g,    g = |1 - r| |log pi(y)| + |log r| + CUT_MEAN,    r = pi(y) / mu(y),

    cut from below at -LONGEST_SURPRISE. Where y is drawn from mu, both have a mean of at most 0, for

        H(mu) - H(pi) = sum (pi - mu) log pi - KL(mu || pi),
        |E(-log mu) - H(pi)| <= E |1 - r| |log pi| + E |log r|.

    Where trainer and engine report the same wrong distribution, g is about 0 and the mean is off by as much as the true
    one has another mean of log mu.
    """
    if inputs.entropy is None:
        return {}
    log_pi, log_mu = inputs.log_probs.double(), inputs.rollout_log_probs.double()
    log_ratio = log_pi - log_mu
    finite = inputs.loss_mask & log_ratio.isfinite()
    explained = torch.expm1(log_ratio).abs() * log_pi.abs() + log_ratio.abs() + CUT_MEAN
    over = -log_mu - inputs.entropy.double()
    high, low = ((x - explained).clamp(min=-LONGEST_SURPRISE) for x in (over, -over))
    sums = (_sum(finite, x) for x in (high, high.square(), low, low.square()))
    return dict(zip(FREQUENCY_SUMS, sums, strict=True))


def _topk_mass(inputs: TokenInputs) -> dict[str, Tensor]:
    """Of TopK(mu) itself: without the sampled token, which stands last."""
    if inputs.rollout_topk_log_probs is None or inputs.topk_valid is None:
        return {}
    valid = inputs.topk_valid[..., :-1]
    log_mu = inputs.rollout_topk_log_probs[..., :-1]
    mass = torch.where(valid & ~log_mu.isnan(), log_mu.exp(), 0.0)
    return {names.TOPK_MASS: _sum(inputs.loss_mask, mass.sum(-1, dtype=torch.float64))}


def _sum(where: Tensor, value: Tensor) -> Tensor:
    return torch.where(where, value, 0.0).sum(dtype=torch.float64)


def _count(where: Tensor) -> Tensor:
    return where.sum().double()


def _largest(where: Tensor, value: Tensor) -> Tensor:
    # amax refuses a tensor of no elements, and a rank may have a micro-batch without tokens.
    if not value.numel():
        return value.new_tensor(-math.inf)
    return torch.where(where, value, -math.inf).amax()


ReferencePenalty = Callable[[LossSums, TokenInputs, Tensor, Tensor | None], LossSums]
"""(the algorithm's sums, its inputs, reference log-probabilities, factor of each token) -> sums with the penalty."""

Estimator = Callable[[Tensor], tuple[Tensor, Tensor]]
"""s = log reference - log pi -> (value, what multiplies grad log pi), both without gradient."""


@torch.no_grad()
def k1_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """-s, of mean KL(pi || reference); gradient: that of the mean. (Its own derivative, 1, has the mean gradient 0.)"""
    return -s, -s


@torch.no_grad()
def k2(s: Tensor) -> tuple[Tensor, Tensor]:
    """s^2 / 2, whose mean is either KL only to second order; its own derivative -s has the mean gradient of
    KL(pi || reference)."""
    return 0.5 * s.square(), -s


@torch.no_grad()
def k3(s: Tensor) -> tuple[Tensor, Tensor]:
    """e^s - 1 - s, of mean KL(pi || reference); but its own derivative 1 - e^s has the mean gradient of
    KL(reference || pi)."""
    growth = torch.expm1(s)
    return growth - s, -growth


@torch.no_grad()
def k3_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """e^s - 1 - s, of mean KL(pi || reference); gradient: that of the mean."""
    return torch.expm1(s) - s, -s


@torch.no_grad()
def reverse_k3_on_policy(s: Tensor) -> tuple[Tensor, Tensor]:
    """s e^s - e^s + 1, of mean KL(reference || pi); gradient: that of the mean."""
    growth = torch.expm1(s)
    return s * s.exp() - growth, -growth


ESTIMATORS: dict[table.EstimatorName, Estimator] = {
    "k1-on-policy": k1_on_policy,
    "k2": k2,
    "k3": k3,
    "k3-on-policy": k3_on_policy,
    "reverse-k3-on-policy": reverse_k3_on_policy,
}
"""``algorithm.reference_estimator`` -> the estimator. k1, k2, k3: http://joschu.net/blog/kl-approx.html."""


def reference_penalty(
    coefficient: float, estimator: table.EstimatorName = "k3", weight_cap: float | None = None
) -> ReferencePenalty:
    """``coefficient`` times an estimate in ``ESTIMATORS``, summed over the tokens in ``loss_mask``, masked ones
    included.

    ``weight_cap``: each token's term is multiplied by min(pi / mu, ``weight_cap``), without gradient, so that means
    over tokens of mu are means under pi; None: by nothing. The gradient flows through ``inputs.log_probs`` only. Like
    the algorithm's own terms it is multiplied by the token's factor, where there is one, and divided by nothing. s and
    log(pi / mu) count as no more than ``LARGEST_LOG_RATIO``; tokens with a larger s are counted. Computed in float64.
    Where log pi or the reference is -inf or NaN the loss is not finite, which the trainer stops on.
    """
    estimate = ESTIMATORS[estimator]

    def add(
        sums: LossSums, inputs: TokenInputs, reference: Tensor, scale: Tensor | None
    ) -> LossSums:
        mask, dtype = inputs.loss_mask, inputs.log_probs.dtype
        with torch.no_grad():
            s = torch.where(mask, reference.double() - inputs.log_probs.double(), 0.0)
            value, slope = estimate(s.clamp(max=LARGEST_LOG_RATIO))
            if weight_cap is not None:
                weight = torch.where(mask, _weight(inputs, weight_cap), 0.0)
                value, slope = weight * value, weight * slope
            metrics = {
                names.REFERENCE_KL: value.sum(),
                names.REFERENCE_CLAMPED: (s > LARGEST_LOG_RATIO).sum(dtype=torch.float64),
            }
            factor = coefficient if scale is None else coefficient * scale.double()
            value, slope = (factor * value).to(dtype), (factor * slope).to(dtype)
        used = torch.where(slope != 0, inputs.log_probs, 0.0)
        penalty = (value + slope * (used - used.detach())).sum()
        return replace(
            sums, loss=sums.loss + penalty, metrics=sums.metrics + MetricSums(sums=metrics)
        )

    return add


def _weight(inputs: TokenInputs, cap: float) -> Tensor:
    """min(pi / mu, cap), float64."""
    largest = min(LARGEST_LOG_RATIO, math.log(cap))
    log_ratio = inputs.log_probs.double() - inputs.rollout_log_probs.double()
    return log_ratio.clamp(max=largest).exp()


# What the tokens' summed loss is divided by: one global denominator.


@dataclass(frozen=True)
class Aggregation:
    """``denominator(lengths, constant)``: divides the sum over all tokens; ``lengths`` of the
    responses that train on any rank, in tokens. ``token_scale``: float64 factor of each token's
    loss before the sum; None: 1.

    Both are global counts or facts of one response, which always lies whole in a micro-batch: so
    the gradient does not depend on packing or on the layout.
    """

    denominator: Callable[[Sequence[int], float], float]
    token_scale: Callable[[TokenInputs], Tensor] | None = None


@torch.no_grad()
def one_over_length(inputs: TokenInputs) -> Tensor:
    """1 / (trained tokens of the token's response), float64."""
    return 1.0 / trained_tokens(inputs)


AGGREGATIONS: dict[table.AggregationName, Aggregation] = {
    "token-mean": Aggregation(lambda lengths, _: float(sum(lengths))),
    "sequence-mean-with-constant": Aggregation(lambda lengths, constant: len(lengths) * constant),
    "sequence-mean-token-sum": Aggregation(lambda lengths, _: float(len(lengths))),
    "sequence-mean-token-mean": Aggregation(
        lambda lengths, _: float(len(lengths)), one_over_length
    ),
}
"""``algorithm.aggregation`` -> what it does. ``sequence-mean-with-constant`` is Dr. GRPO's form,
``sequence-mean-token-mean`` GRPO's and GSPO's (arXiv 2507.18071, Eq. 5)."""
