"""Worker processes of environments: an environment cannot harm the rank or other workers.

A worker (``system/workers.py``) receives an EnvironmentSpec. Then it answers each call by ``{"result"}``, or by
``{"fault"}`` for an exception of the environment. Both directions are JSON. Many episodes run side by side in a worker,
on one event loop.

A call that takes too long is cancelled. A process that does not answer the cancellation is blocked; it is killed, and
replaced like a process that has ended. If the process had several episodes, the episode at fault is unknown. So each of
these episodes begins again in a separate process, and only the episode at fault fails again.
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
    PolicyFormat,
    Step,
    Turn,
    find_environment,
    makes_prompts,
    note_settings,
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
"""Longest wait for the answer to a cancellation, or for the end of an episode."""
_MAX_OUTPUT = 2000
"""A fault quotes this many characters from the end of a dead process's output."""
_PASSED_KEY = "environment.passed_variables"
_MAX_FAULT = 200
"""Largest number of characters of an environment's exception in a fault."""
T = TypeVar("T")


@dataclass(frozen=True)
class EnvironmentSpec:
    """Specification of a worker's environments.

    Attributes:
        name: name of the class, as in ``find_environment``.
        options: arguments of the class.
        step_timeout_s: longest time of one call.
        memory_gib: limit of a worker's address space.
        largest_bytes: largest number of bytes of an answer, as JSON.
        passed_variables: as in EnvironmentConfig.
        sampling: the run's sampling settings by their names in OpenAI's requests. An environment with a method
            ``note_sampling`` receives them: its programs may repeat them in their requests.
        policy_format: the fields of a PolicyFormat. An environment with a method ``note_policy_format`` receives the
            PolicyFormat.
    """

    name: str
    options: dict[str, Any]
    step_timeout_s: float
    memory_gib: int = 4
    largest_bytes: int = 1 << 20
    passed_variables: Sequence[str] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    policy_format: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variable_names(self) -> list[str]:
        """Return the names of the secret environment variables that a worker receives; it receives no others."""
        return [*self.passed_variables, *named_in_options(self.options)]


class EnvironmentPool:
    """The processes for the episodes of a rank, started when they are first needed; ``close`` ends them.

    ``workers`` processes share all episodes. In addition, an episode may be alone in a process (``open``). ``open`` and
    the environments that it returns belong to one event loop.
    """

    def __init__(self, spec: EnvironmentSpec, workers: int) -> None:
        self.name = spec.name
        self._spec = spec
        self._shared_workers = WorkerPool(self._start_worker, workers)
        # Processes with one episode each, and the slots that bound their number.
        self._lone_workers: set[EnvironmentWorker] = set()
        self._lone_slots = asyncio.Semaphore(max(workers, os.cpu_count() or 1))
        self._is_closed = False

    async def open(self, *, alone: bool = False) -> RemoteEnvironment:
        """Return a new environment; ``alone``: in a process without other episodes.

        Raises EnvironmentFaultError if no process can be started, or if the pool is closed.
        """
        try:
            worker = await self._lone_worker() if alone else self._shared_workers.take()
        except (OSError, WorkerLostError) as error:
            raise EnvironmentFaultError(
                f"{self.name}: no process for an episode: {error}"
            ) from error
        return RemoteEnvironment(self, worker)

    async def _lone_worker(self) -> EnvironmentWorker:
        await self._lone_slots.acquire()
        try:
            if self._is_closed:
                raise EnvironmentFaultError(f"{self.name}: its processes were closed")
            worker = self._start_worker()
        except BaseException:
            self._lone_slots.release()
            raise
        self._lone_workers.add(worker)
        return worker

    def is_alone(self, worker: EnvironmentWorker) -> bool:
        """Whether the worker was started for one episode. Such a worker ends after this episode."""
        return worker in self._lone_workers

    def leave(self, worker: EnvironmentWorker) -> None:
        """Note that an episode of the worker has ended."""
        if self.is_alone(worker):
            self._lone_workers.remove(worker)
            worker.kill()
            self._lone_slots.release()
        else:
            self._shared_workers.release(worker)

    def close(self) -> None:
        """End the processes and cancel their work. A second call has no effect."""
        self._is_closed = True
        self._shared_workers.close()
        # The event loop's thread removes workers that have ended.
        for worker in list(self._lone_workers):
            worker.kill()

    def _start_worker(self) -> EnvironmentWorker:
        return EnvironmentWorker(self._spec)


class RemoteEnvironment(Environment):
    """An environment in a worker. ``reset`` and ``step`` raise EnvironmentFaultError, and no other exception."""

    def __init__(self, pool: EnvironmentPool, worker: EnvironmentWorker) -> None:
        self._pool, self._worker = pool, worker
        self._episode = next(worker.episodes)
        self._is_open = True

    async def reset(self, problem: Problem) -> Observation:
        return await self._answer("reset", {"problem": asdict(problem)}, observation_of)

    async def step(self, turn: Turn) -> Step:
        return await self._answer("step", asdict(turn), _step_of)

    async def _answer(self, operation: str, values: dict[str, Any], parse: Callable[[Any], T]) -> T:
        """Call an operation of the environment, and return its answer as ``parse`` converts it."""
        answer = await self._worker.request(operation, self._episode, values)
        try:
            return parse(answer)
        # A subclass of Step or ChatCall in the worker may have skipped the checks of the values.
        except (ArithmeticError, TypeError, ValueError) as error:
            raise EnvironmentFaultError(f"{self._pool.name}: {operation}: {error}") from error

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._pool.is_alone(self._worker):
                # Wait for the answer, because ``leave`` then ends the process.
                await self._worker.finish(self._episode)
            else:
                self._worker.send("close", self._episode)
        finally:
            self._pool.leave(self._worker)


class EnvironmentWorker(RestrictedWorker):
    """A process of environments, used from the event loop that created it.

    ``episodes`` yields the numbers of new episodes.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        super().__init__(
            _MODULE,
            asdict(spec),
            memory_gib=spec.memory_gib,
            variable_names=spec.variable_names,
            # The worker itself enforces ``largest_bytes``. Add room for the fault that replaces a larger answer.
            largest_answer=spec.largest_bytes + 4096,
        )
        self.episodes = itertools.count()
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._was_shared: bool | None = None
        self.ended.add_done_callback(self._note_end_in_loop)

    async def request(self, operation: str, episode: int, values: dict[str, Any]) -> Any:
        """Return the environment's answer. Raises EnvironmentFaultError."""
        await self._wait_until_ready()
        limit_s = self._spec.step_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._call(operation, episode, values)
        except TimeoutError:
            pass
        # Cancel the call, and so learn whether the process is blocked.
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self._call("cancel", episode, {})
        except TimeoutError:
            self.kill(f"no answer to {operation} within {limit_s:g} s, and none to anything else")
            raise self._fault_of_end() from None
        raise EnvironmentFaultError(
            f"{self._spec.name}: no answer to {operation} within {limit_s:g} s"
        )

    def send(self, operation: str, episode: int) -> None:
        """Send a message without waiting for its answer."""
        if not self.is_dead:
            message = {"operation": operation, "episode": episode}
            self._loop.run_in_executor(None, self.call, json.dumps(message).encode())

    async def finish(self, episode: int) -> None:
        """Wait until the episode's environment is closed, or until a time limit."""
        with contextlib.suppress(TimeoutError, EnvironmentFaultError):
            async with asyncio.timeout(_CANCEL_S):
                await self._call("close", episode, {})

    def kill(self, reason: str = "it was closed") -> None:
        self._note_end()
        super().kill(reason)

    async def _wait_until_ready(self) -> None:
        """Wait for the start of the process. Kill the process if the start takes too long.

        For a process that ended, this method does not raise: the next ``_call`` raises.
        """
        if self.ready.done():
            return
        start = asyncio.wrap_future(self.ready)
        start.add_done_callback(_read_exception)
        done, _ = await asyncio.wait([start], timeout=START_LIMIT_S)
        if not done:
            self.kill(f"it did not start in {START_LIMIT_S:g} s")

    async def _call(self, operation: str, episode: int, values: dict[str, Any]) -> Any:
        """Send a message and return the result in its answer. Raises EnvironmentFaultError."""
        message = {"operation": operation, "episode": episode, **values}
        content = json.dumps(message).encode()
        # Write in another thread: if the process does not read, the pipe fills and the write blocks.
        pending_answer = await self._loop.run_in_executor(None, self.call, content)
        try:
            answer = _read_json(await asyncio.wrap_future(pending_answer))
        except WorkerLostError:
            raise self._fault_of_end() from None
        # The content is no JSON, or nested too deeply.
        except (ValueError, RecursionError) as error:
            self.kill(f"its answer is no JSON: {error}")
            raise self._fault_of_end() from None
        if "fault" in answer:
            fault = answer["fault"]
            raise EnvironmentFaultError(f"{self._spec.name}: {fault}{self._withheld_hint(fault)}")
        return answer["result"]

    def _note_end_in_loop(self, _: Any) -> None:
        # If the loop is closed, the run has ended, and no request waits.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_end)

    def _note_end(self) -> None:
        """Store whether the process has several episodes at its end. Only the first call stores this, because the
        number of episodes then falls as the requests fail.

        A process that did not start counts as not shared, because no episode is at fault then.
        """
        if self._was_shared is None:
            is_started = self.ready.done() and self.ready.exception() is None
            self._was_shared = self.users > 1 and is_started

    def _fault_of_end(self) -> EnvironmentFaultError:
        """Return the fault of a process that has ended or was killed."""
        self._note_end()
        reason = self.killed_for
        if not reason:
            lost = self.ended.result()
            output = lost.output[-_MAX_OUTPUT:].strip()
            reason = str(lost)
            if output:
                reason += f": {output}"
            reason += self._withheld_hint(reason)
        return EnvironmentFaultError(
            f"{self._spec.name}: {reason}", is_shared=bool(self._was_shared)
        )

    def _withheld_hint(self, text: str) -> str:
        return withheld_hint(text, self._spec.variable_names, _PASSED_KEY)


def _read_exception(future: asyncio.Future[bytes]) -> None:
    """Read the exception of a future: asyncio logs an error about an exception that was never read."""
    if not future.cancelled():
        future.exception()


def _step_of(answer: dict[str, Any]) -> Step:
    return Step(**answer)


def _read_json(content: bytes) -> Any:
    """Decode JSON, and replace half a surrogate pair by a question mark: no tokenizer and no file accepts a half."""
    values = json.loads(content)
    # A worker's JSON is ASCII: it writes half a pair as an escape, for example ``\ud83d``.
    if rb"\ud" not in content:
        return values
    text = json.dumps(values, ensure_ascii=False)
    return json.loads(text.encode(errors="replace"))


class EnvironmentHost:
    """Serves the environments of a worker process. Each environment has the number of its episode."""

    def __init__(self, connection: CallConnection, spec: EnvironmentSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._environment_class = find_environment(spec.name)
        self._environments: dict[int, Environment] = {}
        # The newest reset or step of each episode, for ``cancel``.
        self._tasks: dict[int, asyncio.Task[None]] = {}

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
                self._tasks[episode] = task

    def _listen(self, loop: asyncio.AbstractEventLoop, calls: asyncio.Queue[WorkerCall]) -> None:
        """Receive calls, and end the process when the rank has closed the connection.

        The method runs in a thread, because an environment may block the event loop.
        """
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, self._connection.receive())
        except (EOFError, OSError):
            os._exit(0)

    async def _handle(
        self, call: WorkerCall, operation: str, episode: int, values: dict[str, Any]
    ) -> None:
        """Do the operation of a call and answer it."""
        try:
            result = await getattr(self, f"_{operation}")(episode, **values)
            answer = json.dumps({"result": result})
            if len(answer) > self._spec.largest_bytes:
                raise ValueError(
                    f"an answer of {len(answer)} bytes, expected at most {self._spec.largest_bytes}"
                )
        # After any exception of an environment, the run continues without this sample.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            line = f"({Path(frame.filename).name}, line {frame.lineno})"
            fault = f"{operation}: {type(error).__name__}: {str(error)[:_MAX_FAULT]} {line}"
            answer = json.dumps({"fault": fault})
        self._connection.answer(call, answer.encode())

    async def _reset(self, episode: int, problem: dict[str, Any]) -> str | dict[str, Any]:
        environment = self._environment_class(**self._spec.options)
        self._environments[episode] = environment
        policy_format = PolicyFormat(**self._spec.policy_format)
        note_settings(environment, self._spec.sampling, policy_format)
        ids = tuple(problem.pop("prompt_ids"))
        messages = tuple(problem.pop("messages"))
        tools = tuple(problem.pop("tools"))
        sent_problem = Problem(**problem, prompt_ids=ids, messages=messages, tools=tools)
        first_observation = await environment.reset(sent_problem)
        if isinstance(first_observation, str):
            return first_observation
        if not makes_prompts(self._spec.name, self._spec.options):
            raise TypeError("a prompt, expected text: makes_prompts of the class is not True")
        return _fields_of(first_observation, ChatCall)

    async def _step(self, episode: int, **values: Any) -> dict[str, Any]:
        ids = tuple(values.pop("token_ids"))
        step = await self._environments[episode].step(Turn(**values, token_ids=ids))
        answer = _fields_of(step, Step)
        if isinstance(step.observation, ChatCall):
            answer["observation"] = _fields_of(step.observation, ChatCall)
        return answer

    async def _cancel(self, episode: int) -> None:
        self._cancelled(episode)

    def _cancelled(self, episode: int) -> asyncio.Task[None] | None:
        """Cancel the episode's running call, and return its task; None if no call runs."""
        task = self._tasks.pop(episode, None)
        if task is not None:
            task.cancel()
        return task

    async def _close(self, episode: int) -> None:
        task = self._cancelled(episode)
        if task is not None:
            # The call ends before its environment is closed.
            await asyncio.wait([task], timeout=_CANCEL_S / 2)
        environment = self._environments.pop(episode, None)
        if environment is not None:
            await environment.close()


def _fields_of(value: Any, base: type[ChatCall | Step]) -> dict[str, Any]:
    """Return the fields of ``value`` that ``base`` declares: an environment's subclass may have more.

    Raises TypeError if ``value`` is no object of ``base``.
    """
    if not isinstance(value, base):
        raise TypeError(f"a {type(value).__name__}, expected a {base.__name__}")
    return {f.name: getattr(value, f.name) for f in fields(base)}


def main() -> None:
    """Serve in a child process.

    ``connect_restricted`` forks, and returns only in the child. The first process stays as the child's guard: it reaps
    the processes that the child's commands leave, and ends the child when the rank has closed the connection.
    """
    [descriptor] = sys.argv[1:]
    # Raise the limit of open files: a session of an agent has about five, and a worker has many sessions.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    # A final limit of memory could not be lifted for the commands of agents.
    connection, start, settings = connect_restricted(descriptor, is_final=False)
    asyncio.run(EnvironmentHost(connection, EnvironmentSpec(**settings)).serve(start))


if __name__ == "__main__":
    main()
