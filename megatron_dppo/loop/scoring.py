"""Generations whose responses are scored as they arrive, for training and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from megatron_dppo.config.data_schema import Credit
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.fleet.generation import Generation, GenerationJob, OnResponse
from megatron_dppo.loop.credit import with_rewards
from megatron_dppo.loop.scorer import PendingScore, Scorer
from megatron_dppo.loop.spool import StepPart
from megatron_dppo.loop.teachers import Teachers
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.rewards import RewardInput, RewardUnavailableError
from megatron_dppo.rewards.verifier import Score, require
from megatron_dppo.trainer.collectives import all_gather_json

log = logging.getLogger(__name__)


class ComponentSums:
    """Sums of reward components over responses, with the number of responses that have each component."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Add sums, given as name -> (sum, number of responses)."""
        for name, (value, responses) in sums.items():
            total = self._sums.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += responses

    def to_json(self) -> dict[str, list[float]]:
        return dict(self._sums)

    def means(self, evaluation_set: str | None = None) -> dict[str, float]:
        """Return the mean of each component over the responses that have it, by metric name."""
        means: dict[str, float] = {}
        for name, (value, responses) in self._sums.items():
            means[metric_names.component(name, evaluation_set)] = value / responses
        return means


class Engine(Protocol):
    """Servers that generate: those of an ``EngineSession``, or those of a program without a trainer."""

    def start(
        self,
        job: GenerationJob,
        description: str,
        on_response: OnResponse | None = None,
        order: int = 0,
        done: Mapping[Hashable, Trajectory] | None = None,
    ) -> Generation:
        """As ``EngineSession.start``."""

    def finish(
        self, generation: Generation, trainer_version: int | None = None, *, mixes: bool = True
    ) -> list[Trajectory]:
        """As ``EngineSession.finish``."""

    def drop(self, generation: Generation) -> None:
        """As ``EngineSession.drop``."""


class ScoredGeneration:
    """This rank's part of a generation. It begins on construction and runs in the background.

    A response whose reward is unavailable is replaced by another response to its problem. A reward of 0 instead would
    punish the policy for a failure of the reward's service.

    Args:
        engine: servers that generate.
        scorer: scores each response as soon as it arrives.
        job: this rank's own problems and how to sample.
        description: text of the progress bar.
        order: an open generation with a lower order is served before a generation with a higher order.
        part: stores each scored response in the spool, and returns the stored responses; None without a spool.
        teachers: score each response, too; None without teachers, and in evaluations.
        gather: gathers a value of every rank. A program of one process, without process groups, has another function.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        job: GenerationJob,
        description: str,
        order: int = 0,
        part: StepPart | None = None,
        gather: Callable[[Any], list[Any]] = all_gather_json,
        teachers: Teachers | None = None,
    ) -> None:
        self._gather = gather
        self._teachers = teachers
        self._engine = engine
        self._scorer = scorer
        self._job = job
        self._description = description
        self._order = order
        self._scores: dict[Hashable, PendingScore] = {}
        self._responses: list[Trajectory] = []
        self._part = part
        stored_responses: dict[Hashable, Trajectory] = {}
        if part is not None:
            for key, (response, score) in part.found(job.problems).items():
                stored_responses[key] = response
                self._scores[key] = PendingScore.known(score)
        on_response = score_on_arrival(scorer, job, self._scores, part, teachers)
        self._generation = engine.start(job, description, on_response, order, stored_responses)
        # Sums over the generations before the latest round of replacements.
        self._earlier_seconds = 0.0
        self._earlier_redrawn = 0
        self._earlier_timed_out = 0
        self.components = ComponentSums()

    @property
    def problems(self) -> Sequence[Problem]:
        """This rank's problems, in the job's order."""
        return self._job.problems

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last response, including the time for replacements."""
        return self._earlier_seconds + self._generation.seconds

    @property
    def redrawn(self) -> int:
        """Tokens that were sampled and discarded, because weight updates ended their responses early."""
        return self._earlier_redrawn + self._generation.redrawn

    @property
    def timed_out(self) -> int:
        """Responses, or turns, that took longer than ``rollout.request_timeout_s`` and were sampled again."""
        return self._earlier_timed_out + self._generation.timed_out

    def wait(self, version: int | None = None, *, mixes: bool = True) -> None:
        """Wait for all responses. Collective. ``version`` and ``mixes`` as in ``EngineSession.finish``."""
        self._responses = self._engine.finish(self._generation, version, mixes=mixes)

    def drop(self) -> None:
        """Cancel a generation whose responses are not needed."""
        self._engine.drop(self._generation)

    def scored(
        self,
        algorithm: AlgorithmConfig,
        credit: Credit = "trajectory",
        *,
        version: int | None = None,
        mixes: bool = True,
    ) -> list[Trajectory]:
        """Return the responses with rewards and advantages, groups in the order of the job's problems. Collective.

        Call ``wait`` first. The method waits for pending scores, and replaces responses without a reward.

        Args:
            algorithm: settings of advantages and length penalties.
            credit: whether each turn has its own advantage.
            version: as in ``EngineSession.finish``, for replacements.
            mixes: as in ``EngineSession.finish``, for replacements.

        Raises:
            VerifierError: a reward refused a response.
            RewardUnavailableError: on every rank, if responses have no reward after ``reward.max_replacements``
                rounds.
        """
        keys = self._job.keys()
        for rounds in count():
            scores = {key: self._scores[key].result() for key in keys}
            replaced_keys: list[Hashable] = []
            own_reasons: list[str] = []
            for key, score in scores.items():
                if score.unavailable is not None:
                    replaced_keys.append(key)
                    own_reasons.append(score.unavailable)
            missing_count = 0
            reasons: list[str] = []
            # Each rank sends its number of scores without a value, and the first reason.
            for number, rank_reasons in self._gather([len(replaced_keys), own_reasons[:1]]):
                missing_count += number
                reasons += rank_reasons
            if not missing_count:
                break
            message = f"{missing_count} responses have no reward; the first: {reasons[0]}"
            if rounds == self._scorer.max_replacements:
                raise RewardUnavailableError(
                    f"{self._description}: {message} (after {rounds} replacements of them)"
                )
            log.warning("%s: %s; others take their place", self._description, message)
            self._scorer.failures[metric_names.REWARD_REPLACED] += missing_count
            self._replace(replaced_keys, rounds + 1)
            self.wait(version, mixes=mixes)
        final_scores = list(scores.values())
        responses = [
            self._scores[key].completed(response)
            for key, response in zip(keys, self._responses, strict=True)
        ]
        rewarded_responses = reward_responses(self._job, responses, final_scores, algorithm, credit)
        self._count(final_scores)
        return rewarded_responses

    def _replace(self, replaced_keys: Collection[Hashable], number: int) -> None:
        """Generate the responses with these keys again, and score them. ``number``: this round's number, from 1."""
        job = self._job
        if job.seeds is not None:
            # Equal seeds would sample the same responses again.
            purpose = f"{job.seeds.purpose}, replacement {number}"
            job = replace(job, seeds=replace(job.seeds, purpose=purpose))
        scored_responses: dict[Hashable, Trajectory] = {}
        for key, response in zip(job.keys(), self._responses, strict=True):
            if key not in replaced_keys:
                scored_responses[key] = response
        on_response = score_on_arrival(self._scorer, job, self._scores, self._part, self._teachers)
        self._earlier_seconds = self.seconds
        self._earlier_redrawn = self.redrawn
        self._earlier_timed_out = self.timed_out
        description = f"{self._description}, replacement {number}"
        self._generation = self._engine.start(
            job, description, on_response, self._order, scored_responses
        )

    def _count(self, scores: Sequence[Score]) -> None:
        """Add up components and failures over all ranks. Collective."""
        own_sums = ComponentSums()
        for score in scores:
            own_sums.add({name: (value, 1) for name, value in score.components.items()})
        own_timeouts = sum(s.timed_out for s in scores)
        own_crashes = sum(s.crashed for s in scores)
        counts_by_rank = self._gather([own_timeouts, own_crashes, own_sums.to_json()])
        for timeouts, crashes, sums in counts_by_rank:
            self._scorer.failures[metric_names.REWARD_TIMEOUTS] += timeouts
            self._scorer.failures[metric_names.REWARD_CRASHES] += crashes
            self.components.add(sums)


def reward_responses(
    job: GenerationJob,
    responses: Sequence[Trajectory],
    scores: Sequence[Score],
    algorithm: AlgorithmConfig,
    credit: Credit = "trajectory",
) -> list[Trajectory]:
    """Return the responses of a job with rewards and advantages. Each response must have a score.

    Raises VerifierError if a reward refused a response.
    """
    size = job.group_size
    inputs = [RewardInput.of(job.problems[i // size], t.text) for i, t in enumerate(responses)]
    require(scores, inputs)
    most_tokens = job.sampling.max_new_tokens
    return with_rewards(responses, scores, size, algorithm, credit, most_tokens=most_tokens)


def score_on_arrival(
    scorer: Scorer,
    job: GenerationJob,
    scores: dict[Hashable, PendingScore],
    part: StepPart | None = None,
    teachers: Teachers | None = None,
) -> OnResponse:
    """Return the callback that starts to score each response, and stores the pending score in ``scores``.

    ``part`` stores each response in the spool when its score is known. ``teachers`` score it, too.
    """

    # Use a closure, not a method of ScoredGeneration. A ScoredGeneration holds the engine's generation, which holds the
    # callback. If the callback also held the ScoredGeneration, this cycle would keep all responses in memory.
    def on_response(key: Hashable, response: Trajectory) -> None:
        problem = job.problems[key[0]]  # type: ignore[index]
        if response.finish_reason == "failed":
            scores[key] = PendingScore.known(Score.without_value(response.reason))
            return
        if response.wants_score:
            text = scorer.text_of(response, job.sampling.stop)
            scores[key] = scorer.submit(problem, text)
        else:
            scores[key] = PendingScore.known(Score(0.0))
        if teachers is not None:
            scores[key] = replace(scores[key], teacher=teachers.submit(problem, response))
        if part is not None:
            scores[key].when_done(partial(_keep, part, key, response, scores[key]))

    return on_response


def _keep(
    part: StepPart, key: Hashable, response: Trajectory, pending: PendingScore, score: Score
) -> None:
    """Store a response with its teacher's columns, if it has a score to train on."""
    if score.unavailable is None:
        part.keep(key, pending.completed(response), score)  # type: ignore[arg-type]
