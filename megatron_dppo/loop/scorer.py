"""The weighted sum of all rewards that a run is configured with, computed in their processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.rewards import USABLE_NUMBER, RewardInput, is_usable
from megatron_dppo.rewards.verifier import Score, Verifier


@dataclass(frozen=True)
class PendingScore:
    """A response's pending scores, and the weight of each reward, both by the reward's name."""

    scores: Mapping[str, Future[Score]]
    weights: Mapping[str, float]

    @classmethod
    def known(cls, score: Score) -> Self:
        """Return a score that is known already: an environment's, with no reward to compute."""
        future: Future[Score] = Future()
        future.set_result(score)
        return cls({"environment": future}, {"environment": 1.0})

    def result(self) -> Score:
        """Wait for all scores and return their weighted sum.

        Raises VerifierError where a reward raised or a worker can't start.
        """
        return weighted_sum(
            {name: score.result() for name, score in self.scores.items()}, self.weights
        )


class Scorer:
    """The verifiers of all rewards of ``config``; their worker processes run inside the context.

    ``failures`` counts failures of rewards over all ranks, by the name of the metric. The generations add to it.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.max_replacements = config.max_replacements
        self.failures: Counter[str] = Counter()
        terms = config.terms
        self._verifiers = {name: Verifier.of(term) for name, term in terms.items()}
        self._weights = {name: term.weight for name, term in terms.items()}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for verifier in self._verifiers.values():
                stack.enter_context(verifier)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def submit(self, reward_input: RewardInput) -> PendingScore:
        """Start scoring a response; returns at once."""
        futures = {
            name: verifier.submit(reward_input) for name, verifier in self._verifiers.items()
        }
        return PendingScore(futures, self._weights)


def weighted_sum(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Return sum_i w_i r_i over the rewards of one response, with its components.

    With one reward, the components are the reward's own. With several, each reward's value is a component, and its own
    components are named ``name/component``. A refusal or an unavailable reward makes the sum refused or unavailable,
    with the name of the reward. A sum that is not a usable number is a refusal.
    """
    refusals = [
        f"reward {name}: {s.refusal}" for name, s in scores.items() if s.refusal is not None
    ]
    if refusals:
        return Score(0.0, refusal=refusals[0])
    unavailable_rewards = [
        f"reward {name}: {s.unavailable}" for name, s in scores.items() if s.unavailable is not None
    ]
    if unavailable_rewards:
        return Score.without_value("; ".join(unavailable_rewards))
    components: dict[str, float] = {}
    for name, score in scores.items():
        if len(scores) > 1:
            components[name] = score.value
        prefix = f"{name}/" if len(scores) > 1 else ""
        components |= {f"{prefix}{part}": value for part, value in score.components.items()}
    reasons = {name: s.reason for name, s in scores.items() if s.reason}
    total = sum(weights[name] * score.value for name, score in scores.items())
    if not is_usable(total):
        parts = ", ".join(f"{name} {s.value:g} * {weights[name]:g}" for name, s in scores.items())
        return Score(
            0.0, refusal=f"the weighted sum of {parts} is {total:g}, expected {USABLE_NUMBER}"
        )
    return Score(
        total,
        timed_out=any(s.timed_out for s in scores.values()),
        crashed=any(s.crashed for s in scores.values()),
        components=components,
        reason="; ".join(
            f"{name}: {reason}" if len(scores) > 1 else reason for name, reason in reasons.items()
        ),
    )
