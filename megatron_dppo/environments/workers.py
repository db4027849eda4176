"""Worker processes of environments, so that an environment can harm neither the rank nor other workers.

A worker (``system/workers.py``) receives an EnvironmentSpec. Then it answers each call by ``{"result"}``, or by
``{"fault"}`` for an exception of the environment. Both directions are JSON. Many episodes run side by side in a worker,
on one event loop.

A call that takes too long is cancelled. A process that does not answer the cancellation is blocked; it is killed, and
replaced like one that ended by itself. Where it had several episodes, the episode at fault is unknown: each begins
again in a process of its own, and only the one at fault fails there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import (
    ChatCall,
    Environment,
    EnvironmentFaultError,
    Observation,
    Step,
    Turn,
    find_environment,
    observation_of,
)
from megatron_dppo.system.secret_variables import named_in_options, withheld_hint
from megatron_dppo.system.workers import (
    START_LIMIT_S,
    CallConnection,
    RestrictedWorker,
    WorkerCall,
    WorkerLostError,
    WorkerPool,
    connect_restricted,
)

_MODULE = "megatron_dppo.environments.workers"
_CANCEL_S = 5.0
_LONGEST_OUTPUT = 2000
_PASSED_KEY = "environment.passed_variables"
_LONGEST_FAULT = 200
T = TypeVar("T")


@dataclass(frozen=True)
class EnvironmentSpec:
    """Specification of a worker's environments.

    Attributes:
        name: name of the class, as in ``find_environment``.
        options: arguments of the class.
        step_timeout_s: longest time of one call.
        memory_gib: a worker's address space.
        largest_bytes: longest answer, as JSON.
        passed_variables: as in EnvironmentConfig.
        sampling: the run's sampling settings by their names in OpenAI's requests, for environments whose programs
            may ask for them (``note_sampling``).
    """

    name: str
    options: dict[str, Any]
    step_timeout_s: float
    memory_gib: int = 4
    largest_bytes: int = 1 << 20
    passed_variables: Sequence[str] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def variable_names(self) -> list[str]:
        """Return the variables with keys that a worker receives."""
        return [*self.passed_variables, *named_in_options(self.options)]


class EnvironmentPool:
    """``workers`` processes for the episodes of a rank, started when they are first needed; ``close`` ends them.

    ``open`` and the environments that it returns belong to one event loop.
    """

    def __init__(self, spec: EnvironmentSpec, workers: int) -> None:
        self._spec, self.name = spec, spec.name
        self._shared = WorkerPool(self._start_worker, workers)
        self._alone: set[EnvironmentWorker] = set()
        self._lone_places = asyncio.Semaphore(max(workers, os.cpu_count() or 1))

    async def open(self, *, alone: bool = False) -> RemoteEnvironment:
        """Return a new environment; ``alone``: in a process without other episodes. Raises EnvironmentFaultError."""
        if not alone:
            return RemoteEnvironment(self, self._shared.take())
        await self._lone_places.acquire()
        worker = self._start_worker()
        self._alone.add(worker)
        return RemoteEnvironment(self, worker)

    def is_alone(self, worker: EnvironmentWorker) -> bool:
        return worker in self._alone

    def leave(self, worker: EnvironmentWorker) -> None:
        """End an episode of the worker."""
        if self.is_alone(worker):
            self._alone.remove(worker)
            worker.kill()
            self._lone_places.release()
        else:
            self._shared.release(worker)

    def close(self) -> None:
        """End the processes and cancel their work. A second call has no effect."""
        self._shared.close()
        for worker in self._alone:
            worker.kill()

    def _start_worker(self) -> EnvironmentWorker:
        return EnvironmentWorker(self._spec)


class RemoteEnvironment(Environment):
    """An environment in a worker. Every method except ``close`` raises EnvironmentFaultError, and nothing else."""

    def __init__(self, pool: EnvironmentPool, worker: EnvironmentWorker) -> None:
        self._pool, self._worker = pool, worker
        self._episode = next(worker.episodes)
        self._is_open = True

    async def reset(self, problem: Problem) -> Observation:
        return await self._answer("reset", {"problem": asdict(problem)}, observation_of)

    async def step(self, turn: Turn) -> Step:
        return await self._answer("step", asdict(turn), _step_of)

    async def _answer(self, operation: str, values: dict[str, Any], of: Callable[[Any], T]) -> T:
        answer = await self._worker.request(operation, self._episode, values)
        try:
            return of(answer)
        # The answer comes from a class of the environment's own, which may check nothing.
        except (ArithmeticError, TypeError, ValueError) as error:
            raise EnvironmentFaultError(f"{self._pool.name}: {operation}: {error}") from error

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._pool.is_alone(self._worker):
                # The process ends next.
                await self._worker.finish(self._episode)
            else:
                self._worker.tell("close", self._episode)
        finally:
            self._pool.leave(self._worker)


class EnvironmentWorker(RestrictedWorker):
    """A process of environments, used from the event loop that created it. ``episodes`` numbers its episodes."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        super().__init__(
            _MODULE,
            asdict(spec),
            memory_gib=spec.memory_gib,
            variable_names=spec.variable_names,
            largest_answer=spec.largest_bytes + 4096,
        )
        self.episodes = itertools.count()
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._was_shared: bool | None = None
        self.ended.add_done_callback(self._note_end_in_loop)

    async def request(self, operation: str, episode: int, values: dict[str, Any]) -> Any:
        """Return the environment's answer. Raises EnvironmentFaultError."""
        await self._started()
        limit = self._spec.step_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._ask(operation, episode, values)
        except TimeoutError:
            pass
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self._ask("cancel", episode, {})
        except TimeoutError:
            self.kill(f"no answer to {operation} within {limit:g} s, and none to anything else")
            raise self._lost() from None
        raise EnvironmentFaultError(
            f"{self._spec.name}: no answer to {operation} within {limit:g} s"
        )

    def tell(self, operation: str, episode: int) -> None:
        """Send a message without waiting for its answer."""
        if not self.is_dead:
            message = {"operation": operation, "episode": episode}
            self._loop.run_in_executor(None, self.call, json.dumps(message).encode())

    async def finish(self, episode: int) -> None:
        """Wait until the episode's environment is closed, or until a time limit."""
        with contextlib.suppress(TimeoutError, EnvironmentFaultError):
            async with asyncio.timeout(_CANCEL_S):
                await self._ask("close", episode, {})

    def kill(self, reason: str = "it was closed") -> None:
        self._note_end()
        super().kill(reason)

    async def _started(self) -> None:
        if self.ready.done():
            return
        start = asyncio.wrap_future(self.ready)
        start.add_done_callback(lambda future: future.cancelled() or future.exception())
        done, _ = await asyncio.wait([start], timeout=START_LIMIT_S)
        # The request reports the end of a worker.
        if not done:
            self.kill(f"it did not start in {START_LIMIT_S:g} s")

    async def _ask(self, operation: str, episode: int, values: dict[str, Any]) -> Any:
        message = {"operation": operation, "episode": episode, **values}
        # A process that does not read may fill the pipe, so don't block the loop.
        content = json.dumps(message).encode()
        call = await self._loop.run_in_executor(None, self.call, content)
        try:
            answer = _read_json(await asyncio.wrap_future(call))
        except WorkerLostError:
            raise self._lost() from None
        # The content is no JSON, or nested too deeply.
        except (ValueError, RecursionError) as error:
            self.kill(f"its answer is no JSON: {error}")
            raise self._lost() from None
        if "fault" in answer:
            fault = f"{answer['fault']}{withheld_hint(answer['fault'], _PASSED_KEY)}"
            raise EnvironmentFaultError(f"{self._spec.name}: {fault}")
        return answer["result"]

    def _note_end_in_loop(self, _: Any) -> None:
        # At the end of a run no request waits, and the loop is closed.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_end)

    def _note_end(self) -> None:
        """Store whether several episodes may be at fault: later, the process has fewer.

        None is at fault where the process did not start.
        """
        if self._was_shared is None:
            is_started = self.ready.done() and self.ready.exception() is None
            self._was_shared = self.users > 1 and is_started

    def _lost(self) -> EnvironmentFaultError:
        self._note_end()
        reason = self.killed_for
        if not reason:
            lost = self.ended.result()
            output = lost.output[-_LONGEST_OUTPUT:].strip()
            reason = f"{lost}: {output}" if output else str(lost)
            reason += withheld_hint(reason, _PASSED_KEY)
        return EnvironmentFaultError(
            f"{self._spec.name}: {reason}", is_shared=bool(self._was_shared)
        )


def _step_of(answer: dict[str, Any]) -> Step:
    return Step(**answer)


def _read_json(content: bytes) -> Any:
    """Decode JSON, and replace half of a surrogate pair, which no tokenizer and no file takes, by a question mark."""
    values = json.loads(content)
    if rb"\ud" not in content:
        return values
    return json.loads(json.dumps(values, ensure_ascii=False).encode(errors="replace"))


class EnvironmentHost:
    """The environments of a worker process, by the number of their episode."""

    def __init__(self, connection: CallConnection, spec: EnvironmentSpec) -> None:
        self._connection, self._spec = connection, spec
        self._make = find_environment(spec.name)
        self._environments: dict[int, Environment] = {}
        self._under_way: dict[int, asyncio.Task[None]] = {}

    async def serve(self, start: WorkerCall) -> None:
        """Answer calls until the rank closes the connection."""
        loop = asyncio.get_running_loop()
        calls = asyncio.Queue[WorkerCall]()
        threading.Thread(target=self._listen, args=(loop, calls), daemon=True).start()
        self._connection.answer(start, b"")
        while True:
            call = await calls.get()
            message = json.loads(call.content)
            operation = message.pop("operation")
            episode = message.pop("episode")
            task = asyncio.create_task(self._handle(call, operation, episode, message))
            if operation in ("reset", "step"):
                self._under_way[episode] = task

    def _listen(self, loop: asyncio.AbstractEventLoop, calls: asyncio.Queue[WorkerCall]) -> None:
        """Receive calls in a thread: an environment may block the loop, and the process must still end with the
        rank.
        """
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, self._connection.receive())
        except (EOFError, OSError):
            os._exit(0)

    async def _handle(
        self,
        call: WorkerCall,
        operation: str,
        episode: int,
        values: dict[str, Any],
    ) -> None:
        try:
            result = await getattr(self, f"_{operation}")(episode, **values)
            answer = json.dumps({"result": result})
            if len(answer) > self._spec.largest_bytes:
                raise ValueError(
                    f"an answer of {len(answer)} bytes, expected at most {self._spec.largest_bytes}"
                )
        # The run continues without this sample, whatever the exception.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            line = f"({Path(frame.filename).name}, line {frame.lineno})"
            fault = f"{operation}: {type(error).__name__}: {str(error)[:_LONGEST_FAULT]} {line}"
            answer = json.dumps({"fault": fault})
        self._connection.answer(call, answer.encode())

    async def _reset(self, episode: int, problem: dict[str, Any]) -> str | dict[str, Any]:
        environment = self._make(**self._spec.options)
        self._environments[episode] = environment
        # An attribute of the class: an object's __getattr__ may answer to any name.
        note_sampling = getattr(type(environment), "note_sampling", None)
        if note_sampling is not None:
            note_sampling(environment, self._spec.sampling)
        ids = tuple(problem.pop("prompt_ids"))
        messages = tuple(problem.pop("messages"))
        tools = tuple(problem.pop("tools"))
        sent_problem = Problem(**problem, prompt_ids=ids, messages=messages, tools=tools)
        first_observation = await environment.reset(sent_problem)
        if isinstance(first_observation, str):
            return first_observation
        if not getattr(self._make, "makes_prompts", False):
            raise TypeError("a prompt, expected text: makes_prompts of the class is not True")
        return _declared(first_observation, ChatCall)

    async def _step(self, episode: int, **values: Any) -> dict[str, Any]:
        ids = tuple(values.pop("token_ids"))
        step = await self._environments[episode].step(Turn(**values, token_ids=ids))
        answer = _declared(step, Step)
        if isinstance(step.observation, ChatCall):
            answer["observation"] = _declared(step.observation, ChatCall)
        return answer

    async def _cancel(self, episode: int) -> None:
        if (task := self._under_way.pop(episode, None)) is not None:
            task.cancel()

    async def _close(self, episode: int) -> None:
        await self._cancel(episode)
        environment = self._environments.pop(episode, None)
        if environment is not None:
            await environment.close()


def _declared(value: Any, kind: type[ChatCall | Step]) -> dict[str, Any]:
    """Return only the declared fields of ``kind``: an environment's subclass may have more. Raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__}, expected a {kind.__name__}")
    return {f.name: getattr(value, f.name) for f in fields(kind)}


def main() -> None:
    """Serve in a child process. This process, its guard, reaps processes that the child's commands leave, and ends
    it.
    """
    [descriptor] = sys.argv[1:]
    # A session of an agent has about five open files.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    connection, start, settings = connect_restricted(descriptor, is_final=False)
    asyncio.run(EnvironmentHost(connection, EnvironmentSpec(**settings)).serve(start))


if __name__ == "__main__":
    main()
