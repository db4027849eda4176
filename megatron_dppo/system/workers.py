"""Worker processes: a module that runs in a separate process and answers numbered calls.

``WorkerProcess`` starts ``python -m MODULE DESCRIPTOR`` and sends calls to it; ``WorkerPool`` shares several workers
among their users. In the started process, ``connect`` forks: the child becomes the worker, and the parent becomes its
guard. The guard kills all processes below it when the worker has ended or the caller is gone.

A message has two frames: the number of the call in 8 bytes, and a content in a form that the module defines. Call 0 is
the start: its content has the worker's settings, and its answer means that the worker is ready. No content is
unpickled.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import IO, Any, Generic, TypeVar

from megatron_dppo.system.processes import (
    bound_memory,
    continue_guarded,
    describe_exit,
    kill_families,
    start_process,
)
from megatron_dppo.system.secret_variables import (
    chosen_variables,
    close_to_others,
    receive_passed,
    worker_environment,
)

# Longest time for a worker to import its module. It is long because a machine starts many workers at once.
START_LIMIT_S = 300.0
# Longest wait for the exit code of a worker that has closed its connection.
_ENDING_S = 5.0
_NUMBER_BYTES = 8
# Characters of a worker's output that a WorkerLostError has.
_LONGEST_OUTPUT = 4000


class WorkerLostError(Exception):
    """A worker's process has ended, or was killed.

    Attributes:
        code: exit code of the process; negative for a signal.
        output: the end of its output; empty for a process that was started with a descriptor for its output.
    """

    def __init__(self, reason: str, code: int, output: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.output = output


class WorkerProcess:
    """A started worker. Its methods may be called from any thread; calls are answered in any order.

    Args:
        module: the worker's module.
        start: content of call 0.
        environment: all environment variables of the worker.
        output: descriptor for standard output and error. None: they go to a temporary file, whose last lines the
            WorkerLostError quotes.
        largest_answer: largest number of bytes of an answer; a larger answer ends the worker. None: not limited.

    Attributes:
        pid: id of the guard.
        ready: the answer to call 0.
        ended: gets the WorkerLostError when the process has ended.
        users: number of the worker's users in a WorkerPool.
        killed_for: reason why the worker was killed; empty if it was not killed.
        is_used: whether the worker has received a call after call 0.
    """

    def __init__(
        self,
        module: str,
        start: bytes,
        *,
        environment: Mapping[str, str],
        output: int | None = None,
        largest_answer: int | None = None,
    ) -> None:
        self.users = 0
        self.is_used = False
        self.killed_for = ""
        self.ended: Future[WorkerLostError] = Future()
        self._output: IO[bytes] | None = None
        if output is None:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in _finish
            output = self._output.fileno()
        self._largest_answer = largest_answer
        self._connection, worker_end = Pipe()
        with worker_end:
            descriptor = worker_end.fileno()
            self._process = start_process(
                [sys.executable, "-m", module, str(descriptor)],
                environment=environment,
                output=output,
                # The worker ends when its connection is closed. The thread that starts it may end long before.
                dies_with_thread=False,
                inherited=[descriptor],
            )
        self.pid = self._process.pid
        self._calls: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count()
        self._changing = threading.Lock()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="worker", daemon=True).start()
        self.ready = self.call(start)

    @property
    def is_dead(self) -> bool:
        """Whether the process was killed, or has ended."""
        return bool(self.killed_for) or self._process.poll() is not None

    def call(self, content: bytes) -> Future[bytes]:
        """Send a call and return the future of its answer. The future raises WorkerLostError if the worker ends first.

        If the pipe is full, this method blocks until the worker reads.
        """
        answer: Future[bytes] = Future()
        with self._changing:
            if self.ended.done():
                answer.set_exception(self.ended.result())
                return answer
            number = next(self._numbers)
            self.is_used = number > 0
            self._calls[number] = answer
        # If the worker has ended, the reader thread notices it too and sets the exception of the answer.
        with contextlib.suppress(OSError), self._sending:
            _send(self._connection, number, content)
        return answer

    def ask(self, content: bytes, limit_s: float | None = None) -> bytes:
        """Send a call and wait for its answer.

        Raises:
            TimeoutError: there was no answer within ``limit_s`` seconds after the call was sent; the worker is killed.
            WorkerLostError: the worker has ended.
        """
        try:
            return self.call(content).result(limit_s)
        except TimeoutError:
            self.kill(f"no answer within {limit_s:g} s")
            raise

    def kill(self, reason: str = "it was closed") -> None:
        """Kill the process and all processes below it. If it is called several times, the first reason counts."""
        if not self.ended.done() and not self.killed_for:
            self.killed_for = reason
        kill_families([self._process])

    def _read(self) -> None:
        try:
            while True:
                number, content = _receive(self._connection, self._largest_answer)
                with self._changing:
                    answer = self._calls.pop(number, None)
                # Ignore a number without a call: foreign code in the worker may have sent it.
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_result(content)
        except (EOFError, OSError):
            self._finish()

    def _finish(self) -> None:
        # Wait first: if the process ends by itself, the kill below must not replace its exit code.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        # The guard may have died before its child processes: kill these too.
        kill_families([self._process])
        output = ""
        if self._output is not None:
            self._output.seek(0)
            output = self._output.read().decode(errors="replace")[-_LONGEST_OUTPUT:]
            self._output.close()
        with self._sending:
            self._connection.close()
        code = self._process.returncode
        reason = self.killed_for or f"its process {describe_exit(code)}"
        error = WorkerLostError(reason, code, output)
        with self._changing:
            unanswered_calls = list(self._calls.values())
            self._calls.clear()
            self.ended.set_result(error)
        for answer in unanswered_calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)


class RestrictedWorker(WorkerProcess):
    """A worker that runs code of a user or of a model, with a limit of memory.

    Of the run's keys it gets only those in ``variable_names``.

    Args:
        module: the worker's module. Its ``main`` calls ``connect_restricted`` first.
        settings: the module's settings. They are sent as JSON.
        memory_gib: largest address space in GiB.
        variable_names: names of the environment variables with keys that the worker gets.
        largest_answer: as in WorkerProcess.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        memory_gib: int,
        variable_names: Sequence[str],
        largest_answer: int | None = None,
    ) -> None:
        # Send the start through the pipe, because every user can read the command line.
        start = {
            "settings": settings,
            "memory_gib": memory_gib,
            "variables": chosen_variables(os.environ, variable_names),
        }
        super().__init__(
            module,
            json.dumps(start).encode(),
            environment=worker_environment(os.environ),
            largest_answer=largest_answer,
        )


W = TypeVar("W", bound=WorkerProcess)


class WorkerPool(Generic[W]):
    """Up to ``size`` workers, shared by their users. Its methods may be called from any thread.

    Args:
        start: starts a worker.
        size: largest number of workers that are alive at the same time.
    """

    def __init__(self, start: Callable[[], W], size: int) -> None:
        self._start = start
        self._size = size
        self._lock = threading.Lock()
        self._is_closed = False
        self.workers: list[W] = []

    def fill(self) -> None:
        """Start workers until there are ``size`` workers."""
        with self._lock:
            while len(self.workers) < self._size:
                self.workers.append(self._start())

    def take(self) -> W:
        """Return a worker for one more user, who calls ``release`` afterwards.

        If all workers have users and there are fewer than ``size`` workers, the result is a new worker. Otherwise it is
        the worker with the fewest users. Raises WorkerLostError in a closed pool.
        """
        with self._lock:
            if self._is_closed:
                raise WorkerLostError("the pool was closed", 0)
            self._remove_dead()
            if len(self.workers) < self._size and all(worker.users for worker in self.workers):
                self.workers.append(self._start())
            worker = min(self.workers, key=attrgetter("users"))
            worker.users += 1
            return worker

    def replace(self, worker: W) -> W:
        """Return a new worker for a user of the dead ``worker``. In a closed pool, return ``worker`` itself.

        If several users shared the dead worker, each of them gets a separate new worker. So the pool may grow beyond
        ``size`` workers if it has more than ``size`` users.
        """
        with self._lock:
            if self._is_closed:
                return worker
            self._remove_dead()
            fresh_worker = self._start()
            self.workers.append(fresh_worker)
            worker.users -= 1
            fresh_worker.users += 1
            return fresh_worker

    def release(self, worker: W) -> None:
        """Note that a user has left the worker."""
        with self._lock:
            worker.users -= 1

    def close(self) -> None:
        """Kill all workers. A second call has no effect."""
        with self._lock:
            self._is_closed = True
        for worker in self.workers:
            worker.kill()

    def _remove_dead(self) -> None:
        for worker in [w for w in self.workers if w.is_dead]:
            self.workers.remove(worker)


# The functions below run in the worker process.


@dataclass(frozen=True)
class WorkerCall:
    """A call that a worker has received."""

    number: int
    content: bytes


class CallConnection:
    """The worker's end of the connection, to ``receive`` calls and ``answer`` them in any order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def receive(self) -> WorkerCall:
        """Wait for the next call. Raises EOFError or OSError if the caller has closed the connection or has ended."""
        return WorkerCall(*_receive(self._connection))

    def answer(self, call: WorkerCall, content: bytes) -> None:
        with self._sending:
            _send(self._connection, call.number, content)


def connect(descriptor: str) -> CallConnection:
    """Fork: return the worker's end of the connection in the child, while this process becomes the guard.

    Processes that the worker starts or forks do not have the connection. The worker ignores SIGINT: after Ctrl-C the
    caller ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(descriptor))
    os.set_inheritable(connection.fileno(), False)
    continue_guarded(connection.fileno())
    # Forks of the worker close the connection. A fork of such a fork calls ``close`` again. The second call has no
    # effect, so it can't close another file that has got the same descriptor number.
    os.register_at_fork(after_in_child=connection.close)
    return CallConnection(connection)


def connect_restricted(
    descriptor: str, *, is_final: bool
) -> tuple[CallConnection, WorkerCall, Any]:
    """Connect the process of a RestrictedWorker; return the connection, call 0 and the settings.

    ``is_final``: whether the limit of memory also applies to the processes that the worker starts.
    """
    close_to_others()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = connect(descriptor)
    call = connection.receive()
    start = json.loads(call.content)
    receive_passed(start["variables"])
    bound_memory(start["memory_gib"], is_final=is_final)
    return connection, call, start["settings"]


def _send(connection: Connection, number: int, content: bytes) -> None:
    connection.send_bytes(number.to_bytes(_NUMBER_BYTES))
    connection.send_bytes(content)


def _receive(connection: Connection, largest: int | None = None) -> tuple[int, bytes]:
    number = int.from_bytes(connection.recv_bytes(_NUMBER_BYTES))
    return number, connection.recv_bytes(largest)
