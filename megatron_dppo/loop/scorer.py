"""The weighted sum of all rewards that a run is configured with, computed in reward worker processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.data.thoughts import TurnText
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.turn_text import ResponseReader
from megatron_dppo.rewards import RewardInput, form_read_by
from megatron_dppo.rewards.result import USABLE_NUMBER, is_usable
from megatron_dppo.rewards.verifier import Score, Verifier, VerifierError

if TYPE_CHECKING:
    from megatron_dppo.config.schema import TrainConfig
    from megatron_dppo.loop.inputs import RunData

_TEACHER = "a teacher"
"""Name of a teacher's scores among the rewards, which have names of the configuration."""

PlaceOf = Callable[[Sequence[int]], str | None]
"""Tokens of a prompt -> file and line of the prompt's problem; None if no problem has this prompt."""


@dataclass(frozen=True)
class PendingScore:
    """A response's pending scores.

    Attributes:
        scores: the score of each reward, by the reward's name.
        weights: the weight of each reward of the run, by its name.
        problem: the problem that the response answers; None if no reward is computed.
        place_of: finds the problem in the data, for errors.
        teacher: the columns of the problem's teacher, or EngineError if it has no scores; None without a teacher, or if
            the response has them.
    """

    scores: Mapping[str, Future[Score]]
    weights: Mapping[str, float]
    problem: Problem | None = None
    place_of: PlaceOf | None = None
    teacher: Future[dict[str, np.ndarray]] | None = None

    @classmethod
    def known(cls, score: Score) -> Self:
        """Return a score that is known already, so that no reward is computed."""
        future: Future[Score] = Future()
        future.set_result(score)
        # Errors show the name "environment". Among known scores, only the scores of failed episodes cause errors.
        return cls({"environment": future}, {"environment": 1.0})

    def when_done(self, callback: Callable[[Score], None]) -> None:
        """Call ``callback`` with the weighted sum once all scores are known.

        The call may come from any thread. After an error of a score there is no call.
        """
        futures: dict[str, Future[Any]] = dict(self.scores)
        if self.teacher is not None:
            futures[_TEACHER] = self.teacher
        remaining_names = set(futures)
        lock = threading.Lock()

        def on_score(name: str, _: Future[Any]) -> None:
            with lock:
                remaining_names.discard(name)
                is_last = not remaining_names
            if is_last and not any(map(_has_failed, futures.values())):
                callback(self.result())

        for name, future in futures.items():
            future.add_done_callback(partial(on_score, name))

    def result(self) -> Score:
        """Wait for all scores and return their weighted sum. A refusal begins with the problem's file and line.

        Raises VerifierError if a reward raised or a worker can't start. The error's text also begins with the problem's
        file and line.
        """
        scores: dict[str, Score] = {}
        for name, future in self.scores.items():
            try:
                scores[name] = future.result()
            except VerifierError as error:
                raise VerifierError(f"{self._place()}reward {name}: {error}") from error
        score = weighted_sum(scores, self.weights)
        if self.teacher is not None:
            try:
                self.teacher.result()
            except EngineError as error:
                if score.refusal is None:
                    return Score.without_value(str(error))
        if score.refusal is not None:
            return replace(score, refusal=self._place() + score.refusal)
        return score

    def completed(self, response: Trajectory) -> Trajectory:
        """Return the response with its teacher's columns, once ``result`` has a value."""
        if self.teacher is None:
            return response
        return response.extended(**self.teacher.result())

    def _place(self) -> str:
        """Return file and line of the problem, or else its id, with a colon; empty without a problem."""
        if self.problem is None:
            return ""
        place = None
        if self.place_of is not None:
            place = self.place_of(self.problem.prompt_ids)
        if place is None:
            place = f"problem {self.problem.problem_id}"
        return f"{place}: "


def _has_failed(score: Future[Any]) -> bool:
    return score.cancelled() or score.exception() is not None


class Scorer:
    """The verifiers of all rewards of ``config``; their worker processes run inside the context.

    ``failures``: counts of failed rewards over all ranks, by the name of the metric; each ``ScoredGeneration`` adds its
    counts. ``place_of``: finds problems in the data, for errors. ``reader``: reads the text of responses; None: a
    response has only the text that the engine decoded.
    """

    def __init__(
        self,
        config: RewardConfig,
        place_of: PlaceOf | None = None,
        reader: ResponseReader | None = None,
    ) -> None:
        self._place_of = place_of
        self._reader = reader
        self._forms = {name: form_read_by(term) for name, term in config.terms.items()}
        self.max_replacements = config.max_replacements
        self.failures: Counter[str] = Counter()
        self._config = config
        self._verifiers: dict[str, Verifier] = {}
        self._weights: dict[str, float] = {}
        for name, term in config.terms.items():
            self._verifiers[name] = Verifier(term)
            self._weights[name] = term.weight
        self._stack = ExitStack()

    @classmethod
    def of(cls, config: TrainConfig, data: RunData) -> Self:
        """Return the scorer of a run, an evaluation or a rollout: it reads responses and finds problems by ``data``."""
        return cls(config.reward, data.place_of, data.reader)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for verifier in self._verifiers.values():
                stack.enter_context(verifier)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def text_of(self, response: Trajectory, stop: Sequence[str] = ()) -> TurnText:
        """Return the text of a response that the rewards score. ``stop``: the texts that end a response."""
        if self._reader is None:
            return response.scored_text or TurnText.plain(response.text)
        return self._reader.text_of(response, stop)

    def submit(self, problem: Problem, text: TurnText) -> PendingScore:
        """Start scoring the text of a response to ``problem`` by the problem's rewards; returns at once."""
        futures: dict[str, Future[Score]] = {}
        for name in self._config.names_for(problem.metadata):
            reward_input = RewardInput.of_text(problem, text, self._forms[name])
            futures[name] = self._verifiers[name].submit(reward_input)
        return PendingScore(futures, self._weights, problem, self._place_of)


def weighted_sum(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Return sum_i w_i r_i over the rewards of one response, with its components. ``weights``: of all rewards of a run.

    In a run with one reward, the result has the reward's components. With several, it has each reward's value as a
    component, and each reward's components under the names ``name/component``. A refusal or an unavailable reward
    makes the sum refused or unavailable, with the name of the reward. A sum that is not a usable number is a refusal.
    """
    unavailable_rewards: list[str] = []
    for name, score in scores.items():
        if score.refusal is not None:
            return Score(0.0, refusal=f"reward {name}: {score.refusal}")
        if score.unavailable is not None:
            unavailable_rewards.append(f"reward {name}: {score.unavailable}")
    if unavailable_rewards:
        return Score.without_value("; ".join(unavailable_rewards))
    total = sum(weights[name] * score.value for name, score in scores.items())
    if not is_usable(total):
        products = [f"{name} {s.value:g} * {weights[name]:g}" for name, s in scores.items()]
        refusal = (
            f"the weighted sum of {', '.join(products)} is {total:g}, expected {USABLE_NUMBER}"
        )
        return Score(0.0, refusal=refusal)
    components: dict[str, float] = {}
    reasons: list[str] = []
    for name, score in scores.items():
        if len(weights) == 1:
            components.update(score.components)
            reasons.append(score.reason)
            continue
        components[name] = score.value
        for part, value in score.components.items():
            components[f"{name}/{part}"] = value
        if score.reason:
            reasons.append(f"{name}: {score.reason}")
    return Score(
        total,
        timed_out=any(s.timed_out for s in scores.values()),
        crashed=any(s.crashed for s in scores.values()),
        components=components,
        reason="; ".join(reasons),
    )
