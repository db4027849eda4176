"""Scores of responses, from worker processes that check each under a hard time limit.

A check that runs away cannot be interrupted from within: math-verify's own limit needs the main
thread, and neither a regular expression nor an integer power looks up while it runs. So a check
runs in a process, and the process is killed.

That process, ``python -m megatron_dppo.rewards.verifier DESCRIPTOR NAME LIMIT``, says None on its connection once it is
ready, and answers each ``(response, answer)`` with a number, or with a string: why the reward refused it (a
ValueError), or that what it returned is no score. Imports the reward and nothing heavier. Any other
exception of the reward ends the process with its traceback.

Checks run in a child. What a check starts ends with the check, whatever session or parent it took;
what the reward's module started while it was imported lives as long as the worker. The guard, its
parent, ends all of it when the child dies, or when nobody is left to read an answer.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NoReturn

from megatron_dppo.rewards import find_reward, score_or_refusal
from megatron_dppo.system import processes
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import kill_families, start_connected

# Longest time for a worker to import its reward; long, because machines start many at once.
START_LIMIT_S = 300.0
Pair = tuple[str, str]
"""(response, answer)."""
OnScore = Callable[[], None]


class VerifierError(RunError):
    """The reward function raised, or its worker could not start; the message holds the worker's output."""


@dataclass(frozen=True)
class Score:
    """The result of one check.

    ``timed_out``: the check was killed at the time limit. ``crashed``: the operating system ended it, for one because
    it asked for too much memory. ``refusal``: why the reward gave no score. In each case ``value`` is 0.
    """

    value: float
    timed_out: bool = False
    crashed: bool = False
    refusal: str | None = None

    @classmethod
    def of(cls, reply: float | str) -> Score:
        return cls(0.0, refusal=reply) if isinstance(reply, str) else cls(reply)


class Verifier:
    """``with Verifier("math_verify", timeout_s=10, workers=2) as verifier: verifier.score(pairs)``.

    ``timeout_s``: wall-clock seconds for one check, from the moment a worker has it. ``workers``:
    processes, started on entry and restarted after a kill; a reward that runs inline has none.
    ``timeouts`` and ``crashes`` count over the verifier's life. Callable from any thread.
    """

    def __init__(self, name: str, timeout_s: float, workers: int) -> None:
        if timeout_s <= 0 or workers < 1:
            raise ValueError(
                f"a verifier needs timeout_s > 0 and workers >= 1, got {timeout_s} and {workers}"
            )
        self._name, self._timeout_s = name, timeout_s
        self._reward = find_reward(name)
        self._count = 0 if self._reward.runs_inline else workers
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[int] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.timeouts = 0
        self.crashes = 0

    def __enter__(self) -> Verifier:
        if self._count:
            self._workers = [_Worker(self._name, self._timeout_s) for _ in range(self._count)]
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="rewards")
            for index in range(self._count):
                self._idle.put(index)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        for worker in self._workers:
            worker.kill()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._workers = []

    def submit(self, pair: Pair) -> Future[Score]:
        """Check a pair while the caller goes on; at once, and here, where the reward runs inline.

        Where the reward refuses it, the ``Score`` says why. The future raises VerifierError where the reward raises
        anything but a ValueError, or a worker can't start.
        """
        if self._reward.runs_inline:
            future: Future[Score] = Future()
            try:
                future.set_result(Score.of(score_or_refusal(self._reward.load(), *pair)))
            except Exception as error:
                future.set_exception(error)
            return future
        with self._lock:
            if self._threads is None:
                raise ValueError("the verifier is not open; use it in a with statement")
            return self._threads.submit(self._score_in_worker, pair)

    def check(self, pairs: Sequence[Pair], on_score: OnScore = lambda: None) -> list[Score]:
        """As ``submit``, of several in order. ``on_score``: called as each is there."""
        futures = [self.submit(pair) for pair in pairs]
        scores = []
        try:
            for future in futures:
                scores.append(future.result())
                on_score()
            return scores
        finally:
            for future in futures:
                future.cancel()

    def score(self, pairs: Sequence[Pair], on_score: OnScore = lambda: None) -> list[Score]:
        """As ``check``. Raises VerifierError where the reward function raises or returns anything but a
        number in [0, 1]: that is a fault of the program or of the data, no wrong answer."""
        scores = self.check(pairs, on_score)
        self.require(scores, pairs)
        return scores

    def require(self, scores: Sequence[Score], pairs: Sequence[Pair]) -> None:
        for score, (response, answer) in zip(scores, pairs, strict=True):
            if score.refusal is not None:
                raise VerifierError(
                    f"reward {self._name}: {score.refusal}; response {_shorten(response)}, answer {_shorten(answer)}"
                )

    def _score_in_worker(self, pair: Pair) -> Score:
        index = self._idle.get()
        worker = self._workers[index]
        try:
            score = worker.score(pair)
        finally:
            with self._lock:
                # A verifier that was closed meanwhile starts nothing more.
                if worker.is_dead and self._threads is not None:
                    worker.close()
                    self._workers[index] = _Worker(self._name, self._timeout_s)
            self._idle.put(index)
        with self._lock:
            self.timeouts += score.timed_out
            self.crashes += score.crashed
        return score


def _shorten(text: str) -> str:
    return ascii(text) if len(text) <= 60 else ascii(text[:57]) + "..."


class _Worker:
    """One process, which checks one pair at a time; ``is_dead`` once it was killed or has ended."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._process, self._connection = start_connected(
            "megatron_dppo.rewards.verifier",
            name,
            str(timeout_s),
            environment=os.environ,
            output=self._output.fileno(),
        )
        self._is_ready = False
        self.is_dead = False

    def score(self, pair: Pair) -> Score:
        """The score of a pair; the clock starts when the process is ready and has it."""
        try:
            if not self._is_ready:
                if not self._connection.poll(START_LIMIT_S):
                    self.kill()
                    raise VerifierError(
                        f"a {self._name} worker did not start in {START_LIMIT_S:g} s"
                    )
                self._connection.recv()
                self._is_ready = True
            self._connection.send(pair)
            if not self._connection.poll(self._timeout_s):
                self.kill()
                return Score(0.0, timed_out=True)
            return Score.of(self._connection.recv())
        except (EOFError, OSError):
            return self._ended()

    def kill(self) -> None:
        """End the process at once."""
        self.is_dead = True
        kill_families([self._process])

    def close(self) -> None:
        """Give back what a dead worker had."""
        self._connection.close()
        self._output.close()

    def _ended(self) -> Score:
        code = self._process.wait()
        self.kill()
        if code >= 0 or not self._is_ready:
            self._output.seek(0)
            output = self._output.read().decode(errors="replace")[-4000:]
            raise VerifierError(f"a {self._name} worker ended with exit code {code}:\n{output}")
        # The worker's own alarm rings where this process was too slow to kill it.
        is_late = code == -signal.SIGALRM
        return Score(0.0, timed_out=is_late, crashed=not is_late)


# Address space of a worker: a number with 10^9 digits must not take the node's memory.
MEMORY_BYTES = 4 << 30
# How much later than the verifier the worker ends itself, should nobody be left to kill it.
GRACE_S = 5.0


def serve(connection: Connection, name: str, timeout_s: float) -> None:
    """Answer until nobody is left to ask."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is the verifier's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    function = find_reward(name).load()
    helpers = processes.child_ids()
    connection.send(None)
    while True:
        try:
            response, answer = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        # SIGALRM's default action ends the process, whatever the reward does.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        reply = score_or_refusal(function, response, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        processes.kill_children(spared=helpers)
        connection.send(reply)


def guard(child: int, connection: Connection) -> NoReturn:
    """Wait until ``child`` ends, or whoever asks has gone; then end what is below, and end as it did."""
    ends = select.poll()
    # Without an event this tells only that the other side is closed; what it sends is the child's to read.
    ends.register(connection.fileno(), 0)
    ends.register(os.pidfd_open(child), select.POLLIN)
    ends.poll()
    ended, status = os.waitpid(child, os.WNOHANG)
    processes.kill_descendants()
    code = os.waitstatus_to_exitcode(status) if ended else 0
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def main() -> None:
    """Serve in a child, under this process as its guard."""
    descriptor, name, timeout_s = sys.argv[1:]
    connection = Connection(int(descriptor))
    # No process that the reward starts may answer.
    os.set_inheritable(connection.fileno(), False)
    guarding = os.getpid()
    processes.adopt_orphans()
    if (child := os.fork()) != 0:
        guard(child, connection)
    processes.die_with_parent(guarding)
    serve(connection, name, float(timeout_s))


if __name__ == "__main__":
    main()
