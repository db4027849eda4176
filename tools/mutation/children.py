"""Work in forked children: its result, or whether the child ended without an error."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which a mutant may end its tests. They count as a failed test."""
ASLEEP_S = 1800.0
"""A child that waits forever without using a core is ended after this time."""
ERRORS = os.fdopen(os.dup(2), "w")
"""Children print errors here. They print nothing else."""


class Verdict(IntEnum):
    """The outcome of a mutant. ``stopped``: its time limit ended it before its tests had a result."""

    killed = 0
    survived = 1
    stopped = 2


def silence() -> None:
    """Discard the output of this process."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


def in_child(work: Callable[[], T]) -> T:
    """Return the result of ``work`` in a forked child. The child leaves no trace in this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "wb") as sink:
            try:
                pickle.dump(work(), sink)
                sink.flush()
                os._exit(0)
            finally:
                traceback.print_exc(file=ERRORS)
                ERRORS.flush()
                os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as source:
        answer = source.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("a child ended before its answer; its own error is above")
    return pickle.loads(answer)


def allow(seconds: float) -> None:
    """End this process when it has used ``seconds`` of a core. The load of the machine does not matter."""
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_utime + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, resource.RLIM_INFINITY))


def verdicts(
    waiting: Sequence[T], survives: Callable[[T], bool], processes: int
) -> Iterator[tuple[T, Verdict]]:
    """Yield each of ``waiting`` with its verdict, which ``survives`` finds in a forked child.

    If ``survives`` raises an error, the verdict is ``killed``. ``survives`` bounds its own work by ``allow``.
    """
    todo = deque(waiting)
    running: dict[int, Any] = {}
    while todo or running:
        while todo and len(running) < processes:
            work = todo.popleft()
            folder = tempfile.TemporaryDirectory(prefix="mutant-")
            child = os.fork()
            if not child:
                _run(survives, work, folder.name)
            running[child] = work, folder, time.monotonic() + ASLEEP_S
        time.sleep(0.002)
        for child, (work, folder, limit) in list(running.items()):
            if time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
            ended_child, status = os.waitpid(child, os.WNOHANG)
            if ended_child:
                del running[child]
                folder.cleanup()
                yield work, _verdict(status)


def _verdict(status: int) -> Verdict:
    """Return the verdict for a child's exit status."""
    if os.WIFSIGNALED(status):
        return Verdict.killed if os.WTERMSIG(status) in CRASHES else Verdict.stopped
    return Verdict.killed if status else Verdict.survived


def _run(survives: Callable[[T], bool], work: T, folder: str) -> None:
    """Run a child to its end. Its temporary files are in ``folder``; its output is discarded."""
    code = 1
    try:
        silence()
        os.environ["TMPDIR"] = folder
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        tempfile.tempdir = folder
        code = 0 if survives(work) else 1
    finally:
        os._exit(code)
