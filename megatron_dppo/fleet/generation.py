"""Generation: requests for responses, their seeds, and their execution in the background of the rank.

A response is counted once, even if several calls tried to sample the response. Every call has a new request id. A call
that timed out is aborted, and its answer is never read. When the last server is lost, finished responses are kept, and
``resume`` requests only the missing responses. If an update ends a response early, the response's tokens so far are
kept too (``engine/server/continuation.py``).
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
import math
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NoReturn, Protocol

from megatron_dppo.config.schema import EngineConfig, EnvironmentConfig, RolloutConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine import errors
from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams, seed_of
from megatron_dppo.engine.server.continuation import Continuation, Decode
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.async_runner import AsyncRunner, cancel_tasks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingSeeds:
    """The seeds of a job. Runs with equal settings have equal seeds. Server, order and attempt do not matter.

    Attributes:
        run_seed: ``run.seed``.
        purpose: use of the responses, for example ``step 3``.
        positions: positions of the job's problems among all problems with this purpose, over all ranks and rounds;
            a problem that is sampled twice has two positions.
    """

    run_seed: int
    purpose: str
    positions: Sequence[int]

    def of(self, problem: int, sample: int) -> int:
        """Return the seed, below 2^63, of response ``sample`` to the ``problem``-th of the job's problems."""
        return seed_of(self.run_seed, self.purpose, self.positions[problem], sample)


Results = dict[Hashable, Trajectory]
"""Results by the key of the request, in the order of the requests."""


Ask = Callable[[GenerationRequest], Awaitable[Trajectory]]
"""Function that samples one turn of a trajectory: the request's prompt is everything before the turn."""
Play = Callable[[Problem, GenerationRequest, Ask], Awaitable[Trajectory]]
"""Function that makes a trajectory of several turns from the request for its first turn (``environments.episodes``)."""


class GenerationClient(Protocol):
    """Interface that samples responses: ``EngineClient`` on one server, ``FleetClient`` on several."""

    async def generate(self, requests: Sequence[GenerationRequest], rid: str) -> list[Trajectory]:
        """Sample ``requests`` in one call with a new id; return one trajectory for each, in order.

        A trajectory may be ``aborted`` if its request allows that. Raises AbortedError if this call failed and another
        call may succeed, ServerLostError if another server will take the next call, and EngineLostError if no server is
        left.
        """

    async def abort(self, rid: str, count: int) -> None:
        """End a call of ``count`` requests whose answer is not needed. Raises EngineLostError."""

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        """Raise EngineLostError when no server is left. A server that is silent for ``hang_timeout_s`` is lost."""


@dataclass(frozen=True)
class GenerationLimits:
    """Limits of ``generate_many``; times in seconds.

    Attributes:
        concurrency: responses in flight.
        episodes: open episodes of several turns.
        request_timeout_s: time of one attempt at one response. Time of paused servers does not count.
        hang_timeout_s: a server that generates nothing for so long, not even for a health check, counts as lost.
        responses_per_call: responses that share one HTTP call. This saves the server work on very short responses, but
            the responses of one call finish, time out and are lost together.
    """

    concurrency: int
    request_timeout_s: float = 600.0
    max_attempts: int = 3
    hang_timeout_s: float = 60.0
    responses_per_call: int = 1
    episodes: int = 1024

    @property
    def calls(self) -> int:
        """Largest number of HTTP calls in flight."""
        return math.ceil(self.concurrency / self.responses_per_call)

    @classmethod
    def of(
        cls, rollout: RolloutConfig, engine: EngineConfig, environment: EnvironmentConfig
    ) -> GenerationLimits:
        return cls(
            concurrency=rollout.max_concurrent_requests,
            request_timeout_s=rollout.response_timeout_s,
            hang_timeout_s=engine.hang_timeout_s,
            responses_per_call=rollout.responses_per_call,
            episodes=environment.concurrent or 4 * rollout.max_concurrent_requests,
        )


class Slots:
    """``count`` slots that limit the calls of all generations together. All generations run on one event loop.

    A free slot goes to the waiting call of the generation with the lowest ``order``, not to the call that waits
    longest: the batch that is trained on next goes before a batch that is generated ahead. While servers are paused,
    the calls' time limits are paused too.

    Attributes:
        busy_s: time that at least one slot was used while servers were not paused.
        episodes: slots of whole episodes, whose turns are calls; None: episodes are not limited.
    """

    def __init__(self, count: int, episodes: int | None = None) -> None:
        self.episodes = None if episodes is None else Slots(episodes)
        self._free = count
        self._count = count
        self._arrivals = itertools.count()
        # A heap of (order, number of arrival, future that gives the slot).
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._is_held = False
        # Seconds that each time limit had left when it was last started or paused.
        self._remaining_s: dict[asyncio.Timeout, float] = {}
        # The rank's thread reads ``busy_s`` while calls take slots in the event loop's thread.
        self._note_lock = threading.Lock()
        self._was_busy = False
        self._busy_s = 0.0
        self._last_note_s = time.monotonic()

    @property
    def busy_s(self) -> float:
        self._note()
        return self._busy_s

    def hold(self, is_held: bool) -> None:
        """Pause or resume the slots. While servers are paused for a weight update or a trainer, no slot is busy."""
        self._is_held = is_held
        self._note()
        current_time = asyncio.get_running_loop().time()
        for limit in self._remaining_s:
            # A limit that has just expired can't be rescheduled.
            if limit.expired():
                continue
            until = limit.when()
            # A paused limit has no deadline.
            if until is not None:
                self._remaining_s[limit] = until - current_time
            limit.reschedule(None if is_held else current_time + self._remaining_s[limit])

    @asynccontextmanager
    async def limited(self, seconds: float) -> AsyncIterator[None]:
        """Limit a block to ``seconds``. Time of paused servers does not count. Raises TimeoutError."""
        current_time = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(None if self._is_held else current_time + seconds) as limit:
            self._remaining_s[limit] = seconds
            try:
                yield
            finally:
                del self._remaining_s[limit]

    @asynccontextmanager
    async def taken(self, order: int) -> AsyncIterator[None]:
        """Hold a slot for the block."""
        if self._free:
            self._take()
        else:
            slot = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (order, next(self._arrivals), slot))
            try:
                await slot
            except asyncio.CancelledError:
                if slot.done() and not slot.cancelled():
                    # The call received a slot just before it was cancelled.
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _take(self) -> None:
        self._free -= 1
        self._note()

    def _release(self) -> None:
        while self._waiting:
            _, _, slot = heapq.heappop(self._waiting)
            # Skip cancelled calls: their futures are done.
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1
        self._note()

    def _note(self) -> None:
        """Add the time since the last change to ``busy_s`` if a slot was busy, and store the present state."""
        with self._note_lock:
            current_time = time.monotonic()
            if self._was_busy:
                self._busy_s += current_time - self._last_note_s
            self._was_busy = self._free < self._count and not self._is_held
            self._last_note_s = current_time


@dataclass(frozen=True)
class GenerationJob:
    """``group_size`` responses to each problem.

    Attributes:
        problems: the problems. A request's key is (position of the problem here, sample index).
        group_size: responses to each problem.
        sampling: sampling parameters.
        columns: columns to record in addition to the usual columns, as in GenerationRequest.
        seeds: seeds of the responses, in the order of ``problems``; None: the server chooses the seeds.
        decode: decodes tokens, so that a response that the server ended early can be continued. None: such a response
            is sampled again from its first token.
        play: makes each response in several turns; None: a response has one turn.
    """

    problems: Sequence[Problem]
    group_size: int
    sampling: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    seeds: SamplingSeeds | None = None
    decode: Decode | None = None
    play: Play | None = None

    def for_problems(
        self, problems: Sequence[Problem], purpose: str, positions: Sequence[int]
    ) -> GenerationJob:
        """Return this job with other problems. If the job has seeds, the seeds get ``purpose`` and ``positions``."""
        seeds = self.seeds
        if seeds is not None:
            seeds = replace(seeds, purpose=purpose, positions=positions)
        return replace(self, problems=problems, seeds=seeds)

    def requests(
        self, completed: Mapping[Hashable, Trajectory] | None = None
    ) -> list[GenerationRequest]:
        """Return the requests whose key is not in ``completed``, group by group."""
        requests: list[GenerationRequest] = []
        for key in self.keys():
            if completed is not None and key in completed:
                continue
            position, sample = key
            problem = self.problems[position]
            requests.append(
                GenerationRequest(
                    key=key,
                    prompt_ids=problem.prompt_ids,
                    sampling=self._sampling(position, sample),
                    columns=self.columns,
                    problem_id=problem.problem_id,
                    sample_index=sample,
                )
            )
        return requests

    def keys(self) -> list[tuple[int, int]]:
        """Return the key of every request: (position in ``problems``, sample index), group by group."""
        count = len(self.problems) * self.group_size
        return [divmod(index, self.group_size) for index in range(count)]

    def _sampling(self, position: int, sample: int) -> SamplingParams:
        if self.seeds is None:
            return self.sampling
        return replace(self.sampling, seed=self.seeds.of(position, sample))

    def trajectories(self, completed: Mapping[Hashable, Trajectory]) -> list[Trajectory]:
        """Return all responses, group by group. Raises KeyError if a response is missing."""
        return [completed[key] for key in self.keys()]


_TICK_SECONDS = 0.2
"""Seconds between two checks of a generation for the loss of the last server, and for a stop."""
_CLEAN_UP_SECONDS = 5.0
"""Longest wait for the aborts of open calls."""
_BACK_OFF_SECONDS = 0.5
"""Pause after a call's first aborted attempt; it doubles with each further attempt."""
_MAX_LOSSES = 20
"""A call fails after it has lost its server this many times."""
_REDRAW_SECONDS = 0.2
"""Seconds between two updates of the progress bar."""


OnResponse = Callable[[Hashable, Trajectory], None]
"""Callback with the key of a request and its response, called once for each request."""
OnTimeout = Callable[[int], None]
"""Callback with a number of responses that took too long and are sampled again."""


class GenerationEnd(IntEnum):
    """How a rank's share of a generation ended. The largest value over all ranks counts for the whole generation."""

    DONE = 0
    LOST = 1
    STOPPED = 2
    FAILED = 3


@dataclass(eq=False)
class Generation:
    """A rank's share of a generation, over all its attempts. ``resume`` starts an attempt at all missing responses.

    Attributes:
        job: the responses to sample.
        description: title of the progress bar.
        on_response: called with each response.
        order: of two open generations, the calls of the generation with the lower ``order`` get slots first.
        done: the finished responses of ended attempts.
        running: the attempt under way, or the last attempt.
        responses: number of responses of ``running``.
        tokens: number of sampled tokens of ``running``.
        timed_out: number of responses, or turns, that were sampled again after a timeout.
        continuation: keeps the tokens of unfinished responses.
    """

    job: GenerationJob
    description: str
    on_response: OnResponse | None = None
    order: int = 0
    done: dict[Hashable, Trajectory] = field(default_factory=dict)
    running: Future[Results] | None = None
    responses: int = 0
    tokens: int = 0
    timed_out: int = 0
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    continuation: Continuation | None = field(init=False)

    def __post_init__(self) -> None:
        decode = self.job.decode
        self.continuation = None if decode is None else Continuation(decode)

    @property
    def redrawn(self) -> int:
        """Tokens that were sampled and discarded, because weight updates ended their responses early."""
        if self.continuation is None:
            return 0
        return self.continuation.redrawn

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last response, including recoveries."""
        if self.ended is None:
            return 0.0
        return self.ended - self.started

    @property
    def total(self) -> int:
        return len(self.job.problems) * self.job.group_size

    def resume(
        self,
        runner: AsyncRunner,
        client: GenerationClient,
        limits: GenerationLimits,
        stop: Callable[[], bool],
        slots: Slots,
    ) -> None:
        """Start an attempt at the responses that are not in ``done``, and return at once."""
        requests = self.job.requests(self.done)
        self.responses = self.tokens = 0
        self.running = None
        if requests:
            work = generate_many(
                client,
                requests,
                limits,
                stop=stop,
                on_response=self._note,
                on_timeout=self._note_timeout,
                slots=slots,
                order=self.order,
                continuation=self.continuation,
                play=self._play if self.job.play is not None else None,
            )
            self.running = runner.submit(self._timed(work))

    @property
    def is_begun(self) -> bool:
        """Whether this attempt requests responses. False if all responses existed before it."""
        return self.running is not None

    @property
    def is_lost(self) -> bool:
        """Whether this attempt has ended because no server was left."""
        running = self.running
        if running is None or not running.done():
            return False
        return isinstance(running.exception(), errors.GenerationInterruptedError)

    def wait(self, stop: Callable[[], bool]) -> tuple[GenerationEnd, str]:
        """Wait until this attempt ends, with a progress bar; return how it ended, and the reason of a loss or fault."""
        if self.running is None:
            end = GenerationEnd.STOPPED if stop() else GenerationEnd.DONE
            return end, ""
        earlier_responses = len(self.done)
        start = time.monotonic()
        with progress(self.description, self.total) as bar:
            while not wait_for_futures([self.running], _REDRAW_SECONDS).done:
                speed = f"{self.tokens / (time.monotonic() - start):.0f} tokens/s"
                bar.update(completed=earlier_responses + self.responses, note=speed)
            # Count the last responses too: a short generation may end before the bar was updated once.
            bar.update(completed=earlier_responses + self.responses)
        return self.end()

    def end(self) -> tuple[GenerationEnd, str]:
        """Return how the finished attempt ended, and the reason; the attempt's responses are added to ``done``."""
        assert self.running is not None
        try:
            self.done |= self.running.result()
        except errors.GenerationInterruptedError as interruption:
            self.done |= interruption.completed
            return GenerationEnd.LOST, str(interruption)
        except errors.StopRequestedError:
            return GenerationEnd.STOPPED, ""
        except errors.EngineError as error:
            # Another attempt would fail the same way.
            return GenerationEnd.FAILED, f"{type(error).__name__}: {error}"
        return GenerationEnd.DONE, ""

    def cancel(self) -> None:
        """End the attempt; its calls are aborted on the servers in the background."""
        if self.running is not None:
            self.running.cancel()

    def _note(self, key: Hashable, trajectory: Trajectory) -> None:
        self.responses += 1
        self.tokens += trajectory.sampled
        if self.on_response is not None:
            self.on_response(key, trajectory)

    def _note_timeout(self, count: int) -> None:
        self.timed_out += count

    def _play(self, request: GenerationRequest, ask: Ask) -> Awaitable[Trajectory]:
        assert self.job.play is not None
        position: int = request.key[0]  # type: ignore[index]
        return self.job.play(self.job.problems[position], request, ask)

    async def _timed(self, work: Awaitable[Results]) -> Results:
        try:
            return await work
        finally:
            self.ended = time.monotonic()


async def generate_many(
    client: GenerationClient,
    requests: Sequence[GenerationRequest],
    limits: GenerationLimits,
    *,
    stop: Callable[[], bool] | None = None,
    on_response: OnResponse | None = None,
    on_timeout: OnTimeout | None = None,
    slots: Slots | None = None,
    order: int = 0,
    continuation: Continuation | None = None,
    play: Callable[[GenerationRequest, Ask], Awaitable[Trajectory]] | None = None,
) -> Results:
    """Run the requests and return their results by key, in the order of ``requests``.

    No call is left running on a server, even if the function ends with an error.

    Args:
        client: client of the servers.
        requests: the requests.
        limits: limits of time and concurrency.
        stop: called a few times a second; returns whether to stop; must not block.
        on_response: called with each response as it arrives; must not block.
        on_timeout: called with the number of responses of each call that timed out; must not block.
        slots: slots shared with other generations; None: no other generation runs.
        order: priority of this generation among the generations that share the slots. The lowest order goes first.
        continuation: continues responses that the servers ended early; None: they are sampled again.
        play: makes each result by turns that it requests. A turn takes a slot; between turns no slot is held.

    Raises:
        GenerationInterruptedError: the last server is lost. The error has the finished responses.
        StopRequestedError: ``stop()`` is true.
        EngineRequestError: a server refused a request.
        EngineAnswerError: a server's answer is unusable.
    """
    assert len({request.key for request in requests}) == len(requests)
    slots = Slots(limits.calls, limits.episodes) if slots is None else slots
    run = _GenerationAttempt(
        client, requests, limits, on_response, on_timeout, slots, order, continuation, play
    )
    try:
        await run.wait(stop)
    except errors.EngineLostError as error:
        raise errors.GenerationInterruptedError(run.in_order(), str(error)) from error
    return run.in_order()


@dataclass(eq=False)
class _GenerationAttempt:
    """One run of ``generate_many``. An index is a position in ``requests``.

    Attributes:
        _pending: the indices of each call that is not sent yet.
        _turns, _turn_answers: request and answer of an episode's present turn, by index.
        _in_flight: number of requests of each open call, by the call's id.
        _attempts: number of calls that were sent, by the first index of the call.
        _continuing_calls: the calls that continue responses.
    """

    client: GenerationClient
    requests: Sequence[GenerationRequest]
    limits: GenerationLimits
    on_response: OnResponse | None
    on_timeout: OnTimeout | None
    slots: Slots
    order: int
    continuation: Continuation | None
    play: Callable[[GenerationRequest, Ask], Awaitable[Trajectory]] | None
    _turns: dict[int, GenerationRequest] = field(default_factory=dict, init=False)
    _turn_answers: dict[int, Trajectory] = field(default_factory=dict, init=False)
    _in_flight: dict[str, int] = field(default_factory=dict, init=False)
    _results: Results = field(default_factory=dict, init=False)
    _attempts: Counter[int] = field(default_factory=Counter, init=False)
    _continuing_calls: set[asyncio.Task[list[int]]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._prefix = uuid.uuid4().hex[:12]
        partials = {}
        if self.continuation is not None:
            partials = self.continuation.partials
        self._pending: deque[list[int]] = deque()
        new_indices: list[int] = []
        for index, request in enumerate(self.requests):
            if request.key in partials:
                # The requests of one call must share their parameters, but each continued response has its own limit of
                # tokens.
                self._pending.append([index])
            else:
                new_indices.append(index)
        size = self.limits.responses_per_call
        for start in range(0, len(new_indices), size):
            self._pending.append(new_indices[start : start + size])

    def in_order(self) -> Results:
        """Return the finished results in the order of ``requests``."""
        return {r.key: self._results[r.key] for r in self.requests if r.key in self._results}

    async def wait(self, stop: Callable[[], bool] | None) -> None:
        if self.play is None:
            workers = min(self.limits.calls, len(self._pending))
            tasks = [asyncio.create_task(self._work()) for _ in range(workers)]
        else:
            tasks = [asyncio.create_task(self._episode(i)) for i in range(len(self.requests))]
        work = asyncio.gather(*tasks)
        watch = asyncio.create_task(self.client.watch(self.limits.hang_timeout_s))
        waited_tasks: set[asyncio.Future] = {work, watch}
        try:
            while not work.done():
                await asyncio.wait(
                    waited_tasks, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if watch.done() and not work.done():
                    # The watch ends only by an error. Raise it.
                    watch.result()
                if stop is not None and stop():
                    raise errors.StopRequestedError(
                        f"stopped with {len(self._results)} of {len(self.requests)} responses"
                    )
            work.result()
        finally:
            await self._clean_up([*tasks, *self._continuing_calls, work, watch])

    async def _work(self) -> None:
        while self._pending:
            async with self.slots.taken(self.order):
                # Other workers may have taken the last calls meanwhile.
                if self._pending:
                    await self._complete(self._pending.popleft())

    async def _episode(self, index: int) -> None:
        """Make a result of several turns. After a loss of all servers an episode begins again, with its first turn."""
        assert self.play is not None
        request = self.requests[index]
        if self.continuation is not None:
            # An earlier attempt may have left the tokens of an unfinished turn.
            self.continuation.drop(request)
        slot: AbstractAsyncContextManager[None] = nullcontext()
        if self.slots.episodes is not None:
            slot = self.slots.episodes.taken(self.order)
        async with slot:
            trajectory = await self.play(request, functools.partial(self._turn, index))
            self._keep(index, trajectory)

    async def _turn(self, index: int, request: GenerationRequest) -> Trajectory:
        self._turns[index] = request
        async with self.slots.taken(self.order):
            await self._complete([index])
        return self._turn_answers.pop(index)

    async def _complete(self, indices: list[int]) -> None:
        """Get the results of one call. If the server ended a response early, a separate call continues the response."""
        unfinished = await self._call(indices)
        while unfinished:
            calls = [asyncio.create_task(self._call([index])) for index in unfinished]
            self._continuing_calls.update(calls)
            unfinished = []
            for unfinished_indices in await asyncio.gather(*calls):
                unfinished += unfinished_indices
            self._continuing_calls.difference_update(calls)

    async def _call(self, indices: list[int]) -> list[int]:
        """Run one call, with retries under new request ids; return the indices of unfinished responses."""
        requests = [self._remaining_request(index) for index in indices]
        failures = 0
        losses = 0
        reason = ""
        while failures < self.limits.max_attempts and losses < _MAX_LOSSES:
            # SGLang aborts every request whose id begins with the given id. Numbers of a fixed width make sure that no
            # id begins with another id.
            rid = f"{self._prefix}-{indices[0]:08d}-{self._attempts[indices[0]]:04d}"
            self._attempts[indices[0]] += 1
            self._in_flight[rid] = len(indices)
            try:
                async with self.slots.limited(self.limits.request_timeout_s):
                    results = await self.client.generate(requests, rid)
            except TimeoutError:
                reason = f"no response within {self.limits.request_timeout_s} s"
                failures += 1
                # Log and count timeouts: they bias the batch, because long responses time out more often.
                log.warning("request %s: %s; it is drawn again", requests[0].key, reason)
                if self.on_timeout is not None:
                    self.on_timeout(len(indices))
                await self.client.abort(rid, len(indices))
            except errors.AbortedError as error:
                reason = str(error)
                await asyncio.sleep(_BACK_OFF_SECONDS * 2**failures)
                failures += 1
            except errors.ServerLostError as error:
                reason = str(error)
                losses += 1
            else:
                return self._record(indices, results)
            finally:
                del self._in_flight[rid]
        raise errors.EngineLostError(
            f"request {requests[0].key}: {failures + losses} attempts failed, the last: {reason}"
        )

    def _remaining_request(self, index: int) -> GenerationRequest:
        """Return the request for the tokens that are not sampled yet."""
        request = self._turns.get(index, self.requests[index])
        if self.continuation is None:
            return request
        return self.continuation.rest(request)

    def _record(self, indices: Sequence[int], results: Sequence[Trajectory]) -> list[int]:
        """Keep the results of a call; return the indices of unfinished responses."""
        unfinished = []
        for index, result in zip(indices, results, strict=True):
            request = self._turns.get(index, self.requests[index])
            trajectory: Trajectory | None = result
            if self.continuation is not None:
                trajectory = self.continuation.take(request, result)
            if trajectory is None:
                unfinished.append(index)
            elif self.play is not None:
                self._turn_answers[index] = trajectory
            else:
                self._keep(index, trajectory)
        return unfinished

    def _keep(self, index: int, trajectory: Trajectory) -> None:
        request = self.requests[index]
        sampling = replace(request.sampling, seed=None).as_json()
        trajectory = trajectory.stamped(sampling, request.sampling.seed)
        self._results[request.key] = trajectory
        if self.on_response is not None:
            self.on_response(request.key, trajectory)

    async def _clean_up(self, tasks: Sequence[asyncio.Future]) -> None:
        """Cancel the calls in flight, and abort them on the servers."""
        # Without an abort, a server would finish the calls, and keep the next weight update waiting.
        calls = dict(self._in_flight)
        await cancel_tasks(tasks)
        if calls:
            try:
                async with asyncio.timeout(_CLEAN_UP_SECONDS):
                    aborts = (self.client.abort(rid, count) for rid, count in calls.items())
                    await asyncio.gather(*aborts)
            except (errors.EngineLostError, TimeoutError):
                # No server is left, or the servers did not answer the aborts in time.
                return
