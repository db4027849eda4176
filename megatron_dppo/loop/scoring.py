"""Scoring: what a response earns, the advantages within its group, and which groups train.

A generation of training or evaluation has its responses scored as they come.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Self

from megatron_dppo.algorithms.inputs import group_relative, turn_relative
from megatron_dppo.config.data_schema import Credit, RewardConfig
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.fleet.generation import GenerationJob, OnResponse
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.metrics import table as names
from megatron_dppo.rewards import USABLE_NUMBER, RewardInput, RewardUnavailableError, is_usable
from megatron_dppo.rewards.verifier import Score, Verifier, require
from megatron_dppo.trainer.collectives import all_gather_json

log = logging.getLogger(__name__)


def with_rewards(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    group_size: int,
    algorithm: AlgorithmConfig,
    credit: Credit = "trajectory",
    *,
    most_tokens: int,
) -> list[Trajectory]:
    """The same with the rewards that ``scores`` (one for each) come to, and advantages within groups of
    ``group_size`` neighbours: of whole responses and, by ``credit``, of each turn. ``most_tokens``:
    ``rollout.max_response_tokens``, by which penalties on length are measured.
    """
    if not trajectories:
        return []
    zeroed = algorithm.truncated_responses == "zero-reward"
    values = [
        math.fsum([*t.turn_rewards, score.value])
        for t, score in zip(trajectories, scores, strict=True)
    ]
    rewards = [
        # Where rewards may be negative, 0 would be a prize.
        (min(0.0, value) if zeroed and t.truncated else value)
        - length_penalties(t.sampled, most_tokens, algorithm)
        for t, value in zip(trajectories, values, strict=True)
    ]
    advantages = group_relative(rewards, group_size, algorithm.advantage).tolist()
    scored = [
        t.scored(reward, advantage, components=score.components, reason=score.reason)
        for t, reward, advantage, score in zip(
            trajectories, rewards, advantages, scores, strict=True
        )
    ]
    if credit == "trajectory":
        return scored
    returns = [
        returns_by_turn(t, score.value, t.reward - value)
        for t, score, value in zip(scored, scores, values, strict=True)
    ]
    by_turn = turn_relative(returns, group_size, algorithm.advantage)
    return [t.credited(g, a) for t, g, a in zip(scored, returns, by_turn, strict=True)]


def length_penalties(tokens: int, most_tokens: int, algorithm: AlgorithmConfig) -> float:
    """What a response of ``tokens`` loses of its reward by its length: the soft overlong penalty (DAPO, arXiv
    2503.14476, Eq. 13: 0 up to ``overlong_tokens`` before the limit, then linear, 1 from the limit on), and its share
    of ``length_penalty``."""
    overlong = 0.0
    if algorithm.overlong_tokens:
        begins = most_tokens - algorithm.overlong_tokens
        overlong = min(max(tokens - begins, 0) / algorithm.overlong_tokens, 1.0)
    return overlong + algorithm.length_penalty * tokens / most_tokens


def returns_by_turn(t: Trajectory, score: float, lost: float) -> list[float]:
    """What ``t`` earned from each turn on, as they lie; of the first one its reward. The one sampled last has the
    ``score`` of the run's rewards, and what a truncated response ``lost``: at most 0."""
    rewards = t.turn_rewards
    times = t.turn_times or range(len(rewards))
    # Sums that are rounded once: equal ones must make no advantage.
    return [
        t.reward,
        *(
            math.fsum(
                [*(r for r, then in zip(rewards, times, strict=True) if then >= now), score, lost]
            )
            for now in times[1:]
        ),
    ]


class ComponentSums:
    """Sums of the rewards' components over responses, and how many have each."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, sums: Mapping[str, Sequence[float]]) -> None:
        """``sums``: name -> sum, number of responses."""
        for name, (value, responses) in sums.items():
            self._sums[name][0] += value
            self._sums[name][1] += responses

    def to_json(self) -> dict[str, list[float]]:
        return dict(self._sums)

    def means(self, evaluation_set: str | None = None) -> dict[str, float]:
        """Metric -> mean over the responses that have the component."""
        return {
            names.component(name, evaluation_set): value / responses
            for name, (value, responses) in self._sums.items()
        }


class ScoredGeneration:
    """This rank's part of a generation; it begins on construction and runs in the background.

    A response whose reward could not be had is replaced by another one to its problem: never by a reward of 0, which
    would teach the policy what a service's failure has to do with.

    Args:
        engine: servers that generate.
        scorer: scores each response as soon as it is there.
        job: what is asked for: this rank's own problems.
        description: of the progress bar.
        order: of two generations under way, that with the lower one goes first.
    """

    def __init__(
        self,
        engine: EngineSession,
        scorer: Scorer,
        job: GenerationJob,
        description: str,
        order: int = 0,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._job = job
        self._description = description
        self._order = order
        self._scores: dict[Hashable, PendingScore] = {}
        self._responses: list[Trajectory] = []
        arrived = _scoring(scorer, job, self._scores)
        self._generation = engine.start(job, description, arrived, order)
        self._earlier_seconds = 0.0
        self._earlier_redrawn = 0
        self.components = ComponentSums()

    @property
    def problems(self) -> Sequence[Problem]:
        """This rank's, in the job's order."""
        return self._job.problems

    @property
    def seconds(self) -> float:
        """From the start to the last response; and those of replacements."""
        return self._earlier_seconds + self._generation.seconds

    @property
    def redrawn(self) -> int:
        """Tokens that were sampled and not kept, as weight updates ended their responses early."""
        return self._earlier_redrawn + self._generation.redrawn

    def wait(self, version: int | None = None, *, mixes: bool = True) -> None:
        """Return when all responses are there. Collective. ``version``, ``mixes``: as in ``EngineSession.finish``."""
        self._responses = self._engine.finish(self._generation, version, mixes=mixes)

    def drop(self) -> None:
        """End it; nobody waits for it any more."""
        self._engine.drop(self._generation)

    def scored(
        self,
        algorithm: AlgorithmConfig,
        credit: Credit = "trajectory",
        *,
        version: int | None = None,
        mixes: bool = True,
    ) -> list[Trajectory]:
        """After ``wait``: the responses with rewards and advantages, groups in the order of the job's problems.

        Waits for the scores that are still missing, and replaces responses without a reward, which are waited for as by
        ``wait``. Collective.

        Raises VerifierError where a reward refused one; RewardUnavailableError, on every rank, where responses have no
        reward after ``reward.max_replacements`` rounds.
        """
        problems, size = self._job.problems, self._job.group_size
        keys = [(i, s) for i in range(len(problems)) for s in range(size)]
        for replacements in count():
            scores = {key: self._scores[key].result() for key in keys}
            lacking = {k: s.unavailable for k, s in scores.items() if s.unavailable is not None}
            by_rank = all_gather_json([len(lacking), next(iter(lacking.values()), "")])
            missing = sum(number for number, _ in by_rank)
            if not missing:
                break
            reason = next(reason for number, reason in by_rank if number)
            message = f"{missing} responses have no reward; the first: {reason}"
            if replacements == self._scorer.max_replacements:
                raise RewardUnavailableError(
                    f"{message} (after {replacements} replacements of them)"
                )
            log.warning("%s: %s; others take their place", self._description, message)
            self._scorer.failures[names.REWARD_REPLACED] += missing
            self._replace(lacking.keys(), replacements + 1)
            self.wait(version, mixes=mixes)
        inputs = [problems[i // size].reward_input(t.text) for i, t in enumerate(self._responses)]
        require(list(scores.values()), inputs)
        self._count(list(scores.values()))
        most_tokens = self._job.sampling.max_new_tokens
        return with_rewards(
            self._responses,
            list(scores.values()),
            size,
            algorithm,
            credit,
            most_tokens=most_tokens,
        )

    def _replace(self, lacking: Collection[Hashable], number: int) -> None:
        """Have the responses with these keys drawn anew, and scored."""
        job, size = self._job, self._job.group_size
        if job.seeds is not None:
            purpose = f"{job.seeds.purpose}, replacement {number}"
            job = replace(job, seeds=replace(job.seeds, purpose=purpose))
        responses = {divmod(i, size): t for i, t in enumerate(self._responses)}
        scored: dict[Hashable, Trajectory] = {
            key: t for key, t in responses.items() if key not in lacking
        }
        arrived = _scoring(self._scorer, job, self._scores)
        self._earlier_seconds, self._earlier_redrawn = self.seconds, self.redrawn
        description = f"{self._description}, replacement {number}"
        self._generation = self._engine.start(job, description, arrived, self._order, done=scored)

    def _count(self, scores: Sequence[Score]) -> None:
        """Add up, over all ranks, components and failures. Collective."""
        component_sums = ComponentSums()
        for score in scores:
            component_sums.add({name: (value, 1) for name, value in score.components.items()})
        failed = [sum(s.timed_out for s in scores), sum(s.crashed for s in scores)]
        for timeouts, crashes, sums in all_gather_json([*failed, component_sums.to_json()]):
            self._scorer.failures[names.REWARD_TIMEOUTS] += timeouts
            self._scorer.failures[names.REWARD_CRASHES] += crashes
            self.components.add(sums)


def _scoring(
    scorer: Scorer, job: GenerationJob, scores: dict[Hashable, PendingScore]
) -> OnResponse:
    """What fills ``scores``."""

    # No method, by which a generation would hold itself and its responses in memory.
    def arrived(key: Hashable, response: Trajectory) -> None:
        problem = job.problems[key[0]]  # type: ignore[index]
        if response.finish_reason == "failed":
            scores[key] = PendingScore.known(Score.unhad(response.reason))
            return
        if not response.wants_score:
            scores[key] = PendingScore.known(Score(0.0))
            return
        scores[key] = scorer.submit(problem.reward_input(response.text))

    return arrived


# --- which groups make a rollout batch when zero-variance groups are dropped and replaced (dynamic sampling)
#
# A group whose responses all earn the same has no advantage: it costs a place in the batch and teaches nothing.
# Candidates are judged in the order in which the sampler handed out their problems, never in the order in which they
# were finished, so neither chance nor the length of responses decides which of them are kept.


@dataclass(frozen=True)
class Selection:
    """The candidates that make the batch, by ``positions`` in order, and what became of the others.

    ``filled``: zero-variance groups that were kept because the rounds were used up. ``dropped``: groups without
    spread. ``surplus``: groups with spread that no place was left for.
    """

    positions: tuple[int, ...]
    filled: int = 0
    dropped: int = 0
    surplus: int = 0


@dataclass(frozen=True)
class GroupQuota:
    """``wanted`` groups. Without ``filtering`` one round asks for them and all are kept.

    With it, a round asks for ``oversampling`` times the groups that still lack, ``max_rounds`` times at most.
    """

    wanted: int
    filtering: bool = False
    oversampling: float = 1.0
    max_rounds: int = 1

    @classmethod
    def of(cls, rollout: RolloutConfig) -> GroupQuota:
        """As the run's configuration says."""
        return cls(
            rollout.prompts_per_step,
            rollout.drop_zero_variance_groups,
            rollout.oversampling,
            rollout.max_generation_rounds,
        )

    def ask(self, flat: Sequence[bool], rounds: int) -> int:
        """Groups to generate next, 0 when there is nothing more to do.

        ``flat``: whether each group of the ``rounds`` so far is without spread.
        """
        if not self.filtering:
            return 0 if rounds else self.wanted
        missing = self.wanted - (len(flat) - sum(flat))
        if missing <= 0 or rounds >= self.max_rounds:
            return 0
        # Rounded first, so that 10 x 1.1 is 11, not 12.
        return math.ceil(round(missing * self.oversampling, 6))

    def choose(self, flat: Sequence[bool]) -> Selection:
        """The batch, once ``ask`` wants no more. ``flat`` as there, at least ``wanted`` groups."""
        if not self.filtering:
            return Selection(tuple(range(len(flat))))
        useful = [i for i, is_flat in enumerate(flat) if not is_flat]
        useless = [i for i, is_flat in enumerate(flat) if is_flat]
        chosen = useful[: self.wanted]
        filling = useless[: self.wanted - len(chosen)]
        return Selection(
            positions=tuple(sorted(chosen + filling)),
            filled=len(filling),
            dropped=len(useless) - len(filling),
            surplus=len(useful) - len(chosen),
        )


# --- the weighted sum of all rewards that a run is configured with


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

    A refusal or an unavailable reward of one is that of the whole, with its name. A sum that is no usable number is a
    refusal.
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
