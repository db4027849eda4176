"""A limit on the processor time of a block of foreign Python code, such as a chat template."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

RENDERING_S = 10.0
"""Processor time for one rendering of a chat template, seconds; a long conversation takes milliseconds."""
_POLL_S = 0.25


class TimeLimitError(ValueError):
    """A block of Python used more processor time than it was given."""


class _TimeUpError(BaseException):
    """Raised by the watching thread in the thread whose time is up.

    A BaseException: code that catches Exception must not go on.
    """


@dataclass(frozen=True)
class _WatchedBlock:
    thread: int
    clock: int
    end: float


class _Watcher:
    """One daemon thread that watches every block that is limited now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watches: dict[int, _WatchedBlock] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, seconds: float) -> int:
        """Watch the calling thread; returns the number under which ``remove`` knows it."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        watch = _WatchedBlock(thread, clock, time.clock_gettime(clock) + seconds)
        with self._changed:
            # A forked child has the object and not the thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="time-limit", daemon=True)
                self._thread.start()
            number = next(self._numbers)
            self._watches[number] = watch
            self._changed.notify()
        return number

    def remove(self, number: int) -> bool:
        """End the watch of the calling thread; whether its time was up."""
        with self._changed:
            if self._watches.pop(number, None) is not None:
                return False
            # The exception may be set and not raised yet; the code after the block must not get it.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(threading.get_ident()), ctypes.c_void_p(0)
            )
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watches:
                    self._changed.wait()
                for number, watch in list(self._watches.items()):
                    # A watched thread is inside its block, so its clock exists.
                    if time.clock_gettime(watch.clock) >= watch.end:
                        del self._watches[number]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(watch.thread), ctypes.py_object(_TimeUpError)
                        )
            time.sleep(_POLL_S)


_watcher = _Watcher()


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the block when its thread has used ``seconds`` of processor time in it.

    Processor time: a busy machine changes nothing. The block ends at its next instruction of Python; a call into C that
    does not return is not interrupted, and neither is a block that waits.
    """
    is_up = False
    try:
        number = _watcher.add(seconds)
        try:
            yield
        finally:
            is_up = _watcher.remove(number)
    except _TimeUpError:
        is_up = True
    if is_up:
        raise TimeLimitError(f"it took more than {seconds:g} s of processor time")


def rendering_limit() -> AbstractContextManager[None]:
    """``cpu_time_limit`` for one rendering of a chat template, which is a program and may loop for ever."""
    return cpu_time_limit(RENDERING_S)
