"""A limit on the processor time of a block of foreign Python code, for example a chat template."""

from __future__ import annotations

import ctypes
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_POLL_S = 0.25


class TimeLimitError(ValueError):
    """A block of Python used more processor time than its limit."""


class _TimeUpError(BaseException):
    """The watching thread raises this in a thread whose time is up.

    The class is a BaseException, so that code that catches Exception does not continue.
    """


@dataclass(frozen=True)
class _WatchedBlock:
    """A block with a limit.

    ``clock`` is the id of the clock that counts the processor time of ``thread``. The block's time is up when this
    clock shows ``end``.
    """

    thread: int
    clock: int
    end: float


class _Watcher:
    """A daemon thread that watches all blocks with a limit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: dict[int, _WatchedBlock] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, seconds: float) -> int:
        """Watch a block of the calling thread; return the block's number, for ``remove``."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        block = _WatchedBlock(thread, clock, time.clock_gettime(clock) + seconds)
        with self._changed:
            # A forked child process has a copy of this object, but not the thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="time-limit", daemon=True)
                self._thread.start()
            number = next(self._numbers)
            self._blocks[number] = block
            self._changed.notify()
        return number

    def remove(self, number: int) -> bool:
        """Stop watching a block of the calling thread; return whether its time was up."""
        with self._changed:
            if self._blocks.pop(number, None) is not None:
                return False
            # The watcher has set an exception in this thread. If Python has not raised it yet, cancel it (NULL),
            # because it must not reach the code after the block.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(threading.get_ident()), ctypes.c_void_p(0)
            )
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._blocks:
                    self._changed.wait()
                for number, block in list(self._blocks.items()):
                    # The thread is inside the block, so its clock exists.
                    if time.clock_gettime(block.clock) >= block.end:
                        del self._blocks[number]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(block.thread), ctypes.py_object(_TimeUpError)
                        )
            time.sleep(_POLL_S)


_watcher = _Watcher()


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """End the block with TimeLimitError when its thread has used ``seconds`` of processor time in the block.

    The processor time does not depend on the load of the machine. The block ends at its next Python instruction, so a
    call into C, or a wait, is not interrupted.
    """
    is_up = False
    try:
        number = _watcher.add(seconds)
        try:
            yield
        finally:
            # If the watcher set the exception and Python has not raised it yet, ``remove`` cancels it.
            is_up = _watcher.remove(number)
    except _TimeUpError:
        # Python raised the exception in the block, or before ``remove`` could cancel it.
        is_up = True
    if is_up:
        raise TimeLimitError(f"it took more than {seconds:g} s of processor time")


@contextmanager
def interrupting_limit(seconds: float) -> Iterator[None]:
    """End the block with TimeLimitError when the process has used ``seconds`` of processor time in the block.

    Unlike ``cpu_time_limit``, the limit also interrupts a regular expression. It holds only in the main thread, because
    Python handles signals there; in other threads the block has no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: object) -> None:
        raise TimeLimitError(f"it took more than {seconds:g} s of processor time")

    earlier_handler = signal.signal(signal.SIGVTALRM, on_signal)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier_handler)
