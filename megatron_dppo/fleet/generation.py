"""Many responses from a server or a fleet, within bounds, and what is finished kept when it dies.

A response is counted once: each key holds the result of one attempt, every attempt has a request id
of its own, and an attempt that was given up is aborted and its answer never read.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from megatron_dppo.config.schema import EngineConfig, RolloutConfig
from megatron_dppo.engine.errors import (
    AbortedError,
    EngineLostError,
    GenerationInterruptedError,
    ServerLostError,
    StopRequestedError,
)
from megatron_dppo.engine.requests import (
    GenerationRequest,
    GenerationResult,
    RoutedShape,
    SamplingParams,
)
from megatron_dppo.types import Problem, Rollout

Results = dict[Hashable, GenerationResult]
"""By the key of the request, in the order of the requests."""

_TICK_SECONDS = 0.2
_CLEAN_UP_SECONDS = 5.0
_BACK_OFF_SECONDS = 0.5
_MAX_LOSSES = 20


class GenerationClient(Protocol):
    """Who draws the responses: ``EngineClient``, or ``FleetClient`` over several of them."""

    async def generate(
        self, requests: Sequence[GenerationRequest], rid: str
    ) -> list[GenerationResult]:
        """Draw ``requests`` in one call under a new id.

        Raises AbortedError where this call failed and another may not; ServerLostError where the
        next one will be served by somebody else; EngineLostError where nobody is left.
        """

    async def abort(self, rid: str, count: int) -> None:
        """End a call of ``count`` requests, whose answer nobody waits for. Raises EngineLostError."""

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        """Raises EngineLostError when nobody is left who generates anything within that time."""


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
            request_timeout_s=rollout.request_timeout_s,
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

    The key of a request is (position in ``problems``, sample index).
    """

    problems: Sequence[Problem]
    group_size: int
    sampling: SamplingParams
    topk_log_probs: int = 0
    routed_experts: RoutedShape | None = None

    def requests(
        self, completed: Mapping[Hashable, GenerationResult] | None = None
    ) -> list[GenerationRequest]:
        """What is still to be asked, in order: everything whose key is not in ``completed``."""
        done = completed or {}
        return [
            GenerationRequest(
                key=(position, sample),
                prompt_ids=problem.prompt_ids,
                sampling=self.sampling,
                topk_log_probs=self.topk_log_probs,
                routed_experts=self.routed_experts,
            )
            for position, problem in enumerate(self.problems)
            for sample in range(self.group_size)
            if (position, sample) not in done
        ]

    def rollouts(self, completed: Mapping[Hashable, GenerationResult]) -> list[Rollout]:
        """All rollouts, group by group. Raises KeyError where a response is missing."""
        return [
            to_rollout(problem, sample, completed[position, sample])
            for position, problem in enumerate(self.problems)
            for sample in range(self.group_size)
        ]


def to_rollout(problem: Problem, sample_index: int, result: GenerationResult) -> Rollout:
    """The rollout of ``result``; its reward and advantage are still 0."""
    return Rollout(
        problem_id=problem.problem_id,
        sample_index=sample_index,
        prompt_ids=list(problem.prompt_ids),
        response_ids=result.output_ids,
        rollout_log_probs=result.log_probs,
        finish_reason=result.finish_reason,
        text=result.text,
        weight_versions=list(result.weight_versions),
        topk_ids=result.topk_ids,
        topk_log_probs=result.topk_log_probs,
        routed_experts=result.routed_experts,
    )


async def generate_many(
    client: GenerationClient,
    requests: Sequence[GenerationRequest],
    limits: GenerationLimits,
    *,
    on_progress: Callable[[GenerationProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Results:
    """Results by key, in the order of ``requests`` whatever the order of completion.

    Raises GenerationInterruptedError within seconds of the last server's death, with what was finished;
    StopRequestedError soon after ``stop()`` is true; EngineRequestError and EngineAnswerError as
    they come. In every case nothing of this call is left running on a server. ``on_progress`` and
    ``stop`` are called a few times a second.
    """
    keys = [request.key for request in requests]
    if len(set(keys)) != len(keys):
        raise ValueError("two generation requests have the same key")
    run = _Generation(client, requests, limits)
    try:
        await run.wait(on_progress, stop)
    except EngineLostError as error:
        raise GenerationInterruptedError(run.in_order(), str(error)) from error
    return run.in_order()


class _Generation:
    """State of one ``generate_many``."""

    def __init__(
        self,
        client: GenerationClient,
        requests: Sequence[GenerationRequest],
        limits: GenerationLimits,
    ) -> None:
        self._client = client
        self._requests = requests
        self._limits = limits
        self._prefix = uuid.uuid4().hex[:12]
        self._in_flight: dict[str, int] = {}
        self._results: Results = {}
        self._tokens = 0
        size = limits.responses_per_call
        self._pending = deque(
            range(start, min(start + size, len(requests)))
            for start in range(0, len(requests), size)
        )
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()

    def in_order(self) -> Results:
        return {r.key: self._results[r.key] for r in self._requests if r.key in self._results}

    async def wait(
        self,
        on_progress: Callable[[GenerationProgress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        workers = -(-self._limits.concurrency // self._limits.responses_per_call)
        tasks = [asyncio.create_task(self._work()) for _ in range(min(workers, len(self._pending)))]
        work = asyncio.gather(*tasks)
        watch = asyncio.create_task(self._client.watch(self._limits.hang_timeout_s))
        both: set[asyncio.Future] = {work, watch}
        try:
            while not work.done():
                await asyncio.wait(both, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if watch.done() and not work.done():
                    watch.result()
                if on_progress is not None:
                    on_progress(self._progress())
                if stop is not None and stop():
                    raise StopRequestedError(
                        f"stopped with {len(self._results)} of {len(self._requests)} responses"
                    )
            work.result()
        finally:
            await self._clean_up([*tasks, work, watch])

    async def _work(self) -> None:
        while self._pending:
            await self._draw(self._pending.popleft())

    async def _draw(self, indices: range) -> None:
        """Results of one call, with retries under new request ids."""
        requests, failures, losses, reason = [self._requests[i] for i in indices], 0, 0, ""
        while failures < self._limits.max_attempts and losses < _MAX_LOSSES:
            # Fixed width: SGLang aborts every request whose id begins with the given one.
            rid = f"{self._prefix}-{indices.start:08d}-{failures + losses:02d}"
            self._in_flight[rid] = len(indices)
            try:
                async with asyncio.timeout(self._limits.request_timeout_s):
                    results = await self._client.generate(requests, rid)
            except TimeoutError:
                reason = f"no response within {self._limits.request_timeout_s} s"
                failures += 1
                await self._client.abort(rid, len(indices))
            except AbortedError as error:
                reason = str(error)
                await asyncio.sleep(_BACK_OFF_SECONDS * 2**failures)
                failures += 1
            except ServerLostError as error:
                reason = str(error)
                losses += 1
            else:
                self._record(results)
                return
            finally:
                del self._in_flight[rid]
        raise EngineLostError(
            f"request {requests[0].key}: {failures + losses} attempts failed, the last: {reason}"
        )

    def _record(self, results: list[GenerationResult]) -> None:
        for result in results:
            self._results[result.key] = result
            self._tokens += len(result.output_ids)

    def _progress(self) -> GenerationProgress:
        seconds = self._clock() - self._started
        return GenerationProgress(len(self._results), len(self._requests), self._tokens, seconds)

    async def _clean_up(self, tasks: Sequence[asyncio.Future]) -> None:
        """Cancel what runs here and abort it on the server, where it would run on for nobody."""
        calls = dict(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if calls:
            try:
                async with asyncio.timeout(_CLEAN_UP_SECONDS):
                    aborts = (self._client.abort(rid, count) for rid, count in calls.items())
                    await asyncio.gather(*aborts)
            except (EngineLostError, TimeoutError):
                return  # nobody is there to run them
