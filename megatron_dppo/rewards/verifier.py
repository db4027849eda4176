"""Scores of responses, computed in worker processes with a hard time limit for each call.

A process cannot interrupt its own endless check: regular expressions and integer powers do not check for interrupts
while they run. math-verify has a time limit, but the limit works only in the main thread. So checks run in a worker
process, and the verifier kills this process at the time limit.

The worker (``system/workers.py``) receives the reward's name, options and time limit. Once the worker is ready, it
answers with the reward's form (RewardForm). Then each call is a list of RewardInputs, and the answer a list with a
Score for each. A Score has one of three contents: a value; a refusal, if the reward raised ValueError or returned no
number; or the reason why the reward is unavailable (RewardUnavailableError, OSError, and known errors of HTTP clients).
Any other exception of the reward ends the worker with a traceback.

The worker answers in JSON: the code of a response may run in the worker, so the verifier must not unpickle anything
from it. The worker imports the reward and nothing heavier.

The worker's first process is called the guard. Checks run in a child of the guard. After a check, all processes that
the check started are ended, even processes in another session or with another parent. Processes that the reward's
module started at its import live as long as the worker. The guard ends all these processes when the child dies, or when
the verifier has closed the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_dppo.rewards import (
    BoundReward,
    RewardForm,
    RewardInput,
    RewardUnavailableError,
    find_reward,
)
from megatron_dppo.rewards.result import result_of
from megatron_dppo.system import processes
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.secret_variables import named_in_options, withheld_hint
from megatron_dppo.system.text import cut
from megatron_dppo.system.workers import (
    START_LIMIT_S,
    CallConnection,
    RestrictedWorker,
    WorkerCall,
    WorkerLostError,
    WorkerPool,
    connect_restricted,
)

if TYPE_CHECKING:
    from megatron_dppo.config.data_schema import RewardTerm

_PACKAGE = Path(__file__).parents[1]
BACK_OFF_S = 0.5
"""Pause before the second attempt at a reward that is unavailable. The pause doubles for each further attempt."""
LONGEST_BACK_OFF_S = 60.0
GRACE_S = 5.0
"""The worker ends itself this many seconds after the verifier's limit, in case the verifier is gone. For an
asynchronous reward, the worker itself applies ``timeout_s``, and the verifier's limit is this many seconds longer."""
_MAX_REFUSAL = 200
"""Largest number of characters of a reward's error in a refusal."""
OnScore = Callable[[], None]


class VerifierError(RunError):
    """The reward function raised an exception, or its worker could not start. The message has the worker's output."""


@dataclass(frozen=True)
class Score:
    """The result of one check.

    Attributes:
        value: The reward. It is 0 for a check that timed out, crashed or was refused, and NaN if ``unavailable``.
        timed_out: Whether the check was killed at the time limit.
        crashed: Whether the operating system ended the check's process, for example because it needed too much memory.
        refusal: The reward's error about this response; None without an error.
        components: As in RewardResult.
        reason: As in RewardResult.
        unavailable: The reason why no reward could be computed; None if a reward was computed. Callers must not use
            ``value`` of an unavailable reward.
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
        """Build a score from the return value of a reward."""
        result = result_of(value)
        if isinstance(result, str):
            return cls(0.0, refusal=result)
        return cls(result.value, components=result.components, reason=result.reason)

    @classmethod
    def without_value(cls, reason: str) -> Self:
        """A score for a reward that is unavailable."""
        return cls(math.nan, unavailable=reason)


class Verifier:
    """``with Verifier(RewardTerm(name="math_verify")) as verifier: verifier.score(inputs)``.

    Its methods may be called from any thread. The processes of ``term`` start on entry, and are replaced after a kill.
    A reward that runs inline needs no process.
    """

    def __init__(self, term: RewardTerm) -> None:
        self._term = term
        self._reward = find_reward(term.name)
        self._worker_count = 0 if self._reward.runs_inline else term.workers
        self._pool = WorkerPool(self._start_worker, self._worker_count)
        self._waiting: deque[tuple[RewardInput, Future[Score]]] = deque()
        """Responses that no worker has taken yet, with the futures of their scores."""
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        self._closing.clear()
        if self._worker_count:
            self._pool.fill()
            self._threads = ThreadPoolExecutor(self._worker_count, thread_name_prefix="rewards")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        self._closing.set()
        self._pool.close()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        while self._waiting:
            future = self._waiting.popleft()[1]
            future.cancel()
        # The verifier may be entered again.
        self._pool = WorkerPool(self._start_worker, self._worker_count)

    def form(self) -> RewardForm:
        """The reward's form. Waits for the first worker.

        Raises VerifierError if the worker cannot start, or if the reward does not take its options.
        """
        if self._reward.runs_inline:
            try:
                return self._reward.bind(self._term.options).form
            except ValueError as error:
                raise VerifierError(str(error)) from error
        return self._pool.workers[0].form()

    def submit(self, record: RewardInput) -> Future[Score]:
        """Score a response in the background. A reward that runs inline is called at once, in this thread.

        If the reward refuses the response, or is unavailable in all attempts, the ``Score`` has the reason. The future
        raises VerifierError if the reward raises another exception than ValueError, or a worker cannot start.
        """
        (future,) = self._submit([record])
        return future

    def _submit(self, inputs: Sequence[RewardInput]) -> list[Future[Score]]:
        """Queue all inputs under one lock, so that workers find as many as they can take in one call."""
        futures: list[Future[Score]] = [Future() for _ in inputs]
        inputs = [self._reward.with_final_answer(record) for record in inputs]
        if self._reward.runs_inline:
            for record, future in zip(inputs, futures, strict=True):
                try:
                    (score,) = scores_of(self._reward.bind(self._term.options), [record])
                    future.set_result(score)
                except Exception as error:
                    future.set_exception(error)
            return futures
        with self._lock:
            if self._threads is None:
                raise ValueError("the verifier is not open; use it in a with statement")
            self._waiting.extend(zip(inputs, futures, strict=True))
            for _ in inputs:
                self._threads.submit(self._score_next)
        return futures

    def check(self, inputs: Sequence[RewardInput], on_score: OnScore | None = None) -> list[Score]:
        """Score several responses, in order, as ``submit`` does. ``on_score`` is called after each score."""
        futures = self._submit(inputs)
        scores = []
        try:
            for future in futures:
                scores.append(future.result())
                if on_score is not None:
                    on_score()
            return scores
        finally:
            for future in futures:
                future.cancel()

    def score(self, inputs: Sequence[RewardInput], on_score: OnScore | None = None) -> list[Score]:
        """Score several responses as ``check`` does, and raise its errors.

        Raises:
            VerifierError: The reward function raised an exception, or returned anything but a finite number or a
                RewardResult. The error is in the program or in the data; it is not a wrong answer.
            RewardUnavailableError: A reward is unavailable.
        """
        scores = self.check(inputs, on_score)
        require(scores, inputs, f"reward {self._term.name}: ")
        for score in scores:
            if score.unavailable is not None:
                raise RewardUnavailableError(f"reward {self._term.name}: {score.unavailable}")
        return scores

    def _score_next(self) -> None:
        """Score the next response, or as many as the reward takes at once, with an idle worker.

        The method runs in one of the verifier's threads. There are as many threads as workers.
        """
        use = _WorkerUse(self._pool)
        batch: list[tuple[RewardInput, Future[Score]]] = []
        try:
            self._fill(batch, 1)
            # The batch is empty if another thread took this response in its own batch, or if it was cancelled.
            if batch:
                form = use.worker.form()
                self._fill(batch, form.calls_at_once(self._term.batch_size))
                scores = self._call_with_retries(use, form, [record for record, _ in batch])
                for (_, future), score in zip(batch, scores, strict=True):
                    future.set_result(score)
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
        finally:
            use.end()

    def _fill(self, batch: list[tuple[RewardInput, Future[Score]]], size: int) -> None:
        """Move waiting responses to ``batch`` until it has ``size`` responses or no response is waiting."""
        with self._lock:
            while self._waiting and len(batch) < size:
                record, future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    batch.append((record, future))

    def _call_with_retries(
        self, use: _WorkerUse, form: RewardForm, inputs: Sequence[RewardInput]
    ) -> list[Score]:
        """Score ``inputs`` in one call. Repeat the call for unavailable rewards, up to the number of attempts."""
        scores = use.scores(inputs)
        # After a timeout or crash of a call, all of its scores are marked. So it is enough to test the first score.
        has_failed = scores[0].timed_out or scores[0].crashed
        if form.takes_many and len(inputs) > 1 and has_failed:
            # One input of the batch is the cause: score each input in a separate call.
            scores = []
            for record in inputs:
                scores += use.scores([record])
        for attempt in range(1, self._term.attempts):
            missing_indices = [i for i, score in enumerate(scores) if score.unavailable is not None]
            pause_s = min(BACK_OFF_S * 2 ** (attempt - 1), LONGEST_BACK_OFF_S)
            if not missing_indices or self._closing.wait(pause_s):
                break
            new_scores = use.scores([inputs[i] for i in missing_indices])
            for i, score in zip(missing_indices, new_scores, strict=True):
                scores[i] = score
        return scores

    def _start_worker(self) -> RewardWorker:
        return RewardWorker(self._term)


class _WorkerUse:
    """A thread's use of a worker of the pool, until ``end``. A dead worker is replaced."""

    def __init__(self, pool: WorkerPool[RewardWorker]) -> None:
        self._pool = pool
        self.worker = pool.take()

    def scores(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """Score ``inputs`` in one call."""
        self._renew()
        had_earlier_calls = self.worker.is_used
        scores = self.worker.scores(inputs)
        crashed_indices = [i for i, score in enumerate(scores) if score.crashed]
        if had_earlier_calls and crashed_indices:
            # Earlier calls may have caused the crash, for example by memory that they did not free: use a new process.
            self._renew()
            new_scores = self.worker.scores([inputs[i] for i in crashed_indices])
            for i, score in zip(crashed_indices, new_scores, strict=True):
                scores[i] = score
        return scores

    def end(self) -> None:
        self._renew()
        self._pool.release(self.worker)

    def _renew(self) -> None:
        if self.worker.is_dead:
            self.worker = self._pool.replace(self.worker)


def require(scores: Sequence[Score], inputs: Sequence[RewardInput], prefix: str = "") -> None:
    """Raise VerifierError if a reward refused a response. ``prefix``: the beginning of the message.

    A refusal is an error in the program or in the data.
    """
    for score, record in zip(scores, inputs, strict=True):
        if score.refusal is not None:
            raise VerifierError(f"{prefix}{score.refusal}; {_shown(record)}")


def _shown(record: RewardInput) -> str:
    return f"response {cut(record.response)!a}, answer {cut(record.answer)!a}"


class RewardWorker(RestrictedWorker):
    """One worker process of the reward ``term``, with one call at a time."""

    def __init__(self, term: RewardTerm) -> None:
        self._name = term.name
        self._timeout_s = term.timeout_s
        self._on_timeout = term.on_timeout
        # Names of the environment variables with credentials that the process gets.
        self._variable_names = [*term.passed_variables, *named_in_options(term.options)]
        super().__init__(
            "megatron_dppo.rewards.verifier",
            {"name": term.name, "timeout_s": term.timeout_s, "options": term.options},
            memory_gib=term.memory_gib,
            variable_names=self._variable_names,
        )

    def form(self) -> RewardForm:
        """The reward's form. Waits until the worker is ready. Raises VerifierError if the worker cannot start."""
        try:
            reads, is_async, columns = json.loads(self.ready.result(START_LIMIT_S))
        except TimeoutError:
            self.kill()
            raise VerifierError(
                f"a {self._name} worker did not start in {START_LIMIT_S:g} s"
            ) from None
        except WorkerLostError as lost:
            raise self._error(lost) from None
        return RewardForm(tuple(reads), is_async, tuple(columns))

    def scores(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """Score ``inputs`` in one call. The time limit begins when the process is ready and has received the call."""
        form = self.form()
        # The worker of an asynchronous reward applies ``timeout_s`` to each response itself.
        limit_s = self._timeout_s
        if form.is_async:
            limit_s += GRACE_S
        try:
            answer = self.ask(pickle.dumps(list(inputs)), limit_s)
        except TimeoutError:
            timeout = Score(0.0, timed_out=True)
            score = self._unavailable_after_service_fault(
                form, timeout, f"no answer within {limit_s:g} s"
            )
            return [score] * len(inputs)
        except WorkerLostError as lost:
            crash = self._crash(lost, inputs)
            score = self._unavailable_after_service_fault(
                form, crash, f"its process ended within {limit_s:g} s"
            )
            return [score] * len(inputs)
        scores = _parsed_scores(answer, len(inputs))
        if any(score.crashed for score in scores):
            # End the process, because the cause would remain in it: full memory, or code of a response that writes
            # answers.
            self.kill()
        reason = "its process had no memory left, or called sys.exit"
        return [self._unavailable_after_service_fault(form, score, reason) for score in scores]

    def _unavailable_after_service_fault(
        self, form: RewardForm, score: Score, reason: str
    ) -> Score:
        """Replace a score that timed out or crashed by an unavailable score, if a service counts as the cause.

        For asynchronous rewards, and with ``on_timeout: unavailable``, a service counts as the cause. Otherwise the
        response counts as the cause. All other scores are returned unchanged.
        """
        has_failed = score.timed_out or score.crashed
        is_service_fault = form.is_async or self._on_timeout == "unavailable"
        if has_failed and is_service_fault:
            return replace(Score.without_value(reason), crashed=score.crashed)
        return score

    def _crash(self, lost: WorkerLostError, inputs: Sequence[RewardInput]) -> Score:
        """The score of a call during which a signal ended the process. Raises VerifierError if the process exited."""
        # A negative code is the number of a signal.
        if lost.code >= 0:
            raise self._error(lost, inputs)
        # If the verifier is too slow to kill the worker, the worker's own alarm ends the worker.
        is_late = lost.code == -signal.SIGALRM
        return Score(0.0, timed_out=is_late, crashed=not is_late)

    def _error(self, lost: WorkerLostError, inputs: Sequence[RewardInput] = ()) -> VerifierError:
        """The error of a process that has exited, with the process's output.

        ``inputs``: the inputs of the call during which the process exited; empty for an exit at the process's start.
        """
        list_name = "passed_variables of this reward"
        hint = withheld_hint(lost.output, self._variable_names, list_name)
        call = ""
        if inputs:
            count = f" (the first of {len(inputs)})" if len(inputs) > 1 else ""
            call = f" at a response{count}, {_shown(inputs[0])}"
        return VerifierError(
            f"a {self._name} worker ended with exit code {lost.code}{call}{hint}:\n{lost.output}"
        )


def _parsed_scores(content: bytes, count: int) -> list[Score]:
    """Parse a worker's answer. Any content other than ``count`` scores counts as a crash."""
    try:
        scores = [Score(*row) for row in json.loads(content)]
    # Code that a reward runs may have sent this content.
    except (RecursionError, TypeError, ValueError):
        scores = []
    if len(scores) == count:
        return scores
    return [Score(0.0, crashed=True)] * count


def scores_of(reward: BoundReward, inputs: Sequence[RewardInput]) -> list[Score]:
    """Call a synchronous reward in the worker process.

    ``_failure`` converts some exceptions of the reward to scores. All other exceptions are raised.
    """
    try:
        returned = reward(inputs)
    # A reward may use any library, and so raise any exception. _failure raises unknown exceptions again.
    except (Exception, SystemExit) as error:
        return [_failure(error)] * len(inputs)
    return _as_scores(reward.form, returned, len(inputs))


async def scores_in_time(
    reward: BoundReward, inputs: Sequence[RewardInput], timeout_s: float
) -> list[Score]:
    """Call an asynchronous reward for all inputs at the same time. Each call has a limit of ``timeout_s``."""

    async def call(part: Sequence[RewardInput]) -> list[Score]:
        try:
            async with asyncio.timeout(timeout_s):
                returned = await reward(part)
        except TimeoutError as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            return [Score.without_value(reason)] * len(part)
        except (Exception, SystemExit) as error:
            return [_failure(error)] * len(part)
        return _as_scores(reward.form, returned, len(part))

    parts = [inputs]
    if not reward.form.takes_many:
        parts = [[record] for record in inputs]
    scores: list[Score] = []
    for part_scores in await asyncio.gather(*map(call, parts)):
        scores += part_scores
    return scores


def _as_scores(form: RewardForm, returned: Any, count: int) -> list[Score]:
    if not form.takes_many:
        return [Score.of(returned)]
    if not isinstance(returned, Sequence) or len(returned) != count:
        count_text = "no list"
        if isinstance(returned, Sequence):
            count_text = f"{len(returned)} of them"
        refusal = (
            f"it returned {count_text} for {count} responses, expected a list with one for each"
        )
        return [Score(0.0, refusal=refusal)] * count
    return [Score.of(value) for value in returned]


# (package, class) of exceptions that HTTP clients raise for a service that cannot be reached, is too busy, or broke the
# connection. These exceptions are not OSErrors.
_SERVICE_ERRORS = {
    ("http", "HTTPException"),
    ("httpx", "TransportError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("openai", "APIConnectionError"),
    ("openai", "InternalServerError"),
    ("openai", "RateLimitError"),
}


def _failure(error: Exception | SystemExit) -> Score:
    """Convert an exception of a reward to a score. Raises an exception that is an error of the program."""
    # If the reward runs the code of a response, this code may raise these exceptions. So they count as a crash, like a
    # signal that ends the process.
    if isinstance(error, MemoryError | SystemExit):
        return Score(0.0, crashed=True)
    reason = str(error)[:_MAX_REFUSAL]
    # Compare names, because the clients' packages are not imported here.
    class_names: set[tuple[str, str]] = set()
    for base_class in type(error).__mro__:
        package = base_class.__module__.partition(".")[0]
        class_names.add((package, base_class.__name__))
    if isinstance(error, RewardUnavailableError | OSError) or class_names & _SERVICE_ERRORS:
        return Score.without_value(reason or type(error).__name__)
    if not isinstance(error, ValueError):
        raise error
    # Add the line of a user's reward, because the exception's message may not tell the cause.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_own_reward = Path(frame.filename).parent == Path(__file__).parent
    if is_own_reward:
        return Score(0.0, refusal=reason)
    return Score(0.0, refusal=f"{reason} ({Path(frame.filename).name}, line {frame.lineno})")


def serve(
    connection: CallConnection,
    start: WorkerCall,
    name: str,
    timeout_s: float,
    options: Mapping[str, Any],
) -> None:
    """Answer calls until the verifier closes the connection."""
    logging.disable(logging.WARNING)
    processes.adopt_orphans()
    reward = find_reward(name).bind(options)
    # The reward's module started these processes at its import. They live as long as the worker.
    lasting_processes = processes.child_ids()
    limit_s = timeout_s
    if reward.form.is_async:
        limit_s += GRACE_S
    connection.answer(start, json.dumps(reward.form).encode())
    # Use one event loop for the worker's life, so that connections stay open between calls.
    with asyncio.Runner() as runner:
        while True:
            try:
                call = connection.receive()
            except (EOFError, ConnectionResetError):
                return
            inputs = pickle.loads(call.content)
            # The default action of SIGALRM ends the process. The kernel takes this action even while the reward's code
            # runs and does not check for signals.
            signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
            if reward.form.is_async:
                scores = runner.run(scores_in_time(reward, inputs, timeout_s))
            else:
                scores = scores_of(reward, inputs)
            signal.setitimer(signal.ITIMER_REAL, 0)
            processes.kill_children(spared=lasting_processes)
            rows = [astuple(score) for score in scores]
            connection.answer(call, json.dumps(rows).encode())


def main() -> None:
    """Serve in a child process, with this process as its guard."""
    [descriptor] = sys.argv[1:]
    # Processes that the reward starts do not inherit the connection, so they cannot answer. With is_final, the
    # limit of memory applies to these processes too.
    connection, start, settings = connect_restricted(descriptor, is_final=True)
    try:
        serve(connection, start, **settings)
    except Exception as error:
        sys.stderr.write(users_traceback(error))
        # Exit as after an uncaught exception: the verifier reads the output.
        sys.exit(1)


def users_traceback(error: Exception) -> str:
    """The traceback without its first frames in this package or in the standard library's asyncio.

    If all frames are in this package or in asyncio, the whole traceback is returned.
    """
    frames = traceback.extract_tb(error.__traceback__)
    skipped_folders = (str(_PACKAGE), str(Path(asyncio.__file__).parent))
    first_shown = 0
    for number, frame in enumerate(frames):
        if not frame.filename.startswith(skipped_folders):
            first_shown = number
            break
    shown_part = error.__traceback__
    for _ in range(first_shown):
        assert shown_part is not None
        shown_part = shown_part.tb_next
    return "".join(traceback.format_exception(type(error), error, shown_part))


if __name__ == "__main__":
    main()
