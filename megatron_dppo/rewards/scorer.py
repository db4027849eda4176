"""A response's reward: the weighted sum of all rewards that a run is configured with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards.verifier import Score, Verifier


@dataclass(frozen=True)
class PendingScore:
    """A response's score by every reward, under way. ``weights``: by name as ``scores``."""

    scores: Mapping[str, Future[Score]]
    weights: Mapping[str, float]

    @classmethod
    def known(cls, score: Score) -> Self:
        """What an environment says of a response that no reward is asked of."""
        future: Future[Score] = Future()
        future.set_result(score)
        return cls({"environment": future}, {"environment": 1.0})

    def result(self) -> Score:
        """The sum, once all are there. Raises VerifierError where a reward raised, or a worker can't start."""
        return weighted_sum(
            {name: score.result() for name, score in self.scores.items()}, self.weights
        )


class Scorer:
    """The verifiers of all rewards of ``config``; a context manager, in which they have their processes.

    ``failures``: by name of the metric, what rewards failed in on all ranks; whoever knows adds it.
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

    def submit(self, given: RewardInput) -> PendingScore:
        """Score a response while the caller goes on."""
        futures = {name: verifier.submit(given) for name, verifier in self._verifiers.items()}
        return PendingScore(futures, self._weights)


def weighted_sum(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """sum_i w_i r_i over the rewards of one response. Beside a single reward's own components there is nothing; of
    several each value is one, and its components are too, as ``name/component``.

    A refusal or an unavailable reward of one is that of the whole, with its name.
    """
    refusals = [
        f"reward {name}: {s.refusal}" for name, s in scores.items() if s.refusal is not None
    ]
    if refusals:
        return Score(0.0, refusal=refusals[0])
    missing = [
        f"reward {name}: {s.unavailable}" for name, s in scores.items() if s.unavailable is not None
    ]
    if missing:
        return Score.unhad("; ".join(missing))
    components: dict[str, float] = {}
    for name, score in scores.items():
        if len(scores) > 1:
            components[name] = score.value
        prefix = f"{name}/" if len(scores) > 1 else ""
        components |= {f"{prefix}{part}": value for part, value in score.components.items()}
    reasons = {name: s.reason for name, s in scores.items() if s.reason}
    return Score(
        sum(weights[name] * score.value for name, score in scores.items()),
        timed_out=any(s.timed_out for s in scores.values()),
        crashed=any(s.crashed for s in scores.values()),
        components=components,
        reason="; ".join(
            f"{name}: {reason}" if len(scores) > 1 else reason for name, reason in reasons.items()
        ),
    )
