"""Scoring: what a response earns, the advantages within its group, and which groups train.

A generation of training or evaluation has its responses scored as they come.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_dppo.algorithms.inputs import group_relative
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.fleet.generation import GenerationJob, OnResponse
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.rewards.verifier import Score, Verifier


def with_rewards(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    group_size: int,
    algorithm: AlgorithmConfig,
) -> list[Trajectory]:
    """The same with the rewards that ``scores`` (one for each) come to, and advantages within groups of
    ``group_size`` neighbours.
    """
    if not trajectories:
        return []
    zeroed = algorithm.truncated_responses == "zero-reward"
    rewards = [
        0.0 if zeroed and t.truncated else score.value
        for t, score in zip(trajectories, scores, strict=True)
    ]
    advantages = group_relative(rewards, group_size).tolist()
    return [
        t.scored(reward, advantage)
        for t, reward, advantage in zip(trajectories, rewards, advantages, strict=True)
    ]


class ScoredGeneration:
    """This rank's part of a generation; it begins on construction and runs in the background.

    Args:
        engine: servers that generate.
        verifier: checks each response as soon as it is there.
        job: what is asked for: this rank's own problems.
        description: of the progress bar.
        order: of two generations under way, that with the lower one goes first.
    """

    def __init__(
        self,
        engine: EngineSession,
        verifier: Verifier,
        job: GenerationJob,
        description: str,
        order: int = 0,
    ) -> None:
        self._engine = engine
        self._verifier = verifier
        self._job = job
        self._scores: dict[Hashable, Future[Score]] = {}
        self._responses: list[Trajectory] = []
        arrived = _scoring(verifier, job, self._scores)
        self._generation = engine.start(job, description, arrived, order)

    @property
    def problems(self) -> Sequence[Problem]:
        """This rank's, in the job's order."""
        return self._job.problems

    @property
    def seconds(self) -> float:
        """From the start to the last response."""
        return self._generation.seconds

    @property
    def redrawn(self) -> int:
        """Tokens that were sampled and not kept, as weight updates ended their responses early."""
        return self._generation.redrawn

    def wait(self, version: int | None = None, *, mixes: bool = True) -> None:
        """Return when all responses are there. Collective. ``version``, ``mixes``: as in ``EngineSession.finish``."""
        self._responses = self._engine.finish(self._generation, version, mixes=mixes)

    def drop(self) -> None:
        """End it; nobody waits for it any more."""
        self._engine.drop(self._generation)

    def scored(self, algorithm: AlgorithmConfig) -> list[Trajectory]:
        """After ``wait``: the responses with rewards and advantages, groups in the order of the job's problems.

        Waits for the scores that are still missing. Raises VerifierError where the reward gave one none.
        """
        problems, size = self._job.problems, self._job.group_size
        scores = [self._scores[i, s].result() for i in range(len(problems)) for s in range(size)]
        pairs = [(t.text, problems[i // size].answer) for i, t in enumerate(self._responses)]
        self._verifier.require(scores, pairs)
        return with_rewards(self._responses, scores, size, algorithm)


def _scoring(
    verifier: Verifier, job: GenerationJob, scores: dict[Hashable, Future[Score]]
) -> OnResponse:
    """What fills ``scores``."""

    # No method, by which a generation would hold itself and its responses in memory.
    def arrived(key: Hashable, response: Trajectory) -> None:
        problem = job.problems[key[0]]  # type: ignore[index]
        scores[key] = verifier.submit((response.text, problem.answer))

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
