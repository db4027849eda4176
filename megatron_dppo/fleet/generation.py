"""Generation: the responses that are asked for, their seeds, and many of them drawn while the rank works on.

A response is counted once: each key holds the result of one attempt, every attempt has a request id
of its own, and an attempt that was given up is aborted and its answer never read. When the last
server is lost, what was finished is kept, and ``resume`` asks for the rest alone; so are the beginnings of responses
that an update ended early (``engine.continuation``).
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NoReturn, Protocol

from megatron_dppo.config.schema import EngineConfig, EnvironmentConfig, RolloutConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine import errors
from megatron_dppo.engine.continuation import Continuation, Decode
from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams, seed_of
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.async_runner import AsyncRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingSeeds:
    """The seeds of a job: the same in every run that asks for the same, whoever answers, in whatever
    order, and however often it is asked for.

    ``run_seed``: ``run.seed``. ``purpose``: what the responses are for, such as ``step 3``.
    ``positions``: of the job's problems among all that are asked for with this purpose, over all ranks
    and rounds; a problem that is drawn twice has two.
    """

    run_seed: int
    purpose: str
    positions: Sequence[int]

    def of(self, problem: int, sample: int) -> int:
        """Of answer ``sample`` to the ``problem``-th of the job's problems: below 2^63."""
        return seed_of(self.run_seed, self.purpose, self.positions[problem], sample)


Results = dict[Hashable, Trajectory]
"""By the key of the request, in the order of the requests."""


Ask = Callable[[GenerationRequest], Awaitable[Trajectory]]
"""Draws one turn: the prompt is all that came before it."""
Play = Callable[[Problem, GenerationRequest, Ask], Awaitable[Trajectory]]
"""Makes a trajectory of several turns from the request for its first (``environments.episodes``)."""


class GenerationClient(Protocol):
    """Draws responses: ``EngineClient`` on one server, ``FleetClient`` on several."""

    async def generate(self, requests: Sequence[GenerationRequest], rid: str) -> list[Trajectory]:
        """Draw ``requests`` in one call under a new id; one trajectory for each, in order; ``aborted`` ones of requests
        that say so.

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

    ``concurrency``: responses in flight; ``episodes``: those of several turns that are open. ``request_timeout_s``: one
    attempt at one response, without the time in which servers stand still.
    ``hang_timeout_s``: a server that generates nothing for so long, not even for a health check,
    counts as lost. ``responses_per_call``: responses that share one HTTP call, which saves the
    server work on very short ones, but they finish, time out and are lost together.
    """

    concurrency: int
    request_timeout_s: float = 600.0
    max_attempts: int = 3
    hang_timeout_s: float = 60.0
    responses_per_call: int = 1
    episodes: int = 1024

    @property
    def calls(self) -> int:
        """HTTP calls in flight at most."""
        return -(-self.concurrency // self.responses_per_call)

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
    """Calls in flight of all generations that run at the same time, ``count`` at most, from one event loop.

    Who waits longest for a slot is not who gets it, but the generation with the lowest ``order``: a batch that is
    trained on next goes before one that is drawn ahead. ``busy_s``: how long at least one slot was taken, and not held.
    While servers stand still, the calls' time limits do, too. ``episodes``: slots of those, whose turns are calls.
    """

    def __init__(self, count: int, episodes: int | None = None) -> None:
        self.episodes = None if episodes is None else Slots(episodes)
        self._free = count
        self._count = count
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._is_held = False
        self._left_s: dict[asyncio.Timeout, float] = {}
        # The rank's thread asks how busy slots were; calls take them in the loop's.
        self._noting = threading.Lock()
        self._was_busy = False
        self._busy_s = 0.0
        self._noted_s = time.monotonic()

    @property
    def busy_s(self) -> float:
        self._note()
        return self._busy_s

    def hold(self, is_held: bool) -> None:
        """Whether servers stand still for a weight update or a trainer: nothing is busy then."""
        self._is_held = is_held
        self._note()
        now = asyncio.get_running_loop().time()
        for limit, left in self._left_s.items():
            # One that has just run out can't be moved any more.
            if limit.expired():
                continue
            until = limit.when()
            if until is not None:
                self._left_s[limit] = until - now
            limit.reschedule(None if is_held else now + left)

    @asynccontextmanager
    async def limited(self, seconds: float) -> AsyncIterator[None]:
        """A block that raises TimeoutError after so many seconds in which servers did not stand still."""
        now = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(None if self._is_held else now + seconds) as limit:
            self._left_s[limit] = seconds
            try:
                yield
            finally:
                del self._left_s[limit]

    @asynccontextmanager
    async def taken(self, order: int) -> AsyncIterator[None]:
        """A slot for the length of the block."""
        if self._free:
            self._take()
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (order, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    # It was handed a slot in the very moment in which it was cancelled.
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
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
        self._note()

    def _note(self) -> None:
        """The time since the last change was busy or not; from now on it may be otherwise."""
        with self._noting:
            now = time.monotonic()
            if self._was_busy:
                self._busy_s += now - self._noted_s
            self._was_busy, self._noted_s = self._free < self._count and not self._is_held, now


@dataclass(frozen=True)
class GenerationJob:
    """``group_size`` responses to each problem.

    The key of a request is (position in ``problems``, sample index). ``columns``: what is asked for
    beside what every request is, as in GenerationRequest. ``seeds``: those of the responses, in the
    order of ``problems``; None: the server draws as it likes. ``decode``: a response that the server ended early goes
    on where it ended; None: it is drawn again. ``play``: makes each response in several turns; None: it has one.
    """

    problems: Sequence[Problem]
    group_size: int
    sampling: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    seeds: SamplingSeeds | None = None
    decode: Decode | None = None
    play: Play | None = None

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


# --- a generation under way

_TICK_SECONDS = 0.2
_CLEAN_UP_SECONDS = 5.0
_BACK_OFF_SECONDS = 0.5
_MAX_LOSSES = 20
_REDRAW_SECONDS = 0.2


OnResponse = Callable[[Hashable, Trajectory], None]
"""Called with the key of a request and its response, once each."""


class GenerationEnd(IntEnum):
    """How a rank's share of a generation ended; the worst of all ranks counts."""

    DONE = 0
    LOST = 1
    STOPPED = 2
    FAILED = 3


@dataclass(eq=False)
class Generation:
    """``order``: of two generations under way, that with the lower one goes first. ``continuation``: what is kept of
    unfinished responses."""

    job: GenerationJob
    description: str
    on_response: OnResponse | None = None
    order: int = 0
    done: dict[Hashable, Trajectory] = field(default_factory=dict)
    running: Future[Results] | None = None
    responses: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    continuation: Continuation | None = field(init=False)

    def __post_init__(self) -> None:
        decode = self.job.decode
        self.continuation = None if decode is None else Continuation(decode)

    @property
    def redrawn(self) -> int:
        """Tokens that were sampled and not kept, as weight updates ended their responses early."""
        return 0 if self.continuation is None else self.continuation.redrawn

    @property
    def seconds(self) -> float:
        """From the start to the last response, also where nobody waited for it; recoveries included."""
        return 0.0 if self.ended is None else self.ended - self.started

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
                slots=slots,
                order=self.order,
                continuation=self.continuation,
                play=self._play if self.job.play is not None else None,
            )
            self.running = runner.submit(self._timed(work))

    @property
    def is_lost(self) -> bool:
        """Whether this attempt has ended because no server was left."""
        running = self.running
        if running is None or not running.done():
            return False
        return isinstance(running.exception(), errors.GenerationInterruptedError)

    def wait(self, stop: Callable[[], bool]) -> tuple[GenerationEnd, str]:
        """Wait until this attempt ends, with a progress bar; how it ended, and why where it was lost."""
        if self.running is None:
            return (GenerationEnd.STOPPED if stop() else GenerationEnd.DONE), ""
        already, start = len(self.done), time.monotonic()
        with progress(self.description, self.total) as bar:
            while not wait([self.running], _REDRAW_SECONDS).done:
                speed = f"{self.tokens / (time.monotonic() - start):.0f} tokens/s"
                bar.update(completed=already + self.responses, note=speed)
            # Of those that came since, too: short work ends before it is looked at once.
            bar.update(completed=already + self.responses)
        return self.end()

    def end(self) -> tuple[GenerationEnd, str]:
        """How the attempt, which is over, ended; its responses are kept."""
        assert self.running is not None
        try:
            self.done |= self.running.result()
        except errors.GenerationInterruptedError as interruption:
            self.done |= interruption.completed
            return GenerationEnd.LOST, str(interruption)
        except errors.StopRequestedError:
            return GenerationEnd.STOPPED, ""
        except errors.EngineError as error:
            # Asking again would end alike.
            return GenerationEnd.FAILED, f"{type(error).__name__}: {error}"
        return GenerationEnd.DONE, ""

    def cancel(self) -> None:
        """End it; what is in flight is aborted on the servers in the background."""
        if self.running is not None:
            self.running.cancel()

    def _note(self, key: Hashable, trajectory: Trajectory) -> None:
        self.responses += 1
        self.tokens += trajectory.sampled
        if self.on_response is not None:
            self.on_response(key, trajectory)

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
    slots: Slots | None = None,
    order: int = 0,
    continuation: Continuation | None = None,
    play: Callable[[GenerationRequest, Ask], Awaitable[Trajectory]] | None = None,
) -> Results:
    """Results by key, in the order of ``requests`` whatever the order of completion.

    ``slots``: shared with other generations, in which this one has ``order``; None: its own. ``continuation``: goes on
    with responses that the server ended early; None: they are drawn again. ``play``: makes each result by turns that it
    asks for; a slot is taken for each, and none between them.

    Raises GenerationInterruptedError within seconds of the last server's death, with what was finished;
    StopRequestedError soon after ``stop()`` is true; EngineRequestError and EngineAnswerError as they come. In every
    case nothing of this call is left running on a server. ``stop`` is called a few times a second, ``on_response`` with
    each response as it comes; neither may block.
    """
    assert len({request.key for request in requests}) == len(requests)
    slots = Slots(limits.calls, limits.episodes) if slots is None else slots
    run = _Generation(client, requests, limits, on_response, slots, order, continuation, play)
    try:
        await run.wait(stop)
    except errors.EngineLostError as error:
        raise errors.GenerationInterruptedError(run.in_order(), str(error)) from error
    return run.in_order()


@dataclass(eq=False)
class _Generation:
    client: GenerationClient
    requests: Sequence[GenerationRequest]
    limits: GenerationLimits
    on_response: OnResponse | None
    slots: Slots
    order: int
    continuation: Continuation | None
    play: Callable[[GenerationRequest, Ask], Awaitable[Trajectory]] | None
    _turns: dict[int, GenerationRequest] = field(default_factory=dict, init=False)
    _turn_answers: dict[int, Trajectory] = field(default_factory=dict, init=False)
    _in_flight: dict[str, int] = field(default_factory=dict, init=False)
    _results: Results = field(default_factory=dict, init=False)
    _attempts: Counter[int] = field(default_factory=Counter, init=False)
    _rests: set[asyncio.Task[list[int]]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._prefix = uuid.uuid4().hex[:12]
        # The rests of responses differ in what is asked for, which those of one call must share.
        partials = {} if self.continuation is None else self.continuation.partials
        begun = [i for i, request in enumerate(self.requests) if request.key in partials]
        new = [i for i, request in enumerate(self.requests) if request.key not in partials]
        size = self.limits.responses_per_call
        shared = (new[start : start + size] for start in range(0, len(new), size))
        self._pending: deque[list[int]] = deque([*([i] for i in begun), *shared])

    def in_order(self) -> Results:
        return {r.key: self._results[r.key] for r in self.requests if r.key in self._results}

    async def wait(self, stop: Callable[[], bool] | None) -> None:
        if self.play is None:
            workers = min(self.limits.calls, len(self._pending))
            tasks = [asyncio.create_task(self._work()) for _ in range(workers)]
        else:
            tasks = [asyncio.create_task(self._episode(i)) for i in range(len(self.requests))]
        work = asyncio.gather(*tasks)
        watch = asyncio.create_task(self.client.watch(self.limits.hang_timeout_s))
        both: set[asyncio.Future] = {work, watch}
        try:
            while not work.done():
                await asyncio.wait(both, timeout=_TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if watch.done() and not work.done():
                    watch.result()
                if stop is not None and stop():
                    raise errors.StopRequestedError(
                        f"stopped with {len(self._results)} of {len(self.requests)} responses"
                    )
            work.result()
        finally:
            await self._clean_up([*tasks, *self._rests, work, watch])

    async def _work(self) -> None:
        while self._pending:
            async with self.slots.taken(self.order):
                # Others may have taken the last ones meanwhile.
                if self._pending:
                    await self._draw(self._pending.popleft())

    async def _episode(self, index: int) -> None:
        """A result of several turns. Those of an attempt whose servers were lost are drawn again."""
        assert self.play is not None
        request = self.requests[index]
        if self.continuation is not None:
            self.continuation.drop(request)
        places = self.slots.episodes
        async with nullcontext() if places is None else places.taken(self.order):
            self._keep(index, await self.play(request, functools.partial(self._turn, index)))

    async def _turn(self, index: int, request: GenerationRequest) -> Trajectory:
        self._turns[index] = request
        async with self.slots.taken(self.order):
            await self._draw([index])
        return self._turn_answers.pop(index)

    async def _draw(self, indices: list[int]) -> None:
        """Results of one call; the rest of each response that the server ended early, in a call of its own."""
        unfinished = await self._call(indices)
        while unfinished:
            calls = [asyncio.create_task(self._call([index])) for index in unfinished]
            self._rests.update(calls)
            unfinished = [index for rest in await asyncio.gather(*calls) for index in rest]
            self._rests.difference_update(calls)

    async def _call(self, indices: list[int]) -> list[int]:
        """Results of one call, with retries under new request ids; the responses of which there is still a rest."""
        requests, failures, losses, reason = [self._asked(i) for i in indices], 0, 0, ""
        while failures < self.limits.max_attempts and losses < _MAX_LOSSES:
            # Fixed width: SGLang aborts every request whose id begins with the given one.
            rid = f"{self._prefix}-{indices[0]:08d}-{self._attempts[indices[0]]:04d}"
            self._attempts[indices[0]] += 1
            self._in_flight[rid] = len(indices)
            try:
                async with self.slots.limited(self.limits.request_timeout_s):
                    results = await self.client.generate(requests, rid)
            except TimeoutError:
                reason = f"no response within {self.limits.request_timeout_s} s"
                failures += 1
                # Short responses are favoured by it: no figure of the batch shows that.
                log.warning("request %s: %s; it is drawn again", requests[0].key, reason)
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

    def _asked(self, index: int) -> GenerationRequest:
        request = self._turns.get(index, self.requests[index])
        return request if self.continuation is None else self.continuation.rest(request)

    def _record(self, indices: Sequence[int], results: Sequence[Trajectory]) -> list[int]:
        unfinished = []
        for index, result in zip(indices, results, strict=True):
            request, going_on = self._turns.get(index, self.requests[index]), self.continuation
            whole = result if going_on is None else going_on.take(request, result)
            if whole is None:
                unfinished.append(index)
            elif self.play is not None:
                self._turn_answers[index] = whole
            else:
                self._keep(index, whole)
        return unfinished

    def _keep(self, index: int, whole: Trajectory) -> None:
        request = self.requests[index]
        sampling = replace(request.sampling, seed=None).as_json()
        whole = whole.stamped(sampling, request.sampling.seed)
        self._results[request.key] = whole
        if self.on_response is not None:
            self.on_response(request.key, whole)

    async def _clean_up(self, tasks: Sequence[asyncio.Future]) -> None:
        """Cancel the calls in flight, and abort them on the servers."""
        # A server goes on with what nobody waits for, and would keep the next weight update waiting.
        calls = dict(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if calls:
            try:
                async with asyncio.timeout(_CLEAN_UP_SECONDS):
                    aborts = (self.client.abort(rid, count) for rid, count in calls.items())
                    await asyncio.gather(*aborts)
            except (errors.EngineLostError, TimeoutError):
                # Nobody is there to run them.
                return
