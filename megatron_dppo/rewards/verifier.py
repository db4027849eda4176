"""Scores for many responses at once, in worker processes, each check under a hard time limit.

A check that runs away cannot be interrupted from within: math-verify's own limit needs the main
thread, and neither a regular expression nor an integer power looks up while it runs. So a check
runs in a process, and the process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from megatron_dppo.rewards.registry import find_reward, score_or_refusal
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import kill_families, start_process

START_LIMIT_S = 300.0
"""Longest time for a worker to import its reward; long, because machines start many at once."""


class VerifierError(RunError):
    """The reward function raised, or its worker could not start; the message holds the worker's
    output.
    """


@dataclass(frozen=True)
class Score:
    """The result of one check.

    ``timed_out``: the check was killed at the time limit. ``crashed``: the operating system ended
    it, for one because it asked for too much memory. ``refusal``: why the reward gave no score.
    In each case ``value`` is 0.
    """

    value: float
    timed_out: bool = False
    crashed: bool = False
    refusal: str | None = None

    @classmethod
    def of(cls, reply: float | str) -> Score:
        """A score, or a refusal in words."""
        return cls(0.0, refusal=reply) if isinstance(reply, str) else cls(reply)


class Verifier:
    """``with Verifier("math_verify", timeout_s=10, workers=2) as verifier: verifier.score(pairs)``.

    ``timeout_s``: wall-clock seconds for one check, from the moment a worker has it. ``workers``:
    processes, started on entry and restarted after a kill; a reward that runs inline has none.
    ``timeouts`` and ``crashes`` count over the verifier's life. ``score`` may be called from any
    thread; calls take turns.
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
        self._lock = threading.Lock()
        self.timeouts = 0
        self.crashes = 0

    def __enter__(self) -> Verifier:
        self._workers = [_Worker(self._name, self._timeout_s) for _ in range(self._count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    @property
    def runs_inline(self) -> bool:
        """Whether the reward is checked in the caller's thread, within microseconds."""
        return self._reward.runs_inline

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """One ``Score`` for each ``(response, answer)``, in the same order.

        Raises VerifierError where the reward function raises or returns anything but a number in
        [0, 1]: that is a fault of the program or of the data, no wrong answer.
        """
        scores = self.check(pairs)
        self.require(scores, pairs)
        return scores

    def require(self, scores: Sequence[Score], pairs: Sequence[tuple[str, str]]) -> None:
        """Raise VerifierError where a score is a refusal, as ``score`` does."""
        for score, (response, answer) in zip(scores, pairs, strict=True):
            if score.refusal is not None:
                raise VerifierError(
                    f"reward {self._name}: {score.refusal}; response {_shorten(response)}, "
                    f"answer {_shorten(answer)}"
                )

    def check(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """As ``score``, but where the reward refuses a pair its ``Score`` says why."""
        if self._reward.runs_inline:
            function = self._reward.load()
            return [Score.of(score_or_refusal(function, *pair)) for pair in pairs]
        if not self._workers:
            raise ValueError("the verifier is not open; use it in a with statement")
        with self._lock:
            scores = self._score_in_workers(pairs)
            self.timeouts += sum(s.timed_out for s in scores)
            self.crashes += sum(s.crashed for s in scores)
        return scores

    def _score_in_workers(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        waiting = deque(enumerate(pairs))
        scores: dict[int, Score] = {}
        while len(scores) < len(pairs):
            for worker in self._workers:
                if waiting and worker.idle:
                    worker.begin(*waiting.popleft())
            for position, (task, score) in self._next_scores():
                scores[task] = score
                if score.timed_out or score.crashed:
                    self._workers[position] = _Worker(self._name, self._timeout_s)
        return [scores[i] for i in range(len(pairs))]

    def _next_scores(self) -> Iterator[tuple[int, tuple[int, Score]]]:
        """Wait until a worker answers or runs out of time; (worker, (task, score)) of each done."""
        active = [(i, worker) for i, worker in enumerate(self._workers) if not worker.idle]
        with selectors.DefaultSelector() as selector:
            for _, worker in active:
                selector.register(worker.answers, selectors.EVENT_READ)
            nearest = min(worker.deadline for _, worker in active)
            selector.select(max(0.0, nearest - time.monotonic()))
        for i, worker in active:
            done = worker.poll()
            if done is not None:
                yield i, done


def _shorten(text: str) -> str:
    return ascii(text) if len(text) <= 60 else ascii(text[:57]) + "..."


class _Worker:
    """One process: starting, idle, or busy with a task; ``deadline`` bounds all but idleness."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in kill()
        # It ends with its standard input: the thread that scores may end long before this process.
        self._process = start_process(
            [sys.executable, "-m", "megatron_dppo.rewards.worker", name, str(timeout_s)],
            environment=os.environ,
            stdin=subprocess.PIPE,
            output=subprocess.PIPE,
            errors=self._output.fileno(),
            dies_with_thread=False,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._questions, self.answers = self._process.stdin, self._process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self._started = False
        self._task: int | None = None
        self._line = b""
        self.deadline = time.monotonic() + START_LIMIT_S

    @property
    def idle(self) -> bool:
        """Started, and at no task."""
        return self._started and self._task is None

    def begin(self, task: int, pair: tuple[str, str]) -> None:
        """Hand ``pair`` to the process; its clock starts now."""
        self._task = task
        with contextlib.suppress(BrokenPipeError):  # it died while idle: poll() finds out
            self._questions.write(json.dumps(pair).encode() + b"\n")
        self.deadline = time.monotonic() + self._timeout_s

    def poll(self) -> tuple[int, Score] | None:
        """The task and its score, where it is done, out of time or dead. Never waits."""
        while (chunk := self.answers.read(4096)) is not None:
            if not chunk:
                return self._died()
            self._line += chunk
        if self._line.endswith(b"\n"):
            line, self._line = self._line, b""
            if self._started:
                return self._finish(Score.of(json.loads(line)))
            self._started = True
        elif time.monotonic() >= self.deadline:
            self.kill()
            if not self._started:
                raise VerifierError(f"a {self._name} worker did not start in {START_LIMIT_S:g} s")
            return self._finish(Score(0.0, timed_out=True))
        return None

    def kill(self) -> None:
        """End the process at once, and its output with it."""
        kill_families([self._process])
        self._questions.close()
        self.answers.close()
        self._output.close()

    def _finish(self, score: Score) -> tuple[int, Score]:
        assert self._task is not None
        task, self._task = self._task, None
        return task, score

    def _died(self) -> tuple[int, Score]:
        code = self._process.wait()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")[-4000:]
        self.kill()
        if code >= 0 or not self._started:
            raise VerifierError(f"a {self._name} worker ended with exit code {code}:\n{output}")
        return self._finish(
            Score(0.0, timed_out=code == -signal.SIGALRM, crashed=code != -signal.SIGALRM)
        )


# Scores of responses while others are still being generated.

Pair = tuple[str, str]
"""(response, answer)."""


class ArrivalScorer:
    """Has ``verifier`` check what is added: at once where it needs no other process, else in a thread that lives as
    long as there is work."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._waiting: list[tuple[Pair, Future[Score]]] = []
        self._works = False
        self._lock = threading.Lock()

    def add(self, pair: Pair) -> Future[Score]:
        """Return at once. The future raises what ``Verifier.check`` raises."""
        future: Future[Score] = Future()
        if self._verifier.runs_inline:
            self._check([(pair, future)])
            return future
        with self._lock:
            self._waiting.append((pair, future))
            if self._works:
                return future
            self._works = True
        threading.Thread(target=self._work, name="rewards", daemon=True).start()
        return future

    def require(self, scores: Sequence[Score], pairs: Sequence[Pair]) -> None:
        """Raise VerifierError where a score is a refusal."""
        self._verifier.require(scores, pairs)

    def _work(self) -> None:
        while True:
            with self._lock:
                taken, self._waiting = self._waiting, []
                self._works = bool(taken)
            if not taken:
                return
            self._check(taken)

    def _check(self, taken: Sequence[tuple[Pair, Future[Score]]]) -> None:
        try:
            scores = self._verifier.check([pair for pair, _ in taken])
        except BaseException as error:  # whoever waits for the score gets it
            for _, future in taken:
                future.set_exception(error)
            return
        for (_, future), score in zip(taken, scores, strict=True):
            future.set_result(score)
