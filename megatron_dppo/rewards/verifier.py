"""Scores of responses, from worker processes that check each under a hard time limit.

A check that runs away cannot be interrupted from within: math-verify's own limit needs the main
thread, and neither a regular expression nor an integer power looks up while it runs. So a check
runs in a process, and the process is killed.

That process, ``python -m megatron_dppo.rewards.verifier DESCRIPTOR``, is sent a JSON object (its reward's name and
options, its limits, and the variables that hold keys which it is to have), says on its connection
how its reward is called (RewardForm) once it is ready, and answers each number and list of RewardInputs with the number
and a Score for each: a value and what goes with it; or why the reward refused it (a ValueError), could not be had
(RewardUnavailableError, OSError, errors of clients that are known here), or returned what is no score. It answers in
JSON: nothing is unpickled that comes from where responses may be run. Imports the reward and nothing heavier. Any other
exception of the reward ends the process with its traceback.

Checks run in a child. What a check starts ends with the check, whatever session or parent it took;
what the reward's module started while it was imported lives as long as the worker. The guard, its
parent, ends all of it when the child dies, or when nobody is left to read an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from megatron_dppo.rewards import (
    BoundReward,
    RewardForm,
    RewardInput,
    RewardUnavailableError,
    find_reward,
    result_of,
)
from megatron_dppo.system import processes
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import kill_families, start_connected
from megatron_dppo.system.secret_variables import (
    chosen_variables,
    close_to_others,
    named_in_options,
    receive_passed,
    withheld_hint,
    worker_environment,
)

if TYPE_CHECKING:
    from megatron_dppo.config.data_schema import OnTimeout, RewardTerm

# Longest time for a worker to import its reward; long, because machines start many at once.
START_LIMIT_S = 300.0
_PACKAGE = Path(__file__).parents[1]
BACK_OFF_S = 0.5
"""Before the second attempt at a reward that could not be had; doubled for each further one."""
LONGEST_BACK_OFF_S = 60.0
_LONGEST_REFUSAL = 200
OnScore = Callable[[], None]


class VerifierError(RunError):
    """The reward function raised, or its worker could not start; the message holds the worker's output."""


@dataclass(frozen=True)
class Score:
    """The result of one check.

    ``timed_out``: the check was killed at the time limit. ``crashed``: the operating system ended it, for one because
    it asked for too much memory. ``refusal``: why the reward gave no score. In each case ``value`` is 0.
    ``unavailable``: why no reward could be had; ``value`` is NaN then, and nobody may use it.
    ``components``, ``reason``: as RewardResult.
    """

    value: float
    timed_out: bool = False
    crashed: bool = False
    refusal: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    unavailable: str | None = None

    @classmethod
    def of(cls, value: Any) -> Self:
        """Of what a reward returned."""
        result = result_of(value)
        if isinstance(result, str):
            return cls(0.0, refusal=result)
        return cls(result.value, components=result.components, reason=result.reason)

    @classmethod
    def unhad(cls, reason: str) -> Self:
        return cls(math.nan, unavailable=reason)


class Verifier:
    """``with Verifier("math_verify", timeout_s=10, workers=2) as verifier: verifier.score(inputs)``.

    ``timeout_s``: wall-clock seconds for one call, from the moment a worker has it. ``workers``:
    processes, started on entry and restarted after a kill; a reward that runs inline has none. ``options``,
    ``batch_size``, ``attempts``, ``on_timeout``, ``memory_gib``, ``passed_variables``: as in RewardTerm. Callable from
    any thread.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        workers: int,
        *,
        options: Mapping[str, Any] | None = None,
        batch_size: int = 1,
        attempts: int = 1,
        on_timeout: OnTimeout = "zero",
        memory_gib: int = 4,
        passed_variables: Sequence[str] = (),
    ) -> None:
        if timeout_s <= 0 or workers < 1:
            raise ValueError(
                f"a verifier needs timeout_s > 0 and workers >= 1, got {timeout_s} and {workers}"
            )
        self._name, self._timeout_s = name, timeout_s
        self._options = dict(options or {})
        self._batch_size, self._attempts, self._on_timeout = batch_size, attempts, on_timeout
        self._memory_gib = memory_gib
        self._variable_names = [*passed_variables, *named_in_options(self._options)]
        self._reward = find_reward(name)
        self._count = 0 if self._reward.runs_inline else workers
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[int] = SimpleQueue()
        self._waiting: deque[tuple[RewardInput, Future[Score]]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()

    @classmethod
    def of(cls, term: RewardTerm) -> Self:
        """As configured."""
        return cls(
            term.name,
            term.timeout_s,
            term.workers,
            options=term.options,
            batch_size=term.batch_size,
            attempts=term.attempts,
            on_timeout=term.on_timeout,
            memory_gib=term.memory_gib,
            passed_variables=term.passed_variables,
        )

    def __enter__(self) -> Self:
        self._closing.clear()
        if self._count:
            self._workers = [self._started() for _ in range(self._count)]
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="rewards")
            for index in range(self._count):
                self._idle.put(index)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        self._closing.set()
        for worker in self._workers:
            worker.kill()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        while self._waiting:
            self._waiting.popleft()[1].cancel()
        for worker in self._workers:
            worker.close()
        self._workers = []

    def form(self) -> RewardForm:
        """How the reward is called; waits for the first worker. Raises VerifierError where that can't start."""
        if self._reward.runs_inline:
            return self._reward.bind(self._options).form
        return self._workers[0].form()

    def submit(self, given: RewardInput) -> Future[Score]:
        """Score a response while the caller goes on; at once, and here, where the reward runs inline.

        Where the reward refuses it, or could not be had in all attempts, the ``Score`` says why. The future raises
        VerifierError where the reward raises anything but a ValueError, or a worker can't start.
        """
        (future,) = self._submit([given])
        return future

    def _submit(self, inputs: Sequence[RewardInput]) -> list[Future[Score]]:
        """All before a worker looks, so that they come in as few calls as the reward takes."""
        futures: list[Future[Score]] = [Future() for _ in inputs]
        inputs = [self._reward.sees(given) for given in inputs]
        if self._reward.runs_inline:
            for given, future in zip(inputs, futures, strict=True):
                try:
                    (score,) = scores_of(self._reward.bind(self._options), [given])
                    future.set_result(score)
                except Exception as error:
                    future.set_exception(error)
            return futures
        with self._lock:
            if self._threads is None:
                raise ValueError("the verifier is not open; use it in a with statement")
            self._waiting.extend(zip(inputs, futures, strict=True))
            for _ in inputs:
                self._threads.submit(self._take_turn)
        return futures

    def check(self, inputs: Sequence[RewardInput], on_score: OnScore = lambda: None) -> list[Score]:
        """As ``submit``, of several in order. ``on_score``: called as each is there."""
        futures = self._submit(inputs)
        scores = []
        try:
            for future in futures:
                scores.append(future.result())
                on_score()
            return scores
        finally:
            for future in futures:
                future.cancel()

    def score(self, inputs: Sequence[RewardInput], on_score: OnScore = lambda: None) -> list[Score]:
        """As ``check``. Raises VerifierError where the reward function raises or returns anything but a
        finite number or a RewardResult: that is a fault of the program or of the data, no wrong answer;
        RewardUnavailableError where a reward could not be had."""
        scores = self.check(inputs, on_score)
        require(scores, inputs, f"reward {self._name}: ")
        for score in scores:
            if score.unavailable is not None:
                raise RewardUnavailableError(f"reward {self._name}: {score.unavailable}")
        return scores

    # --- in the threads, of which each has a worker at a time

    def _take_turn(self) -> None:
        """Score the next response, or as many as the reward takes at once."""
        index = self._idle.get()
        taken: list[tuple[RewardInput, Future[Score]]] = []
        try:
            self._take(taken, 1)
            if taken:
                form = self._workers[index].form()
                self._take(taken, form.calls_at_once(self._batch_size))
                scores = self._attempted(index, form, [given for given, _ in taken])
                for (_, future), score in zip(taken, scores, strict=True):
                    future.set_result(score)
        except Exception as error:
            for _, future in taken:
                future.set_exception(error)
        finally:
            self._renew(index)
            self._idle.put(index)

    def _take(self, taken: list[tuple[RewardInput, Future[Score]]], most: int) -> None:
        """Of those that wait, until there are ``most``."""
        with self._lock:
            while self._waiting and len(taken) < most:
                given, future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    taken.append((given, future))

    def _attempted(
        self, index: int, form: RewardForm, inputs: Sequence[RewardInput]
    ) -> list[Score]:
        scores = self._ask(index, inputs)
        if form.takes_many and len(inputs) > 1 and (scores[0].timed_out or scores[0].crashed):
            # One of them did it.
            scores = [score for given in inputs for score in self._ask(index, [given])]
        for attempt in range(1, self._attempts):
            lacking = [i for i, score in enumerate(scores) if score.unavailable is not None]
            pause = min(BACK_OFF_S * 2 ** (attempt - 1), LONGEST_BACK_OFF_S)
            if not lacking or self._closing.wait(pause):
                break
            again = self._ask(index, [inputs[i] for i in lacking])
            for i, score in zip(lacking, again, strict=True):
                scores[i] = score
        return scores

    def _ask(self, index: int, inputs: Sequence[RewardInput]) -> list[Score]:
        self._renew(index)
        is_used = self._workers[index].is_used
        scores = self._workers[index].scores(inputs)
        if is_used and (crashed := [i for i, score in enumerate(scores) if score.crashed]):
            # What earlier calls left there may have done it.
            self._renew(index)
            again = self._workers[index].scores([inputs[i] for i in crashed])
            for i, score in zip(crashed, again, strict=True):
                scores[i] = score
        return scores

    def _renew(self, index: int) -> None:
        """Another process for one that is dead; a verifier that was closed meanwhile starts nothing more."""
        with self._lock:
            if self._workers[index].is_dead and self._threads is not None:
                # Its guard may have gone without what was below.
                self._workers[index].kill()
                self._workers[index].close()
                self._workers[index] = self._started()

    def _started(self) -> _Worker:
        return _Worker(
            self._name,
            self._timeout_s,
            self._options,
            self._on_timeout,
            self._memory_gib,
            self._variable_names,
        )


def require(scores: Sequence[Score], inputs: Sequence[RewardInput], prefix: str = "") -> None:
    """Raise VerifierError, which begins with ``prefix``, where a reward refused a response: a fault of the program or
    of the data."""
    for score, given in zip(scores, inputs, strict=True):
        if score.refusal is not None:
            raise VerifierError(
                f"{prefix}{score.refusal}; response {_shorten(given.response)}, answer {_shorten(given.answer)}"
            )


def _shorten(text: str) -> str:
    return ascii(text) if len(text) <= 60 else ascii(text[:57]) + "..."


class _Worker:
    """One process, which has one call at a time. ``is_used``: it has had one. ``variable_names``: of the variables that
    it gets, though they hold keys."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        options: Mapping[str, Any],
        on_timeout: OnTimeout,
        memory_gib: int,
        variable_names: Sequence[str],
    ) -> None:
        self._name, self._timeout_s, self._on_timeout = name, timeout_s, on_timeout
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._process, self._connection = start_connected(
            "megatron_dppo.rewards.verifier",
            environment=worker_environment(os.environ),
            output=self._output.fileno(),
        )
        start = {
            "name": name,
            "options": dict(options),
            "timeout_s": timeout_s,
            "memory_gib": memory_gib,
            "variables": chosen_variables(os.environ, variable_names),
        }
        # Of one that has died already, its form is asked for in vain.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(start).encode())
        self._form: RewardForm | None = None
        self._receiving = threading.Lock()
        self._numbers = itertools.count()
        self._was_killed = False
        self.is_used = False

    @property
    def is_dead(self) -> bool:
        """It was killed, or has ended."""
        return self._was_killed or self._process.poll() is not None

    def form(self) -> RewardForm:
        """How its reward is called, once it is ready. Raises VerifierError where it can't start."""
        with self._receiving:
            if self._form is None:
                try:
                    if not self._connection.poll(START_LIMIT_S):
                        self.kill()
                        raise VerifierError(
                            f"a {self._name} worker did not start in {START_LIMIT_S:g} s"
                        )
                    reads, is_async, columns = json.loads(self._connection.recv_bytes())
                    self._form = RewardForm(tuple(reads), is_async, tuple(columns))
                except (EOFError, OSError):
                    self._end()
                    raise self._error() from None
            return self._form

    def scores(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """Of one call; the clock starts when the process is ready and has it."""
        form = self.form()
        # An asynchronous reward keeps the limit itself, for each response.
        limit = self._timeout_s + (GRACE_S if form.is_async else 0.0)
        self.is_used = True
        try:
            number = next(self._numbers)
            self._connection.send((number, list(inputs)))
            if self._connection.poll(limit):
                scores = _scores_of_call(self._connection.recv_bytes(), number, len(inputs))
                if any(score.crashed for score in scores):
                    # What did it stays: a memory that is full, answers of who may not answer.
                    self.kill()
                return [
                    self._blamed(score, "its process had no memory left, or was to exit")
                    for score in scores
                ]
            self.kill()
            score = self._blamed(Score(0.0, timed_out=True), f"no answer within {limit:g} s")
        except (EOFError, OSError):
            score = self._blamed(self._ended(), f"its process ended within {limit:g} s")
        return [score] * len(inputs)

    def _blamed(self, score: Score, why: str) -> Score:
        """As it is, or without a value where a service and not the response took too long or ended the process."""
        is_fault = score.timed_out or score.crashed
        if not (is_fault and (self.form().is_async or self._on_timeout == "unavailable")):
            return score
        return replace(Score.unhad(why), crashed=score.crashed)

    def kill(self) -> None:
        """End the process at once."""
        self._was_killed = True
        kill_families([self._process])

    def close(self) -> None:
        """Give back what a dead worker had."""
        self._connection.close()
        self._output.close()

    def _end(self) -> int:
        code = self._process.wait()
        self.kill()
        return code

    def _ended(self) -> Score:
        code = self._end()
        if code >= 0:
            raise self._error()
        # The worker's own alarm rings where this process was too slow to kill it.
        is_late = code == -signal.SIGALRM
        return Score(0.0, timed_out=is_late, crashed=not is_late)

    def _error(self) -> VerifierError:
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")[-4000:]
        hint = withheld_hint(output, "passed_variables of this reward")
        return VerifierError(
            f"a {self._name} worker ended with exit code {self._process.returncode}{hint}:\n{output}"
        )


def _scores_of_call(content: bytes, number: int, count: int) -> list[Score]:
    """What a worker answered; of a crash where that is no answer to the call with this number."""
    try:
        answered, rows = json.loads(content)
        scores = [Score(*row) for row in rows]
    # What a reward runs may have sent it.
    except (RecursionError, TypeError, ValueError):
        answered, scores = None, []
    if (answered, len(scores)) != (number, count):
        return [Score(0.0, crashed=True)] * count
    return scores


# --- in the worker's process


def scores_of(reward: BoundReward, inputs: Sequence[RewardInput]) -> list[Score]:
    """Of one call of a synchronous reward. Raises what it raises and no score stands for."""
    try:
        returned = reward(inputs)
    # Of whatever library: those that no score stands for are raised again.
    except (Exception, SystemExit) as error:
        return [_failure(error)] * len(inputs)
    return _as_scores(reward.form, returned, len(inputs))


async def scores_in_time(
    reward: BoundReward, inputs: Sequence[RewardInput], timeout_s: float
) -> list[Score]:
    """Of an asynchronous reward: all at the same time, each call ``timeout_s`` long at most."""

    async def call(part: Sequence[RewardInput]) -> list[Score]:
        try:
            async with asyncio.timeout(timeout_s):
                returned = await reward(part)
        except TimeoutError as error:
            return [Score.unhad(str(error) or f"no answer within {timeout_s:g} s")] * len(part)
        except (Exception, SystemExit) as error:
            return [_failure(error)] * len(part)
        return _as_scores(reward.form, returned, len(part))

    parts = [inputs] if reward.form.takes_many else [[given] for given in inputs]
    return [score for part in await asyncio.gather(*map(call, parts)) for score in part]


def _as_scores(form: RewardForm, returned: Any, count: int) -> list[Score]:
    if not form.takes_many:
        return [Score.of(returned)]
    if not isinstance(returned, Sequence) or len(returned) != count:
        count_text = f"{len(returned)} of them" if isinstance(returned, Sequence) else "no list"
        refusal = (
            f"it returned {count_text} for {count} responses, expected a list with one for each"
        )
        return [Score(0.0, refusal=refusal)] * count
    return [Score.of(value) for value in returned]


# Clients' errors that are no OSErrors and say that a service was not reached, is too busy or broke off: package, class.
_OF_SERVICES = {
    ("http", "HTTPException"),
    ("httpx", "TransportError"),
    *(("aiohttp", name) for name in ("ClientConnectionError", "ClientPayloadError")),
    *(("openai", name) for name in ("APIConnectionError", "InternalServerError", "RateLimitError")),
}


def _failure(error: Exception | SystemExit) -> Score:
    """What stands for an error of a reward. Raises it where nothing does: a fault of the program."""
    # By a response that it runs, as a signal would be.
    if isinstance(error, MemoryError | SystemExit):
        return Score(0.0, crashed=True)
    why = str(error)[:_LONGEST_REFUSAL]
    # By name: their packages are not imported here.
    names = {(c.__module__.partition(".")[0], c.__name__) for c in type(error).__mro__}
    if isinstance(error, RewardUnavailableError | OSError) or names & _OF_SERVICES:
        return Score.unhad(why or type(error).__name__)
    if not isinstance(error, ValueError):
        raise error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if Path(frame.filename).parent == Path(__file__).parent:
        return Score(0.0, refusal=why)
    return Score(0.0, refusal=f"{why} ({Path(frame.filename).name}, line {frame.lineno})")


# How much later than the verifier the worker ends itself, should nobody be left to kill it.
GRACE_S = 5.0


def serve(connection: Connection, name: str, timeout_s: float, options: Mapping[str, Any]) -> None:
    """Answer until nobody is left to ask."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is the verifier's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    reward = find_reward(name).bind(options)
    helpers = processes.child_ids()
    limit = timeout_s + (GRACE_S if reward.form.is_async else 0.0)
    connection.send_bytes(json.dumps(reward.form).encode())
    # One loop for the worker's life, so that connections stay open between calls.
    with asyncio.Runner() as runner:
        while True:
            try:
                number, inputs = connection.recv()
            except (EOFError, ConnectionResetError):
                return
            # SIGALRM's default action ends the process, whatever the reward does.
            signal.setitimer(signal.ITIMER_REAL, limit + GRACE_S)
            if reward.form.is_async:
                scores = runner.run(scores_in_time(reward, inputs, timeout_s))
            else:
                scores = scores_of(reward, inputs)
            signal.setitimer(signal.ITIMER_REAL, 0)
            processes.kill_children(spared=helpers)
            rows = [astuple(score) for score in scores]
            connection.send_bytes(json.dumps([number, rows]).encode())


def main() -> None:
    """Serve in a child, under this process as its guard."""
    [descriptor] = sys.argv[1:]
    close_to_others()
    # No process that the reward starts may answer.
    connection = processes.connect_guarded(int(descriptor))
    start = json.loads(connection.recv_bytes())
    receive_passed(start["variables"])
    processes.bound_memory(start["memory_gib"], is_final=True)
    try:
        serve(connection, start["name"], start["timeout_s"], start["options"])
    except Exception as error:
        sys.stderr.write(users_traceback(error))
        # As an exception that nothing catches: the verifier reads what was written.
        sys.exit(1)


def users_traceback(error: Exception) -> str:
    """The traceback from the first frame on that is neither this package's nor the standard library's asyncio's.

    All of it where there is no such frame.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = (str(_PACKAGE), str(Path(asyncio.__file__).parent))
    first = next((i for i, f in enumerate(frames) if not f.filename.startswith(own)), 0)
    shown = error.__traceback__
    for _ in range(first):
        assert shown is not None
        shown = shown.tb_next
    return "".join(traceback.format_exception(type(error), error, shown))


if __name__ == "__main__":
    main()
