"""A generation whose responses are scored as they come; of training and of evaluation."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future

from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.fleet.generation_run import OnResponse
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.rollouts.sources import with_rewards
from megatron_dppo.rewards import Score
from megatron_dppo.rewards.arrivals import ArrivalScorer


class ScoredGeneration:
    """This rank's part of a generation; it begins on construction and runs in the background.

    Args:
        engine: servers that generate.
        scorer: checks each response as soon as it is there.
        job: what is asked for: this rank's own problems.
        description: of the progress bar.
    """

    def __init__(
        self, engine: EngineSession, scorer: ArrivalScorer, job: GenerationJob, description: str
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._job = job
        self._scores: dict[Hashable, Future[Score]] = {}
        self._responses: list[Trajectory] = []
        self._generation = engine.start(job, description, _scoring(scorer, job, self._scores))

    @property
    def seconds(self) -> float:
        """From the start to the last response."""
        return self._generation.seconds

    def wait(self, held: int | None = None) -> None:
        """Return when all responses are there; as ``EngineSession.finish``. Collective."""
        self._responses = self._engine.finish(self._generation, held)

    def scored(self, algorithm: AlgorithmConfig) -> list[Trajectory]:
        """After ``wait``: the responses with rewards and advantages, groups in the order of the job's problems.

        Waits for the scores that are still missing. Raises VerifierError where the reward gave one none.
        """
        problems, size = self._job.problems, self._job.group_size
        scores = [self._scores[i, s].result() for i in range(len(problems)) for s in range(size)]
        pairs = [(t.text, problems[i // size].answer) for i, t in enumerate(self._responses)]
        self._scorer.require(scores, pairs)
        return with_rewards(self._responses, scores, size, algorithm)


def _scoring(
    scorer: ArrivalScorer, job: GenerationJob, scores: dict[Hashable, Future[Score]]
) -> OnResponse:
    """What fills ``scores``; no method, by which a generation would hold itself and its responses in memory."""

    def arrived(key: Hashable, response: Trajectory) -> None:
        problem = job.problems[key[0]]  # type: ignore[index]
        scores[key] = scorer.add((response.text, problem.answer))

    return arrived
