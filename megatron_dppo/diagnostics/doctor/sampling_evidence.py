"""Test whether tokens were sampled, and prompts made, as the configuration says."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from megatron_dppo.data.seal import Origin
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.diagnosis import EVIDENCE, Side, joined

FACTORS = (1, 2, 4, 8, 16)
"""Values of ``a`` in ``repetition_evidence``, the weight of a repetition. The value with the most evidence counts."""


@dataclass(frozen=True)
class Draws:
    """How the tokens of a side were sampled.

    Attributes:
        tokens: number of tokens.
        sampler: name of another sampler that is likelier than the configured sampler by more than chance; None if there
            is no likelier sampler.
        evidence: log likelihood ratio of the likeliest other sampler to the configured sampler.
        copies: pairs of equal responses of a group, by position in the batch.
        expected_copies: expected number of pairs of equal responses under mu.
        copies_evidence: log likelihood ratio for more copies than mu explains, comparable to ``evidence``.
    """

    tokens: int
    sampler: str | None
    evidence: float
    copies: Sequence[tuple[int, int]]
    expected_copies: float
    copies_evidence: float

    @property
    def has_copies(self) -> bool:
        """Whether there are more equal responses than chance explains."""
        return self.copies_evidence > EVIDENCE


def repetition_evidence(groups: Iterable[Sequence[tuple[Hashable, float]]]) -> float:
    """Return the evidence that responses repeat more often than independent sampling explains.

    ``groups`` has one sequence of (response, its log mu) for each problem. Each response has its own p, the probability
    that it repeats an earlier response of its group: the sum of mu over the distinct earlier responses. R is the number
    of repetitions in all groups, and prod is the product over all responses. For every a, the ratio
    exp(a R) / prod (1 + p (e^a - 1)) has the expectation 1. The result is the largest logarithm of this ratio over the
    values ``FACTORS`` of a. It exceeds E with a probability of at most ``len(FACTORS)`` e^-E (Markov).
    """
    repetitions = 0
    chances: list[float] = []
    for group in groups:
        mu_by_response: dict[Hashable, float] = {}
        for response, log_mu in group:
            chances.append(min(1.0, sum(mu_by_response.values())))
            repetitions += response in mu_by_response
            mu_by_response[response] = math.exp(log_mu)
    evidence: list[float] = []
    for a in FACTORS:
        log_denominator = sum(math.log1p(p * math.expm1(a)) for p in chances)
        evidence.append(a * repetitions - log_denominator)
    return max(evidence)


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
        configured: log p of the sampled tokens under the configured sampler. For a healthy side, pass the side's own
            values, because the reference's values lack the side's rounding.
        by_sampler: log p of the same tokens under each other sampler, by its name.
    """
    trajectories = [batch[i] for i in side.positions]
    # Keep repeated responses in the sums of log p. Likely responses repeat most: without the repeats, the temperature
    # would look higher than it is.
    configured_sum = float(joined(configured).sum())
    ratios: dict[str, float] = {}
    for name, log_probs in by_sampler.items():
        ratios[name] = float(joined(log_probs).sum()) - configured_sum
    sampler = max(ratios, key=ratios.__getitem__)
    # Groups of indices into ``trajectories``.
    indices_by_problem: dict[int, list[int]] = {}
    for k, t in enumerate(trajectories):
        indices_by_problem.setdefault(t.problem_id, []).append(k)
    groups = list(indices_by_problem.values())
    pairs: list[tuple[int, int]] = []
    for group in groups:
        pairs += combinations(group, 2)
    ids = [t.token_ids.tobytes() for t in trajectories]
    log_mu = [float(log_probs.sum()) for log_probs in side.log_probs]
    responses_by_group: list[list[tuple[Hashable, float]]] = []
    for group in groups:
        responses_by_group.append([(ids[k], log_mu[k]) for k in group])
    copies: list[tuple[int, int]] = []
    expected_copies = 0.0
    for a, b in pairs:
        # P(b = a | a) = mu(a). Either of the two may be the first, so take the mean.
        expected_copies += (math.exp(log_mu[a]) + math.exp(log_mu[b])) / 2
        if ids[a] == ids[b]:
            copies.append((side.positions[a], side.positions[b]))
    return Draws(
        tokens=len(joined(configured)),
        sampler=sampler if ratios[sampler] > EVIDENCE else None,
        evidence=ratios[sampler],
        copies=copies,
        expected_copies=expected_copies,
        copies_evidence=repetition_evidence(responses_by_group),
    )


def prompt_faults(batch: Sequence[Trajectory], origin: Origin) -> list[str]:
    """List the responses whose prompt is not the prompt that data, tokenizer, template and environment make now."""
    faults: list[str] = []
    for t in batch:
        if origin.has_prompt(t):
            continue
        problem = origin.problems.get(t.problem_id)
        made_now = "no such problem"
        if problem:
            made_now = f"{len(problem.prompt_ids)} tokens"
        faults.append(
            f"{t}: its prompt of {len(t.prompt_ids)} tokens is not what data, tokenizer and template make now "
            f"({made_now})"
        )
    return faults
