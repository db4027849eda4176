"""What a generation is: the responses that are asked for, its limits, its progress, who answers it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from megatron_dppo.config.schema import EngineConfig, RolloutConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.requests import GenerationRequest, SamplingParams
from megatron_dppo.fleet.sampling_seeds import SamplingSeeds
from megatron_dppo.types import Problem

Results = dict[Hashable, Trajectory]
"""By the key of the request, in the order of the requests."""


class GenerationClient(Protocol):
    """Draws responses: ``EngineClient`` on one server, ``FleetClient`` on several."""

    async def generate(self, requests: Sequence[GenerationRequest], rid: str) -> list[Trajectory]:
        """Draw ``requests`` in one call under a new id; one trajectory for each, in order.

        Raises AbortedError where this call failed and another may succeed; ServerLostError where
        another server will take the next call; EngineLostError where no server is left.
        """

    async def abort(self, rid: str, count: int) -> None:
        """End a call of ``count`` requests, whose answer nobody waits for. Raises EngineLostError."""

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        """Raises EngineLostError when no server is left that generates anything within that time."""


@dataclass(frozen=True)
class GenerationLimits:
    """Bounds of ``generate_many``; times in seconds.

    ``concurrency``: responses in flight. ``request_timeout_s``: one attempt at one response.
    ``hang_timeout_s``: a server that generates nothing for so long, not even for a health check,
    counts as lost. ``responses_per_call``: responses that share one HTTP call, which saves the
    server work on very short ones, but they finish, time out and are lost together.
    """

    concurrency: int
    request_timeout_s: float = 600.0
    max_attempts: int = 3
    hang_timeout_s: float = 60.0
    responses_per_call: int = 1

    @classmethod
    def of(cls, rollout: RolloutConfig, engine: EngineConfig) -> GenerationLimits:
        """The limits that a run's configuration sets."""
        return cls(
            concurrency=rollout.max_concurrent_requests,
            request_timeout_s=rollout.response_timeout_s,
            hang_timeout_s=engine.hang_timeout_s,
            responses_per_call=rollout.responses_per_call,
        )


@dataclass(frozen=True)
class GenerationProgress:
    """Responses ``done`` of ``total``, and the response tokens in them after ``seconds``."""

    done: int
    total: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of finished responses, a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class GenerationJob:
    """``group_size`` responses to each problem.

    The key of a request is (position in ``problems``, sample index). ``columns``: what is asked for
    beside what every request is, as in GenerationRequest. ``seeds``: those of the responses, in the
    order of ``problems``; None: the server draws as it likes.
    """

    problems: Sequence[Problem]
    group_size: int
    sampling: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    seeds: SamplingSeeds | None = None

    def requests(
        self, completed: Mapping[Hashable, Trajectory] | None = None
    ) -> list[GenerationRequest]:
        """What is still to be asked, in order: everything whose key is not in ``completed``."""
        done = completed or {}
        return [
            GenerationRequest(
                key=(position, sample),
                prompt_ids=problem.prompt_ids,
                sampling=self._sampling(position, sample),
                columns=self.columns,
                problem_id=problem.problem_id,
                sample_index=sample,
            )
            for position, problem in enumerate(self.problems)
            for sample in range(self.group_size)
            if (position, sample) not in done
        ]

    def _sampling(self, position: int, sample: int) -> SamplingParams:
        if self.seeds is None:
            return self.sampling
        return replace(self.sampling, seed=self.seeds.of(position, sample))

    def trajectories(self, completed: Mapping[Hashable, Trajectory]) -> list[Trajectory]:
        """All of them, group by group. Raises KeyError where a response is missing."""
        return [
            completed[position, sample]
            for position in range(len(self.problems))
            for sample in range(self.group_size)
        ]
