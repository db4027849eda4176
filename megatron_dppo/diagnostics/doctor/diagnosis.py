"""Find the cause that makes one side's probabilities differ from the reference's, and test whether the tokens were
sampled as the configuration says.

Each possible cause is simulated in the reference. The cause whose probabilities are nearest to the side's is named. Two
sides are examined separately: the engine's mu, and the trainer's pi in a step's first mini-batch if the weights of that
mini-batch are known. Both are compared with the reference, so that an error that both sides make is found too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, groupby

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.data.columns import usable_rows
from megatron_dppo.data.seal import Origin
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.reference import (
    Change,
    Reference,
    Sampling,
    at_temperature,
    first_tokens,
    most_probable,
    normaliser_of_first,
    nucleus,
)
from megatron_dppo.diagnostics.doctor.rounding import float8

NOISE = 3e-6
"""Mean |p - reference| up to which two float32 implementations agree; measured ones are below 1e-6."""
COARSE = 3.0
"""The noise of a run in bfloat16, as a multiple of the gap between the reference in float32 and in bfloat16."""
SPREADS, STRETCH = 2.0, 128
"""The gap of a healthy side may exceed the noise by SPREADS standard errors, from stretches of STRETCH tokens."""
EXPLAINED = 0.25
"""A cause is named if at most this share of the gap is left when the reference simulates it."""
EVIDENCE = 20.0
"""Log likelihood ratio above which another sampler is reported. If tokens are sampled as configured, the ratio of one
other sampler reaches it with a probability of at most exp(-20) (Markov: the ratio's expectation is 1)."""
FACTORS = (1, 2, 4, 8, 16)
"""Values of ``a``, the weight of a repetition in ``repetition_evidence``; the value with the most evidence counts."""
MICRO_BATCH = 2048
"""Largest number of tokens in one forward pass, padding included."""
TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
TOP_P = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)
TOP_K = (10, 20, 50, 100)
STRETCHES = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
THETAS = (1e4, 5e5, 1e6, 1e7)
ROUNDED = "all in bfloat16"
EIGHT_BITS = "all in 8 bits (E4M3)"
PARTS = ("embed_tokens", "self_attn", "norm", "mlp.gate.", ".experts.", "mlp.", "lm_head")
"""Parts of tensor names; a weight update may have missed the tensors of a part."""
OF_WEIGHTS = ("staleness", "weights", "cache")
"""Axes of the alternatives that use other weights or another cache."""


@dataclass(frozen=True)
class SampledRun:
    """The configuration of a run, as far as its probabilities depend on it.

    ``temperature`` divides the logits; ``tensor`` and ``expert`` are the numbers of ranks that split the tensors and
    the experts.
    """

    temperature: float
    tensor: int
    expert: int


def unchanged(_: Reference) -> AbstractContextManager[None]:
    """Leave the reference as it is."""
    return nullcontext()


@dataclass(frozen=True)
class Alternative:
    """A possible cause, ``name``: the reference computes logits under ``change`` and samples by ``sampling``."""

    axis: str
    name: str
    sampling: Sampling
    change: Change = field(default=unchanged)


@dataclass(frozen=True)
class Side:
    """The engine or the trainer, with the probabilities that it computed by the weights of ``version``.

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
        gaps: the gap that is left with each alternative, by its name, smallest first.
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
    def is_in_question(self) -> bool:
        """Whether the parallel layout may be the cause.

        The layout is ruled out if the named cause explains the whole gap except for rounding, or if that cause lies in
        the weights: a trainer that loads them again has the right ones.
        """
        if self.cause is None or self.is_healthy:
            return not self.is_healthy
        return self.cause.axis not in OF_WEIGHTS and self.gaps[self.cause.name] > self.noise

    @property
    def columns(self) -> tuple[str, str]:
        """Names of the two probabilities of a token."""
        return ("own choice", "as recorded") if self.side == RECORDING else (self.side, "reference")

    @property
    def axis(self) -> str:
        if self.is_healthy:
            return "healthy"
        return "unexplained" if self.cause is None else self.cause.axis


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
        """Whether the cause explains this token's gap: at most the share EXPLAINED of it is left, or NOISE."""
        return self.with_cause is not None and abs(self.side - self.with_cause) <= max(
            EXPLAINED * self.gap, NOISE
        )


# --- causes


def alternatives(run: SampledRun, reference: Reference, *, is_recorded: bool) -> list[Alternative]:
    """Return every cause that is possible in this run and needs no weights of another version."""
    sampling = at_temperature(run.temperature)
    transforms = [*samplers(run, reference.vocab_size)]
    for shards, count in _without_last(run, reference.vocab_size):
        name = f"normaliser without the last of {shards} shards of the vocabulary"
        transforms.append((name, normaliser_of_first(run.temperature, count)))
    causes = [Alternative("sampling transform", name, transform) for name, transform in transforms]

    def add_cause(axis: str, name: str, change: Change) -> None:
        causes.append(Alternative(axis, name, sampling, change))

    add_cause("precision", ROUNDED, Reference.in_bfloat16)
    rounded_head = partial(Reference.rounded, part="lm_head")
    add_cause("precision", "output layer in bfloat16", rounded_head)
    name = "output layer of bfloat16, logits in float32"
    add_cause("precision", name, partial(rounded_head, results=False))
    add_cause("precision", EIGHT_BITS, partial(Reference.rounded, results=False, to=float8))
    for name, prompts in (("", True), (", not while a prompt is read", False)):
        change = partial(Reference.cached_in_bfloat16, prompts=prompts)
        add_cause("cache", f"keys and values in bfloat16{name}", change)
    for name, frequencies in _frequencies(reference):
        add_cause("positions", name, partial(Reference.frequencies, change=frequencies))
    for first, second in (("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm")):
        if any(first in name for name in reference.tensors):
            name = f"{first} and {second} exchanged"
            add_cause("weights", name, partial(Reference.exchanged, first=first, second=second))
    for n in _ranks(run, reference):
        name = f"each of {n} ranks has the experts of the next"
        add_cause("weights", name, partial(Reference.experts_moved, ranks=n))
    if is_recorded:
        for name, layers, tokens in ROUTINGS:
            rows = partial(_recorded_rows, layers=layers, tokens=tokens)
            add_cause("routing", name, partial(Reference.routed, rows_of=rows))
    return causes


def alternatives_of_version(
    run: SampledRun, reference: Reference, version: int, other: Reference
) -> list[Alternative]:
    """Return the causes that need the weights of ``version``, ``other``: all of its weights are used, or a part."""
    all_weights = partial(Reference.tensors_of, other=other, part="")
    prompts = partial(Reference.prompts_cached_by, other=other)
    changes: list[tuple[str, str, Change]] = [
        ("staleness", "weights", all_weights),
        ("cache", "prompts' keys and values", prompts),
    ]
    for part in PARTS:
        if any(part in name for name in reference.tensors):
            change_of_part = partial(Reference.tensors_of, other=other, part=part)
            changes.append(("weights", part.strip("."), change_of_part))
    for n in _ranks(run, reference):
        for rank in range(n):
            change = partial(Reference.experts_of, other=other, rank=rank, ranks=n)
            changes.append(("weights", f"experts of rank {rank} of {n}", change))
    sampling = at_temperature(run.temperature)
    return [
        Alternative(axis, f"{name} of version {version}", sampling, change)
        for axis, name, change in changes
    ]


def _ranks(run: SampledRun, reference: Reference) -> list[int]:
    """Return the numbers of ranks over which the experts may have been split."""
    return [n for n in sorted({2, run.expert}) if n > 1] if reference.gates else []


RECORDED, NATURAL = "experts as recorded", "experts by its own choice"
ROUTINGS = (
    (RECORDED, 0, 0),
    ("recorded experts of the layer before", 1, 0),
    ("recorded experts of the layer after", -1, 0),
    ("recorded experts of the token before", 0, 1),
    ("recorded experts of the token after", 0, -1),
)
"""Name of the alternative, and the numbers of layers and tokens by which the recorded rows are shifted."""
MOVED_RECORDINGS = tuple(name for name, *moved in ROUTINGS if any(moved))
RECORDING = "recording"
"""Name of the side that compares p with the router's own experts to p with the recorded experts."""


def is_decisive(alternative: Alternative) -> bool:
    """Return whether the alternative is scored for every side.

    Such an alternative decides whether a side is healthy, or needs no forward pass of its own. The other alternatives
    are scored only for a side that differs.
    """
    return alternative.change is unchanged or alternative.name in (ROUNDED, EIGHT_BITS, RECORDED)


def samplers(run: SampledRun, size: int) -> Iterator[tuple[str, Sampling]]:
    """Yield the name and transform of every other way to sample from a vocabulary of ``size`` tokens."""
    configured = run.temperature
    for temperature in dict.fromkeys((1.0, 1 / configured, *TEMPERATURES)):
        if temperature != configured:
            yield f"temperature {temperature:g}, not {configured:g}", at_temperature(temperature)
    for top_p in TOP_P:
        yield f"top_p {top_p:g}", nucleus(configured, top_p)
    for count in (count for count in TOP_K if count < size):
        yield f"top_k {count}", most_probable(configured, count)
    for shards, count in _without_last(run, size):
        yield f"vocabulary without the last of {shards} shards", first_tokens(configured, count)


def _without_last(run: SampledRun, size: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of shards of the vocabulary, each with the number of token ids before the last shard."""
    for shards in sorted({2, 4, 8, run.tensor} - {1}):
        yield shards, size - size // shards


def _frequencies(reference: Reference) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield the name and function of every change of the rotary frequencies."""
    for stretch in STRETCHES:
        yield f"positions times {stretch:g}", partial(torch.mul, other=stretch)
    frequencies = reference.rotary_frequencies
    exponents = torch.arange(len(frequencies)) / len(frequencies)
    for theta in THETAS:
        unscaled = theta**-exponents
        if not torch.allclose(unscaled, frequencies, rtol=1e-4):
            yield f"rotary base {theta:g}, unscaled", unscaled.to


def _recorded_rows(trajectory: Trajectory, layers: int, tokens: int) -> Tensor | None:
    """Return the recorded experts, shifted by ``tokens`` and ``layers``; None if the trajectory has none.

    Rows that other weights recorded are -1: the trainer's router chooses the experts of those tokens itself.
    """
    if "routed_experts" not in trajectory.columns:
        return None
    rows = torch.from_numpy(trajectory.column("routed_experts").astype(np.int64))
    rows[torch.from_numpy(~usable_rows(trajectory.loss_mask, trajectory.columns))] = -1
    return rows.roll((tokens, layers), (0, 1))


# --- sides


def engine_side(batch: Sequence[Trajectory]) -> Side | None:
    """Return the engine's side: mu of the responses that one weight version sampled, the most frequent such version.

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

    The weights of this mini-batch are those of the step before. Returns None if no response of the mini-batch had a
    gradient.
    """
    candidates = enumerate(batch[:mini_batch])
    positions = tuple(i for i, t in candidates if "loss_log_probs" in t.columns)
    if not positions:
        return None
    return Side("trainer", step - 1, positions, _columns(batch, positions, "loss_log_probs"))


def _columns(batch: Sequence[Trajectory], chosen: Sequence[int], name: str) -> tuple[Tensor, ...]:
    # Convert to float64: the differences to measure are as small as float32's rounding.
    return tuple(torch.from_numpy(batch[i].column(name).astype(np.float64)) for i in chosen)


# --- judgement


def scores(
    reference: Reference,
    chosen: Sequence[Alternative],
    batch: Sequence[Trajectory],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[Tensor]]:
    """Compute log p of the sampled tokens of each trajectory under each alternative of ``chosen``.

    Returns a list of float64 [N] tensors, one for each trajectory, by the alternative's name. ``advance`` is called
    after each pass.
    """
    by_name: dict[str, list[Tensor]] = {alternative.name: [] for alternative in chosen}
    # Neighbouring alternatives with the same change share one forward pass.
    for _, group in groupby(chosen, key=lambda alternative: alternative.change):
        members = list(group)
        with members[0].change(reference):
            for micro_batch in _micro_batches(batch):
                for t, logits in zip(
                    micro_batch, reference.sampled_logits(micro_batch), strict=True
                ):
                    ids = torch.from_numpy(t.response_ids.astype(np.int64))[:, None]
                    for alternative in members:
                        log_probs = alternative.sampling(logits).gather(-1, ids)[:, 0]
                        by_name[alternative.name].append(log_probs)
        advance()
    return by_name


def _micro_batches(batch: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    """Yield parts of the batch with at most MICRO_BATCH tokens, padding included, and at least one trajectory."""
    max_length = max(t.length for t in batch)
    count = max(1, MICRO_BATCH // max_length)
    for start in range(0, len(batch), count):
        yield batch[start : start + count]


def by_recording(
    natural: Sequence[Tensor], by_name: Mapping[str, list[Tensor]]
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Exchange two roles: the recorded experts become the reference, and the router's own choice an alternative.

    Args:
        natural: log p with the experts that the router chooses itself.
        by_name: log p by each alternative's name, ``RECORDED`` among them.

    Returns:
        log p with the recorded experts, and log p by each alternative's name, ``NATURAL`` among them. The difference
        that rounding makes was computed with the router's own choice; it is added to log p with the recorded experts.
    """
    by_alternative = dict(by_name)
    recorded = by_alternative.pop(RECORDED)
    for name in (ROUNDED, EIGHT_BITS):
        by_alternative[name] = [
            # A tie in routing may change the sum much; the clamp keeps p at most 1.
            (r + rounded - n).clamp(max=0.0)
            for r, rounded, n in zip(recorded, by_name[name], natural, strict=True)
        ]
    return recorded, {**by_alternative, NATURAL: list(natural)}


def judge(
    side: Side,
    batch: Sequence[Trajectory],
    plain: Sequence[Tensor],
    by_alternative: Mapping[str, Sequence[Tensor]],
    chosen: Sequence[Alternative],
    rounding: str | None,
) -> Diagnosis:
    """Decide whether ``side`` differs from the reference, and name the cause.

    Args:
        side: the side to judge.
        batch: all trajectories of the batch.
        plain: log p by the reference, one tensor for each trajectory of the side.
        by_alternative: the same with each alternative, by its name.
        chosen: the alternatives that may be named.
        rounding: name of the alternative that rounds as coarsely as a healthy side may; None if the side computes in
            float32.
    """
    probabilities, reference = joined(side.log_probs).exp(), joined(plain).exp()
    side_gap = gap(probabilities, reference)
    gaps = {name: gap(probabilities, joined(v).exp()) for name, v in by_alternative.items()}
    rounding_gap = gap(reference, joined(by_alternative[ROUNDED]).exp())
    noises = [torch.full_like(q, NOISE) for q in plain]
    if rounding is not None:
        noises = [
            COARSE * (q.exp() - r.exp()).abs()
            for q, r in zip(plain, by_alternative[rounding], strict=True)
        ]
    differences = zip(side.log_probs, plain, noises, strict=True)
    spread = _spread([(p.exp() - q.exp()).abs() - noise for p, q, noise in differences])
    noise = float(joined(noises).mean())
    cause = (
        _cause(side_gap, gaps, noise, rounding_gap, chosen) if side_gap > noise + spread else None
    )
    with_cause = None if cause is None else joined(by_alternative[cause.name]).exp()
    return Diagnosis(
        side=side.name,
        version=side.version,
        gap=side_gap,
        noise=noise,
        spread=spread,
        gaps=dict(sorted(gaps.items(), key=lambda item: item[1])),
        cause=cause,
        tokens=_evidence(side, batch, probabilities, reference, with_cause),
    )


def _spread(differences: Sequence[Tensor]) -> float:
    """Return ``SPREADS`` standard errors of the mean over all tokens, from sums over stretches of text.

    If a router's best experts score nearly equally, another rounding selects another expert, and all later tokens
    differ. Such a difference is in few stretches; that of a side with an error is in many.
    """
    stretches: list[Tensor] = []
    for difference in differences:
        stretches += [part for part in difference.split(STRETCH) if len(part)]
    if len(stretches) < 2:
        return 0.0
    tokens = sum(map(len, stretches))
    mean = sum(float(part.sum()) for part in stretches) / tokens
    # Subtract the mean, so that a difference that is equal everywhere has no spread, whatever the stretches' lengths.
    sums = torch.stack([part.sum() - mean * len(part) for part in stretches])
    return SPREADS * float(sums.std()) * math.sqrt(len(sums)) / tokens


def _cause(
    whole: float,
    gaps: Mapping[str, float],
    noise: float,
    rounded: float,
    chosen: Sequence[Alternative],
) -> Alternative | None:
    """Return the alternative that explains the gap ``whole``, or None.

    ``rounded`` is the gap between the reference and itself in bfloat16.
    """
    nearest = min(chosen, key=lambda alternative: gaps[alternative.name])
    if gaps[nearest.name] <= max(noise, EXPLAINED * whole):
        return nearest
    # Two implementations in bfloat16 round in different places: only the sizes of their gaps are comparable.
    if rounded / COARSE <= whole <= rounded * COARSE:
        return next(alternative for alternative in chosen if alternative.name == ROUNDED)
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
    expected: Tensor,
    with_cause: Tensor | None,
) -> list[TokenEvidence]:
    """Return the evidence of all tokens of the side, largest gap first."""
    ids = [batch[i].response_ids.tolist() for i in side.positions]
    places: list[tuple[int, int, int]] = []
    for response, tokens in zip(side.positions, ids, strict=True):
        for position, token_id in enumerate(tokens):
            places.append((response, position, token_id))
    order = (probabilities - expected).abs().argsort(descending=True, stable=True).tolist()
    return [
        TokenEvidence(
            response=places[k][0],
            position=places[k][1],
            token_id=places[k][2],
            side=float(probabilities[k]),
            reference=float(expected[k]),
            with_cause=None if with_cause is None else float(with_cause[k]),
        )
        for k in order
    ]


# --- how tokens were drawn


@dataclass(frozen=True)
class Draws:
    """How the tokens of a side were sampled.

    Attributes:
        tokens: number of tokens.
        sampler: name of another sampler that is likelier than the configured one beyond chance; None if none is.
        evidence: log likelihood ratio of the likeliest other sampler to the configured one.
        copies: pairs of equal responses of a group, by position in the batch.
        expected_copies: expected number of such pairs under mu.
        copies_evidence: log likelihood ratio for more copies than mu explains, comparable to ``evidence``.
    """

    tokens: int
    sampler: str | None
    evidence: float
    copies: Sequence[tuple[int, int]]
    expected_copies: float
    copies_evidence: float

    @property
    def are_copies(self) -> bool:
        """Whether there are more equal responses than chance explains."""
        return self.copies_evidence > EVIDENCE


def repetition_evidence(groups: Iterable[Sequence[tuple[Hashable, float]]]) -> float:
    """Return the evidence that responses repeat more often than independent sampling explains.

    ``groups`` has one sequence of (response, its log mu) for each problem. A response repeats an earlier one of its
    group with the probability p = sum of mu over the distinct earlier responses. With R repetitions in all, exp(a R) /
    prod (1 + p (e^a - 1)) has the mean 1 for every a. The result is the largest logarithm over the values ``FACTORS``
    of a; it exceeds E with a probability of at most ``len(FACTORS)`` e^-E (Markov).
    """
    repeated, chances = 0, []
    for group in groups:
        mu_by_response: dict[Hashable, float] = {}
        for response, log_mu in group:
            chances.append(min(1.0, sum(mu_by_response.values())))
            repeated += response in mu_by_response
            mu_by_response[response] = math.exp(log_mu)
    return max(a * repeated - sum(math.log1p(p * math.expm1(a)) for p in chances) for a in FACTORS)


def draws(
    batch: Sequence[Trajectory],
    side: Side,
    configured: Sequence[Tensor],
    by_sampler: Mapping[str, Sequence[Tensor]],
) -> Draws:
    """Compare the configured sampler of ``side`` with other samplers, and count equal responses.

    Args:
        batch: all trajectories of the batch.
        side: the engine's side.
        configured: log p of the sampled tokens under the configured sampler. For a healthy side, pass its own values:
            the reference differs from them by the side's rounding.
        by_sampler: log p of the same tokens under each other sampler, by its name.
    """
    trajectories = [batch[i] for i in side.positions]
    ids = [t.token_ids.tobytes() for t in trajectories]
    # Count equal responses as often as they occur: without the repeats of likely responses, the temperature would
    # look higher than it is.
    base = float(joined(configured).sum())
    ratios = {name: float(joined(values).sum()) - base for name, values in by_sampler.items()}
    sampler = max(ratios, key=ratios.__getitem__)
    positions_by_problem: dict[int, list[int]] = {}
    for k, t in enumerate(trajectories):
        positions_by_problem.setdefault(t.problem_id, []).append(k)
    groups = list(positions_by_problem.values())
    pairs: list[tuple[int, int]] = []
    for group in groups:
        pairs += combinations(group, 2)
    log_mu = [float(log_probs.sum()) for log_probs in side.log_probs]
    responses_by_group: list[list[tuple[Hashable, float]]] = []
    for group in groups:
        responses_by_group.append([(ids[k], log_mu[k]) for k in group])
    return Draws(
        tokens=len(joined(configured)),
        sampler=sampler if ratios[sampler] > EVIDENCE else None,
        evidence=ratios[sampler],
        copies=[(side.positions[a], side.positions[b]) for a, b in pairs if ids[a] == ids[b]],
        # P(b = a | a) = mu(a); either of the two may be the first.
        expected_copies=sum((math.exp(log_mu[a]) + math.exp(log_mu[b])) / 2 for a, b in pairs),
        copies_evidence=repetition_evidence(responses_by_group),
    )


def prompt_faults(batch: Sequence[Trajectory], origin: Origin) -> list[str]:
    """List the responses whose prompt differs from the one that data, tokenizer, template and environment make now."""
    faults: list[str] = []
    for t in batch:
        if origin.has_prompt(t):
            continue
        problem = origin.problems.get(t.problem_id)
        made_now = f"{len(problem.prompt_ids)} tokens" if problem else "no such problem"
        faults.append(
            f"{t}: its prompt of {len(t.prompt_ids)} tokens is not what data, tokenizer and template make now "
            f"({made_now})"
        )
    return faults
