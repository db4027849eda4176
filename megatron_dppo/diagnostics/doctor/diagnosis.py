"""Which cause makes one side's probabilities differ from the reference's: of all that a cause would have made of them,
what comes nearest; and whether the tokens were drawn as the configuration says.

Two sides are examined, each by itself: the engine's mu, and the trainer's pi where its weights are known, in a step's
first mini-batch. So a mistake that both make is seen as well as one that the other does not.
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
"""How many times the gap between the reference and itself in bfloat16 is noise of a run in bfloat16."""
SPREADS, STRETCH = 2.0, 128
"""Standard errors that the gap may be above the noise, between stretches of so many tokens."""
EXPLAINED = 0.25
"""Share of the gap that may be left where a cause is named."""
EVIDENCE = 20.0
"""log of the likelihood ratio from which another sampler is believed. Where tokens are drawn as configured, a given
other one reaches it with a probability of at most exp(-20) (Markov: the ratio's expectation is 1)."""
FACTORS = (1, 2, 4, 8, 16)
"""What a repetition may count, of which the most telling one is taken."""
MICRO_BATCH = 2048
"""Tokens that are scored at a time."""
TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
TOP_P = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)
TOP_K = (10, 20, 50, 100)
STRETCHES = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
THETAS = (1e4, 5e5, 1e6, 1e7)
ROUNDED = "all in bfloat16"
EIGHT_BITS = "all in 8 bits (E4M3)"
PARTS = ("embed_tokens", "self_attn", "norm", "mlp.gate.", ".experts.", "mlp.", "lm_head")
"""Names of tensors that an update may have left out."""
OF_WEIGHTS = ("staleness", "weights", "cache")
"""Axes of alternatives with other weights, or another cache."""


@dataclass(frozen=True)
class SampledRun:
    """What a run is configured to do: logits are divided by ``temperature``; tensors and experts are cut over so many
    ranks."""

    temperature: float
    tensor: int
    expert: int


def unchanged(_: Reference) -> AbstractContextManager[None]:
    """The reference's own logits."""
    return nullcontext()


@dataclass(frozen=True)
class Alternative:
    """What would have been computed if ``name`` had been done: logits under ``change``, sampled as ``sampling``."""

    axis: str
    name: str
    sampling: Sampling
    change: Change = field(default=unchanged)


@dataclass(frozen=True)
class Side:
    """``log_probs``: of the sampled tokens of the trajectories at ``positions`` of the batch, one tensor each."""

    name: str
    version: int
    positions: tuple[int, ...]
    log_probs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Diagnosis:
    """On one side. ``gap``: mean |p - reference|; ``noise``: what rounding makes of it; ``spread``: what few stretches
    of text may add; ``gaps``: what each alternative leaves of it, least first; ``cause``: the one that is named; None:
    healthy, or unexplained. ``tokens``: the largest gap first."""

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
        """Whether layout may be the cause: no other one explains all of the gap but rounding, or is of weights, which
        a trainer that is loaded anew has right."""
        if self.cause is None or self.is_healthy:
            return not self.is_healthy
        return self.cause.axis not in OF_WEIGHTS and self.gaps[self.cause.name] > self.noise

    @property
    def columns(self) -> tuple[str, str]:
        """What the two probabilities of a token are."""
        return ("own choice", "as recorded") if self.side == RECORDING else (self.side, "reference")

    @property
    def axis(self) -> str:
        if self.is_healthy:
            return "healthy"
        return "unexplained" if self.cause is None else self.cause.axis


@dataclass(frozen=True)
class TokenEvidence:
    """A token that shows a cause: probabilities by the side, by the reference, and with the cause."""

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
        """Whether the cause leaves no more of it than where a cause is named."""
        return self.with_cause is not None and abs(self.side - self.with_cause) <= max(
            EXPLAINED * self.gap, NOISE
        )


# --- causes


def alternatives(run: SampledRun, reference: Reference, *, is_recorded: bool) -> list[Alternative]:
    """Every cause that is possible here and needs no other weights."""
    sampling = at_temperature(run.temperature)
    transforms = [*samplers(run, reference.vocab_size)]
    for shards, count in _without_last(run, reference.vocab_size):
        name = f"normaliser without the last of {shards} shards of the vocabulary"
        transforms.append((name, normaliser_of_first(run.temperature, count)))
    causes = [Alternative("sampling transform", name, transform) for name, transform in transforms]

    def changed(axis: str, name: str, change: Change) -> None:
        causes.append(Alternative(axis, name, sampling, change))

    changed("precision", ROUNDED, Reference.in_bfloat16)
    changed("precision", "output layer in bfloat16", lambda r: r.rounded("lm_head"))
    name = "output layer of bfloat16, logits in float32"
    changed("precision", name, lambda r: r.rounded("lm_head", results=False))
    changed("precision", EIGHT_BITS, lambda r: r.rounded(results=False, to=float8))
    for name, prompts in (("", True), (", not while a prompt is read", False)):
        change = partial(Reference.cached_in_bfloat16, prompts=prompts)
        changed("cache", f"keys and values in bfloat16{name}", change)
    for name, frequencies in _frequencies(reference):
        changed("positions", name, partial(Reference.frequencies, change=frequencies))
    for first, second in (("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm")):
        if any(first in name for name in reference.tensors):
            name = f"{first} and {second} exchanged"
            changed("weights", name, partial(Reference.exchanged, first=first, second=second))
    for n in _ranks(run, reference):
        name = f"each of {n} ranks has the experts of the next"
        changed("weights", name, partial(Reference.experts_moved, ranks=n))
    if is_recorded:
        for name, layers, tokens in ROUTINGS:
            rows = partial(_recorded_rows, layers=layers, tokens=tokens)
            changed("routing", name, partial(Reference.routed, rows_of=rows))
    return causes


def alternatives_of_version(
    run: SampledRun, reference: Reference, version: int, other: Reference
) -> list[Alternative]:
    """What weights of ``version``, ``other``, may have to do with it: all of them, or a part."""
    whole = partial(Reference.tensors_of, other=other, part="")
    prompts = partial(Reference.prompts_cached_by, other=other)
    changes: list[tuple[str, str, Change]] = [
        ("staleness", "weights", whole),
        ("cache", "prompts' keys and values", prompts),
    ]
    for part in (p for p in PARTS if any(p in name for name in reference.tensors)):
        of_part = partial(Reference.tensors_of, other=other, part=part)
        changes.append(("weights", part.strip("."), of_part))
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
    """Over how many the experts may have been cut."""
    return [n for n in sorted({2, run.expert}) if n > 1] if reference.gates else []


RECORDED, NATURAL = "experts as recorded", "experts by its own choice"
ROUTINGS = (
    (RECORDED, 0, 0),
    ("recorded experts of the layer before", 1, 0),
    ("recorded experts of the layer after", -1, 0),
    ("recorded experts of the token before", 0, 1),
    ("recorded experts of the token after", 0, -1),
)
"""(name, layers and tokens that rows are moved by)."""
MOVED_RECORDINGS = tuple(name for name, *moved in ROUTINGS if any(moved))
RECORDING = "recording"
"""Name of the side that is p by the router's own choice, against p by the recorded one."""


def is_decisive(alternative: Alternative) -> bool:
    """Whether it has a say in a side's being healthy, or costs nothing: the others are of sides that differ."""
    return alternative.change is unchanged or alternative.name in (ROUNDED, EIGHT_BITS, RECORDED)


def samplers(run: SampledRun, size: int) -> Iterator[tuple[str, Sampling]]:
    """Other ways to draw from a vocabulary of ``size``."""
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
    """Numbers of shards, and of ids without the last of them."""
    for shards in sorted({2, 4, 8, run.tensor} - {1}):
        yield shards, size - size // shards


def _frequencies(reference: Reference) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    for stretch in STRETCHES:
        yield f"positions times {stretch:g}", partial(torch.mul, other=stretch)
    own = reference.rotary_frequencies
    exponents = torch.arange(len(own)) / len(own)
    for theta in THETAS:
        unscaled = theta**-exponents
        if not torch.allclose(unscaled, own, rtol=1e-4):
            yield f"rotary base {theta:g}, unscaled", unscaled.to


def _recorded_rows(trajectory: Trajectory, layers: int, tokens: int) -> Tensor | None:
    """None where nothing was recorded, -1 in rows of other weights: there the trainer takes its own choice, too."""
    if "routed_experts" not in trajectory.columns:
        return None
    rows = torch.from_numpy(trajectory.column("routed_experts").astype(np.int64))
    rows[torch.from_numpy(~usable_rows(trajectory.loss_mask, trajectory.columns))] = -1
    return rows.roll((tokens, layers), (0, 1))


# --- sides


def engine_side(batch: Sequence[Trajectory]) -> Side | None:
    """mu as it was returned, of the responses of the most frequent version that have no other. None where each has
    several."""
    version_by_position = {
        i: spans[0].weight_version
        for i, t in enumerate(batch)
        if len(spans := t.version_spans) == 1
    }
    if not version_by_position:
        return None
    versions = list(version_by_position.values())
    version = max(set(versions), key=versions.count)
    chosen = tuple(i for i, v in version_by_position.items() if v == version)
    return Side("engine", version, chosen, _columns(batch, chosen, "rollout_log_probs"))


def trainer_side(batch: Sequence[Trajectory], step: int, mini_batch: int) -> Side | None:
    """pi as the loss saw it in the step's first mini-batch of ``mini_batch`` responses: its weights are those of the
    step before. None where no response of it had a gradient."""
    first = enumerate(batch[:mini_batch])
    chosen = tuple(i for i, t in first if "loss_log_probs" in t.columns)
    if not chosen:
        return None
    return Side("trainer", step - 1, chosen, _columns(batch, chosen, "loss_log_probs"))


def _columns(batch: Sequence[Trajectory], chosen: Sequence[int], name: str) -> tuple[Tensor, ...]:
    # Differences are as small as float32's rounding.
    return tuple(torch.from_numpy(batch[i].column(name).astype(np.float64)) for i in chosen)


# --- judgement


def scores(
    reference: Reference,
    chosen: Sequence[Alternative],
    batch: Sequence[Trajectory],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[Tensor]]:
    """log p of the sampled tokens of each trajectory, float64 [N], by the alternative's name."""
    by_name: dict[str, list[Tensor]] = {alternative.name: [] for alternative in chosen}
    # Alternatives without a change share one pass.
    for _, group in groupby(chosen, key=lambda alternative: alternative.change):
        members = list(group)
        with members[0].change(reference):
            for some in _micro_batches(batch):
                for t, logits in zip(some, reference.sampled_logits(some), strict=True):
                    ids = torch.from_numpy(t.response_ids.astype(np.int64))[:, None]
                    for alternative in members:
                        log_probs = alternative.sampling(logits).gather(-1, ids)[:, 0]
                        by_name[alternative.name].append(log_probs)
        advance()
    return by_name


def _micro_batches(batch: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    """Of at most MICRO_BATCH tokens with their padding, and at least one trajectory."""
    longest = max(t.length for t in batch)
    count = max(1, MICRO_BATCH // longest)
    for start in range(0, len(batch), count):
        yield batch[start : start + count]


def by_recording(
    natural: Sequence[Tensor], by_name: Mapping[str, list[Tensor]]
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """log p where experts are taken as recorded, and that by each alternative, ``NATURAL`` among them. What rounding
    changes is added: it was computed with the router's own choice."""
    others = dict(by_name)
    recorded = others.pop(RECORDED)
    for name in (ROUNDED, EIGHT_BITS):
        others[name] = [
            # A tie in routing may move it far, but not beyond certainty.
            (r + changed - n).clamp(max=0.0)
            for r, changed, n in zip(recorded, by_name[name], natural, strict=True)
        ]
    return recorded, {**others, NATURAL: list(natural)}


def judge(
    side: Side,
    batch: Sequence[Trajectory],
    plain: Sequence[Tensor],
    by_alternative: Mapping[str, Sequence[Tensor]],
    chosen: Sequence[Alternative],
    rounding: str | None,
) -> Diagnosis:
    """Name what makes ``side`` differ. ``plain``, ``by_alternative``: log p by the reference, of its trajectories.
    ``rounding``: the alternative that is as coarse as the side may be; None: the side is in float32."""
    probabilities, expected = joined(side.log_probs).exp(), joined(plain).exp()
    whole = gap(probabilities, expected)
    gaps = {name: gap(probabilities, joined(v).exp()) for name, v in by_alternative.items()}
    rounded = gap(expected, joined(by_alternative[ROUNDED]).exp())
    noises = [torch.full_like(q, NOISE) for q in plain]
    if rounding is not None:
        noises = [
            COARSE * (q.exp() - r.exp()).abs()
            for q, r in zip(plain, by_alternative[rounding], strict=True)
        ]
    differences = zip(side.log_probs, plain, noises, strict=True)
    spread = _spread([(p.exp() - q.exp()).abs() - noise for p, q, noise in differences])
    noise = float(joined(noises).mean())
    cause = _cause(whole, gaps, noise, rounded, chosen) if whole > noise + spread else None
    with_cause = None if cause is None else joined(by_alternative[cause.name]).exp()
    return Diagnosis(
        side=side.name,
        version=side.version,
        gap=whole,
        noise=noise,
        spread=spread,
        gaps=dict(sorted(gaps.items(), key=lambda item: item[1])),
        cause=cause,
        tokens=_evidence(side, batch, probabilities, expected, with_cause),
    )


def _spread(differences: Sequence[Tensor]) -> float:
    """``SPREADS`` standard errors of the mean over all tokens, from sums over stretches of text.

    A router whose best experts are nearly equal takes another one where it rounds otherwise, and all that follows
    differs. A side that is wrong is so in many places.
    """
    stretches = [part for d in differences for part in d.split(STRETCH) if len(part)]
    if len(stretches) < 2:
        return 0.0
    tokens = sum(map(len, stretches))
    mean = sum(float(part.sum()) for part in stretches) / tokens
    # Less the mean: what is wrong everywhere alike has no spread, however long the stretches are.
    sums = torch.stack([part.sum() - mean * len(part) for part in stretches])
    return SPREADS * float(sums.std()) * math.sqrt(len(sums)) / tokens


def _cause(
    whole: float,
    gaps: Mapping[str, float],
    noise: float,
    rounded: float,
    chosen: Sequence[Alternative],
) -> Alternative | None:
    best = min(chosen, key=lambda alternative: gaps[alternative.name])
    if gaps[best.name] <= max(noise, EXPLAINED * whole):
        return best
    # Two implementations in bfloat16 round in different places: only the size of the gap is the same.
    if rounded / COARSE <= whole <= rounded * COARSE:
        return next(alternative for alternative in chosen if alternative.name == ROUNDED)
    return None


def joined(log_probs: Sequence[Tensor]) -> Tensor:
    """Of all tokens, one trajectory after another."""
    return torch.cat(list(log_probs))


def gap(p: Tensor, q: Tensor) -> float:
    """Mean |p - q|."""
    return float((p - q).abs().mean())


def _evidence(
    side: Side,
    batch: Sequence[Trajectory],
    probabilities: Tensor,
    expected: Tensor,
    with_cause: Tensor | None,
) -> list[TokenEvidence]:
    """All tokens, those with the largest gaps first."""
    ids = [batch[i].response_ids.tolist() for i in side.positions]
    where = [
        (i, n, token)
        for i, tokens in zip(side.positions, ids, strict=True)
        for n, token in enumerate(tokens)
    ]
    largest = (probabilities - expected).abs().argsort(descending=True, stable=True).tolist()
    return [
        TokenEvidence(
            response=where[k][0],
            position=where[k][1],
            token_id=where[k][2],
            side=float(probabilities[k]),
            reference=float(expected[k]),
            with_cause=None if with_cause is None else float(with_cause[k]),
        )
        for k in largest
    ]


# --- how tokens were drawn


@dataclass(frozen=True)
class Draws:
    """``evidence``: log likelihood ratio of ``sampler`` to the configured one; None: none is likelier than chance
    explains. ``copies``: pairs of equal responses of a group, by position in the batch; ``expected_copies``: how many
    mu lets expect; ``copies_evidence``: as ``evidence``, that there are more."""

    tokens: int
    sampler: str | None
    evidence: float
    copies: Sequence[tuple[int, int]]
    expected_copies: float
    copies_evidence: float

    @property
    def are_copies(self) -> bool:
        """More equal responses than chance explains."""
        return self.copies_evidence > EVIDENCE


def repetition_evidence(groups: Iterable[Sequence[tuple[Hashable, float]]]) -> float:
    """How much speaks for more repetitions than independent draws have, of groups of (response, its log mu).

    A draw repeats an earlier one of its group with the probability p = sum of mu over these, each counted once. With R
    repetitions in all, exp(a R) / prod (1 + p (e^a - 1)) has the mean 1 for every a: its logarithm, the largest over
    ``FACTORS``, exceeds E with a probability of at most ``len(FACTORS)`` e^-E (Markov).
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
    """How the tokens of ``side`` were drawn. ``configured``: as they should be; of a side that is healthy its own
    numbers, from which the reference may differ by as much as they are coarse."""
    trajectories = [batch[i] for i in side.positions]
    ids = [t.token_ids.tobytes() for t in trajectories]
    # Equal responses count as often as they came: likely ones come often, and without them all would look hotter.
    base = float(joined(configured).sum())
    ratios = {name: float(joined(values).sum()) - base for name, values in by_sampler.items()}
    sampler = max(ratios, key=ratios.__getitem__)
    positions_by_problem: dict[int, list[int]] = {}
    for k, t in enumerate(trajectories):
        positions_by_problem.setdefault(t.problem_id, []).append(k)
    pairs = [pair for group in positions_by_problem.values() for pair in combinations(group, 2)]
    whole = [float(log_probs.sum()) for log_probs in side.log_probs]
    return Draws(
        tokens=len(joined(configured)),
        sampler=sampler if ratios[sampler] > EVIDENCE else None,
        evidence=ratios[sampler],
        copies=[(side.positions[a], side.positions[b]) for a, b in pairs if ids[a] == ids[b]],
        # P(b = a | a) = mu(a); either of the two may be the first.
        expected_copies=sum((math.exp(whole[a]) + math.exp(whole[b])) / 2 for a, b in pairs),
        copies_evidence=repetition_evidence(
            [(ids[k], whole[k]) for k in group] for group in positions_by_problem.values()
        ),
    )


def prompt_faults(batch: Sequence[Trajectory], origin: Origin) -> list[str]:
    """Responses whose prompt is not what the run's data, tokenizer, template and environment make now."""
    return [
        f"{t}: its prompt of {len(t.prompt_ids)} tokens is not what data, tokenizer and template make now "
        f"({f'{len(problem.prompt_ids)} tokens' if problem else 'no such problem'})"
        for t in batch
        for problem in [origin.problems.get(t.problem_id)]
        if not origin.has_prompt(t)
    ]
