"""Find the cause that makes the probabilities of one side differ from the probabilities of the reference.

The reference simulates each possible cause. The cause whose probabilities are nearest to the side's probabilities is
named. Two sides are examined separately: the engine's mu, and the trainer's pi in a step's first mini-batch. A side is
examined only if its weights are known. Because each side is compared with the reference, and not with the other side,
an error that both sides make is found too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.causes import (
    NATURAL,
    RECORDED,
    RECORDING,
    ROUNDED,
    ROUNDINGS,
    WEIGHT_AXES,
    Alternative,
)
from megatron_dppo.diagnostics.doctor.reference import Reference
from megatron_dppo.diagnostics.explain.explanation import as_float64, as_int64

NOISE = 3e-6
"""Two float32 implementations agree if mean |p - reference| is at most this value. Measured means are below 1e-6."""
COARSE = 3.0
"""The noise of a side that rounds is this factor times the gap that the same rounding makes in the reference."""
SPREADS, STRETCH = 2.0, 128
"""The gap of a healthy side may exceed the noise by SPREADS standard errors. Stretches of STRETCH tokens count as
independent in the standard error."""
EXPLAINED = 0.25
"""A cause is named if at most this share of the gap is left when the reference simulates it."""
EVIDENCE = 20.0
"""Another sampler is reported if its log likelihood ratio is above this value. If tokens are sampled as configured, the
probability that one other sampler reaches the value is at most exp(-20) (Markov: the ratio's expectation is 1)."""
MICRO_BATCH = 2048
"""Largest number of tokens in one forward pass, padding included."""


Reading = Callable[[Trajectory, Tensor], Tensor]
"""(response, log p of all ids at its N sampled tokens [N, V]) -> the log p that a side is compared by [N]."""


@dataclass(frozen=True)
class Side:
    """The engine or the trainer, with the probabilities that it computed with the weights of ``version``.

    ``log_probs`` has one tensor for each trajectory at ``positions`` of the batch: log p of its sampled tokens.
    """

    name: str
    version: int
    positions: tuple[int, ...]
    log_probs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The result for one side.

    Attributes:
        side, version: name of the side, and version of its weights.
        gap: mean |p - reference|.
        noise: the part of the gap that rounding explains.
        spread: the part that the random differences between stretches of text explain.
        gaps: the gap that is left with each alternative, by the alternative's name, smallest first.
        cause: the alternative that is named; None if the side is healthy or its gap is unexplained.
        tokens: all tokens, largest gap first.
    """

    side: str
    version: int
    gap: float
    noise: float
    spread: float
    gaps: Mapping[str, float]
    cause: Alternative | None
    tokens: Sequence[TokenEvidence]

    @property
    def bound(self) -> float:
        """The largest gap of a healthy side."""
        return self.noise + self.spread

    @property
    def is_healthy(self) -> bool:
        return self.gap <= self.bound

    @property
    def may_be_layout(self) -> bool:
        """Whether the parallel layout may be the cause.

        The layout is ruled out if the named cause explains the whole gap except for rounding. It is also ruled out if
        the named cause lies in the weights. A trainer in one process loads the right weights from the version's folder,
        so it agrees with the reference even if the layout is right.
        """
        if self.is_healthy:
            return False
        if self.cause is None:
            return True
        return self.cause.axis not in WEIGHT_AXES and self.gaps[self.cause.name] > self.noise

    @property
    def columns(self) -> tuple[str, str]:
        """Names of the two probabilities of a token."""
        if self.side == RECORDING:
            return ("own choice", "as recorded")
        return (self.side, "reference")

    @property
    def axis(self) -> str:
        if self.is_healthy:
            return "healthy"
        if self.cause is None:
            return "unexplained"
        return self.cause.axis


@dataclass(frozen=True)
class TokenEvidence:
    """A token and its probabilities: the side's, the reference's, and the reference's with the cause."""

    response: int
    position: int
    token_id: int
    side: float
    reference: float
    with_cause: float | None

    @property
    def gap(self) -> float:
        return abs(self.side - self.reference)

    @property
    def is_explained(self) -> bool:
        """Whether the cause explains the token's gap: at most NOISE, or the share EXPLAINED of the gap, is left."""
        if self.with_cause is None:
            return False
        remaining_gap = abs(self.side - self.with_cause)
        return remaining_gap <= max(EXPLAINED * self.gap, NOISE)


def engine_side(batch: Sequence[Trajectory]) -> Side | None:
    """Return the engine's side: mu of the responses with a single weight version, for the most frequent such version.

    Returns None if every response was sampled by several versions.
    """
    version_by_position: dict[int, int] = {}
    for i, t in enumerate(batch):
        if len(t.version_spans) == 1:
            version_by_position[i] = t.version_spans[0].weight_version
    if not version_by_position:
        return None
    versions = list(version_by_position.values())
    version = max(set(versions), key=versions.count)
    positions = tuple(i for i, v in version_by_position.items() if v == version)
    return Side("engine", version, positions, _columns(batch, positions, "rollout_log_probs"))


def trainer_side(batch: Sequence[Trajectory], step: int, mini_batch: int) -> Side | None:
    """Return the trainer's side: pi as the loss computed it in the step's first mini-batch of ``mini_batch`` responses.

    The first mini-batch of ``step`` uses the weights of version ``step - 1``. Returns None if no response of the
    mini-batch had a gradient.
    """
    candidates = enumerate(batch[:mini_batch])
    positions = tuple(i for i, t in candidates if "loss_log_probs" in t.columns)
    if not positions:
        return None
    return Side("trainer", step - 1, positions, _columns(batch, positions, "loss_log_probs"))


def _columns(batch: Sequence[Trajectory], indices: Sequence[int], name: str) -> tuple[Tensor, ...]:
    return tuple(as_float64(batch[i].column(name)) for i in indices)


def of_sampled(t: Trajectory, log_probs: Tensor) -> Tensor:
    """Return log p of the sampled tokens. It is a Reading."""
    ids = as_int64(t.response_ids)[:, None]
    return log_probs.gather(-1, ids)[:, 0]


def scores(
    reference: Reference,
    alternatives: Sequence[Alternative],
    batch: Sequence[Trajectory],
    advance: Callable[[], None] = lambda: None,
    reading: Reading = of_sampled,
) -> dict[str, list[Tensor]]:
    """Compute ``reading`` of each trajectory under each alternative of ``alternatives``.

    Returns a list of float64 [N] tensors, one for each trajectory, by the alternative's name. ``advance`` is called
    after each pass.
    """
    by_name: dict[str, list[Tensor]] = {alternative.name: [] for alternative in alternatives}
    # Neighbouring alternatives with the same change share one forward pass.
    for _, group in groupby(alternatives, key=lambda alternative: alternative.change):
        members = list(group)
        with members[0].change(reference):
            for micro_batch in _micro_batches(batch):
                for t, logits in zip(
                    micro_batch, reference.sampled_logits(micro_batch), strict=True
                ):
                    for alternative in members:
                        log_probs = reading(t, alternative.sampling(logits))
                        by_name[alternative.name].append(log_probs)
        advance()
    return by_name


def _micro_batches(batch: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    """Yield parts of the batch with at most MICRO_BATCH tokens, padding included, and at least one trajectory."""
    max_length = max(t.length for t in batch)
    count = max(1, MICRO_BATCH // max_length)
    for start in range(0, len(batch), count):
        yield batch[start : start + count]


def with_recorded_experts(
    natural: Sequence[Tensor], by_name: Mapping[str, list[Tensor]]
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Exchange two roles: make the recorded experts the reference, and the router's own choice an alternative.

    Args:
        natural: log p with the experts that the router chooses itself.
        by_name: log p by each alternative's name, ``RECORDED`` among them.

    Returns:
        log p with the recorded experts, and log p by each alternative's name, ``NATURAL`` among them. For an
        alternative that rounds, log p is an estimate: log p with the recorded experts, plus the change of log p that
        the rounding makes with the router's own choice.
    """
    exchanged = dict(by_name)
    recorded = exchanged.pop(RECORDED)
    for name in ROUNDINGS:
        if name not in by_name:
            continue
        estimates: list[Tensor] = []
        for log_p, rounded, unrounded in zip(recorded, by_name[name], natural, strict=True):
            # If two experts tie in the routing, rounding may change log p much; the clamp keeps p at most 1.
            estimates.append((log_p + rounded - unrounded).clamp(max=0.0))
        exchanged[name] = estimates
    return recorded, {**exchanged, NATURAL: list(natural)}


def judge(
    side: Side,
    batch: Sequence[Trajectory],
    plain: Sequence[Tensor],
    by_alternative: Mapping[str, Sequence[Tensor]],
    alternatives: Sequence[Alternative],
    rounding: str | None,
) -> Diagnosis:
    """Decide whether ``side`` differs from the reference, and name the cause.

    Args:
        side: the side to judge.
        batch: all trajectories of the batch.
        plain: log p by the reference, one tensor for each trajectory of the side.
        by_alternative: log p with each alternative, by its name, one tensor for each trajectory of the side.
        alternatives: the alternatives that may be named.
        rounding: name of the alternative that rounds as coarsely as a healthy side may; None if the side computes in
            float32.
    """
    probabilities = joined(side.log_probs).exp()
    reference = joined(plain).exp()
    side_gap = gap(probabilities, reference)
    gaps: dict[str, float] = {}
    for name, log_probs in by_alternative.items():
        gaps[name] = gap(probabilities, joined(log_probs).exp())
    # The gap between the reference and the reference in bfloat16.
    rounding_gap = gap(reference, joined(by_alternative[ROUNDED]).exp())
    noises: list[Tensor] = []
    differences: list[Tensor] = []
    for i, (log_p, log_q) in enumerate(zip(side.log_probs, plain, strict=True)):
        q = log_q.exp()
        token_noise = torch.full_like(q, NOISE)
        if rounding is not None:
            token_noise = COARSE * (q - by_alternative[rounding][i].exp()).abs()
        noises.append(token_noise)
        differences.append((log_p.exp() - q).abs() - token_noise)
    spread = _spread(differences)
    noise = float(joined(noises).mean())
    cause = None
    if side_gap > noise + spread:
        cause = _cause(side_gap, gaps, noise, rounding_gap, alternatives)
    with_cause = None
    if cause is not None:
        with_cause = joined(by_alternative[cause.name]).exp()
    return Diagnosis(
        side=side.name,
        version=side.version,
        gap=side_gap,
        noise=noise,
        spread=spread,
        gaps=dict(sorted(gaps.items(), key=itemgetter(1))),
        cause=cause,
        tokens=_evidence(side, batch, probabilities, reference, with_cause),
    )


def _spread(differences: Sequence[Tensor]) -> float:
    """Return ``SPREADS`` standard errors of the mean of ``differences`` over all tokens.

    The n sums over stretches of STRETCH tokens count as independent, so the standard error of the mean is
    std(sums) * sqrt(n) / tokens. Single tokens are not independent: if two experts score nearly equally in a router,
    rounding can exchange them, and then all later tokens of the response differ. A difference by rounding is in few
    stretches, so its spread is large. A difference by an error is in many stretches, so its spread is small.
    """
    stretches: list[Tensor] = []
    for difference in differences:
        stretches += [part for part in difference.split(STRETCH) if len(part)]
    if len(stretches) < 2:
        return 0.0
    tokens = sum(map(len, stretches))
    mean = sum(float(part.sum()) for part in stretches) / tokens
    # Subtract the mean: then a difference that is equal everywhere has no spread, even in stretches of unequal length.
    sums = torch.stack([part.sum() - mean * len(part) for part in stretches])
    return SPREADS * float(sums.std()) * math.sqrt(len(sums)) / tokens


def _cause(
    whole_gap: float,
    gaps: Mapping[str, float],
    noise: float,
    rounding_gap: float,
    alternatives: Sequence[Alternative],
) -> Alternative | None:
    """Return the alternative that explains the gap ``whole_gap``, or None.

    ``rounding_gap`` is the gap between the reference and itself in bfloat16.
    """
    nearest = min(alternatives, key=lambda alternative: gaps[alternative.name])
    if gaps[nearest.name] <= max(noise, EXPLAINED * whole_gap):
        return nearest
    # Two implementations in bfloat16 round in different places, so the reference in bfloat16 need not be near to a side
    # in bfloat16. Therefore name bfloat16 if rounding the reference makes a gap as large as the side's gap.
    if rounding_gap / COARSE <= whole_gap <= rounding_gap * COARSE:
        return next(alternative for alternative in alternatives if alternative.name == ROUNDED)
    return None


def joined(log_probs: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors of all trajectories into one [tokens]."""
    return torch.cat(list(log_probs))


def gap(p: Tensor, q: Tensor) -> float:
    """Return mean |p - q|."""
    return float((p - q).abs().mean())


def _evidence(
    side: Side,
    batch: Sequence[Trajectory],
    probabilities: Tensor,
    expected_probabilities: Tensor,
    with_cause: Tensor | None,
) -> list[TokenEvidence]:
    """Return the evidence of all tokens of the side, largest gap first."""
    ids = [batch[i].response_ids.tolist() for i in side.positions]
    positions: list[tuple[int, int, int]] = []
    for response, tokens in zip(side.positions, ids, strict=True):
        for position, token_id in enumerate(tokens):
            positions.append((response, position, token_id))
    gaps = (probabilities - expected_probabilities).abs()
    evidence: list[TokenEvidence] = []
    for k in gaps.argsort(descending=True, stable=True).tolist():
        response, position, token_id = positions[k]
        evidence.append(
            TokenEvidence(
                response=response,
                position=position,
                token_id=token_id,
                side=float(probabilities[k]),
                reference=float(expected_probabilities[k]),
                with_cause=None if with_cause is None else float(with_cause[k]),
            )
        )
    return evidence
