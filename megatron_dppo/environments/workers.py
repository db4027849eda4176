"""Worker processes of environments, so that an environment can harm neither the rank nor other workers.

``python -m megatron_dppo.environments.workers DESCRIPTOR`` receives ``{"spec", "variables"}``: the environments' class
and options, and the variables with keys that it may have. It answers ``null`` once it is ready. Then it answers objects
with a ``number`` by objects with the same number: ``{"number", "result"}``, or ``{"number", "fault"}`` for an exception
of the environment. Both directions are JSON. Many episodes run side by side in a worker, on one event loop.

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
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from operator import attrgetter
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
from megatron_dppo.rewards.verifier import START_LIMIT_S
from megatron_dppo.system import processes
from megatron_dppo.system.secret_variables import (
    chosen_variables,
    close_to_others,
    named_in_options,
    receive_passed,
    withheld_hint,
    worker_environment,
)

_MODULE = "megatron_dppo.environments.workers"
_CANCEL_S = 5.0
_ENDING_S = 5.0
_SHOWN = 2000
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
    """

    name: str
    options: dict[str, Any]
    step_timeout_s: float
    memory_gib: int = 4
    largest_bytes: int = 1 << 20
    passed_variables: Sequence[str] = ()

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
        self._shared: list[_Worker | None] = [None] * workers
        self._alone: set[_Worker] = set()
        self._lone_places = asyncio.Semaphore(max(workers, os.cpu_count() or 1))
        self._is_closed = False

    async def open(self, *, alone: bool = False) -> RemoteEnvironment:
        """Return a new environment; ``alone``: in a process without other episodes. Raises EnvironmentFaultError."""
        if alone:
            await self._lone_places.acquire()
            worker = _Worker(self._spec)
            self._alone.add(worker)
            return RemoteEnvironment(self, worker)
        usable = [w for w in self._shared if w is not None and not w.is_dead]
        if len(usable) < len(self._shared) and all(w.episodes for w in usable):
            index = next(i for i, w in enumerate(self._shared) if w is None or w.is_dead)
            worker = self._shared[index] = _Worker(self._spec)
            usable.append(worker)
        worker = min(usable, key=attrgetter("episodes"))
        return RemoteEnvironment(self, worker)

    def is_alone(self, worker: _Worker) -> bool:
        return worker in self._alone

    def leave(self, worker: _Worker) -> None:
        """End an episode of the worker."""
        worker.episodes -= 1
        if self.is_alone(worker):
            self._alone.remove(worker)
            worker.kill()
            self._lone_places.release()

    def close(self) -> None:
        """End the processes and cancel their work. A second call has no effect."""
        for worker in [*self._shared, *self._alone]:
            if worker is not None:
                worker.kill()


class RemoteEnvironment(Environment):
    """An environment in a worker. Every method except ``close`` raises EnvironmentFaultError, and nothing else."""

    def __init__(self, pool: EnvironmentPool, worker: _Worker) -> None:
        self._pool, self._worker = pool, worker
        self._episode = next(worker.numbers)
        self._is_open = True
        worker.episodes += 1

    async def reset(self, problem: Problem) -> Observation:
        return await self._answer("reset", {"problem": asdict(problem)}, observation_of)

    async def step(self, turn: Turn) -> Step:
        return await self._answer("step", asdict(turn), _step_of)

    async def _answer(self, operation: str, values: dict[str, Any], of: Callable[[Any], T]) -> T:
        answer = await self._worker.call(operation, self._episode, values)
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


class _Worker:
    """One process, used from the event loop that created it. ``episodes`` is its number of episodes."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.numbers = itertools.count()
        self.episodes = 0
        self.is_dead = False
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._sending = threading.Lock()
        self._ended_for, self._was_shared = "", False
        self._output = tempfile.NamedTemporaryFile("rb", prefix="environment-")  # noqa: SIM115  closed by the reader
        self._process, self._connection = processes.start_connected(
            _MODULE, environment=worker_environment(os.environ), output=self._output.fileno()
        )
        variables = chosen_variables(os.environ, spec.variable_names)
        # Send both through the pipe: every user can read the command line.
        self._send({"spec": asdict(spec), "variables": variables})
        threading.Thread(target=self._read, name="environment", daemon=True).start()

    async def call(self, operation: str, episode: int, values: dict[str, Any]) -> Any:
        if not self._ready.done():
            try:
                await asyncio.wait_for(asyncio.shield(self._ready), START_LIMIT_S)
            except TimeoutError:
                self.kill(f"it did not start in {START_LIMIT_S:g} s")
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
        """Send a message that needs no answer, without waiting."""
        if not self.is_dead:
            message = {"number": -1, "operation": operation, "episode": episode}
            self._loop.run_in_executor(None, self._send, message)

    async def finish(self, episode: int) -> None:
        """Wait until the episode's environment is closed, or until a time limit."""
        with contextlib.suppress(TimeoutError, EnvironmentFaultError):
            async with asyncio.timeout(_CANCEL_S):
                await self._ask("close", episode, {})

    def kill(self, reason: str = "it was closed") -> None:
        """End the process at once."""
        self._note_end(reason)
        processes.kill_families([self._process])

    async def _ask(self, operation: str, episode: int, values: dict[str, Any]) -> Any:
        if self.is_dead:
            raise self._lost()
        number = next(self.numbers)
        answer = self._calls[number] = self._loop.create_future()
        try:
            message = {"number": number, "operation": operation, "episode": episode, **values}
            # A process that does not read may fill the pipe, so don't block the loop.
            await self._loop.run_in_executor(None, self._send, message)
            return await answer
        finally:
            self._calls.pop(number, None)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(message).encode())
        # The reader thread notices the end, too, and reports it.
        except OSError:
            return

    def _read(self) -> None:
        try:
            while True:
                answer = _read_json(self._connection.recv_bytes(self._spec.largest_bytes + 4096))
                self._loop.call_soon_threadsafe(self._take, answer)
        # ValueError and RecursionError: the message is no JSON, or nested too deeply.
        except (EOFError, OSError, ValueError, RecursionError):
            try:
                # A process that ends by itself has an exit code.
                code = self._process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
            text = Path(self._output.name).read_text(errors="replace")[-_SHOWN:].strip()
            with self._sending:
                self._connection.close()
            self._output.close()
            reason = f"its process {processes.describe_exit(code)}" + (f": {text}" if text else "")
            reason += withheld_hint(reason, _PASSED_KEY)
            # At the end of a run no call waits, and the loop is closed.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._end, reason)

    def _take(self, answer: dict[str, Any] | None) -> None:
        if answer is None:
            if not self._ready.done():
                self._ready.set_result(None)
            return
        call = self._calls.get(answer["number"])
        if call is None or call.done():
            return
        if "fault" in answer:
            fault = f"{answer['fault']}{withheld_hint(answer['fault'], _PASSED_KEY)}"
            call.set_exception(EnvironmentFaultError(f"{self._spec.name}: {fault}"))
        else:
            call.set_result(answer["result"])

    def _end(self, reason: str) -> None:
        self._note_end(reason)
        if not self._ready.done():
            self._ready.set_result(None)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._lost())

    def _note_end(self, reason: str) -> None:
        if not self.is_dead:
            self.is_dead, self._ended_for = True, reason
            # Store this now: later the process has fewer episodes, any of which may be at fault. None is where it did
            # not start.
            self._was_shared = self.episodes > 1 and self._ready.done()

    def _lost(self) -> EnvironmentFaultError:
        return EnvironmentFaultError(
            f"{self._spec.name}: {self._ended_for}", is_shared=self._was_shared
        )


def _step_of(answer: dict[str, Any]) -> Step:
    return Step(**answer)


def _read_json(content: bytes) -> Any:
    """Decode JSON, and replace half of a surrogate pair, which no tokenizer and no file takes, by a question mark."""
    values = json.loads(content)
    if rb"\ud" not in content:
        return values
    return json.loads(json.dumps(values, ensure_ascii=False).encode(errors="replace"))


class _Host:
    """The environments of a worker process, by the number of their episode."""

    def __init__(self, connection: Connection, spec: EnvironmentSpec) -> None:
        self._connection, self._spec = connection, spec
        self._make = find_environment(spec.name)
        self._environments: dict[int, Environment] = {}
        self._under_way: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer messages until the rank closes the connection."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[bytes]()
        threading.Thread(target=self._listen, args=(loop, messages), daemon=True).start()
        self._reply(None)
        while True:
            message = json.loads(await messages.get())
            episode = message["episode"]
            task = asyncio.create_task(self._handle(message))
            if message["operation"] in ("reset", "step"):
                self._under_way[episode] = task

    def _listen(self, loop: asyncio.AbstractEventLoop, messages: asyncio.Queue[bytes]) -> None:
        """Read messages in a thread: an environment may block the loop, and the process must still end with the
        rank.
        """
        try:
            while True:
                loop.call_soon_threadsafe(messages.put_nowait, self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    async def _handle(self, message: dict[str, Any]) -> None:
        number, episode = message.pop("number"), message.pop("episode")
        operation = message.pop("operation")
        try:
            result = await getattr(self, f"_{operation}")(episode, **message)
            answer = {"number": number, "result": result}
            size = len(json.dumps(answer))
            if size > self._spec.largest_bytes:
                raise ValueError(
                    f"an answer of {size} bytes, expected at most {self._spec.largest_bytes}"
                )
        # The run continues without this sample, whatever the exception.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            line = f"({Path(frame.filename).name}, line {frame.lineno})"
            fault = f"{operation}: {type(error).__name__}: {str(error)[:_LONGEST_FAULT]} {line}"
            answer = {"number": number, "fault": fault}
        if number >= 0:
            self._reply(answer)

    def _reply(self, answer: dict[str, Any] | None) -> None:
        self._connection.send_bytes(json.dumps(answer).encode())

    async def _reset(self, episode: int, problem: dict[str, Any]) -> str | dict[str, Any]:
        environment = self._make(**self._spec.options)
        self._environments[episode] = environment
        ids = tuple(problem.pop("prompt_ids"))
        messages, tools = tuple(problem.pop("messages")), tuple(problem.pop("tools"))
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
        if (environment := self._environments.pop(episode, None)) is not None:
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
    close_to_others()
    # The rank handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A session of an agent has about five open files.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    connection = processes.connect_guarded(int(descriptor))
    start = json.loads(connection.recv_bytes())
    receive_passed(start["variables"])
    spec = EnvironmentSpec(**start["spec"])
    processes.bound_memory(spec.memory_gib, is_final=False)
    asyncio.run(_Host(connection, spec).serve())


if __name__ == "__main__":
    main()
