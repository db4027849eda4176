"""Requests to end a run: signals and deadlines."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


@dataclass(frozen=True)
class Stop:
    """A reason to end a run cleanly, with the run's exit code.

    ``insists``: whether this stop ends the run at once if the run is already stopping.
    """

    why: str
    code: int
    insists: bool = False


TIME = Stop("time", 0)
"""Stop because the time limit is near."""
OVERTIME = Stop("overtime", 1, insists=True)
"""Stop because the time limit is near and the ranks have not ended their step."""


@dataclass(eq=False)
class StopRequests:
    """The requested stops, in order.

    Attributes:
        signals: signal -> stop; ``listening()`` receives the signals.
        deadlines: stop -> epoch seconds; at this time the stop is requested without a signal.
        now: returns the time in epoch seconds.
    """

    signals: Mapping[int, Stop]
    deadlines: Mapping[Stop, float] = field(default_factory=dict)
    now: Callable[[], float] = time.time
    _requested: list[Stop] = field(default_factory=list, init=False)

    def move_deadlines(self, deadlines: Mapping[Stop, float]) -> None:
        """Replace the deadlines of the stops that were not requested yet; callable from any thread."""
        self.deadlines = deadlines

    def requested(self) -> list[Stop]:
        """Return the requested stops in order. Only a stop that insists may be in the list more than once."""
        for stop, deadline in self.deadlines.items():
            if stop not in self._requested and self.now() >= deadline:
                self._requested.append(stop)
        return self._requested

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; call it in the main thread."""
        previous_handlers = {number: signal.signal(number, self._note) for number in self.signals}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                # Before the run, ``exit_by_code`` may have installed a handler that exits. Ignore its signals from now
                # on: they must not interrupt the cleaning up, or replace the exit code of the handled stop.
                is_ours = handler is _exit_with_code
                signal.signal(number, signal.SIG_IGN if is_ours else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A signal handler runs between any two instructions of the main thread, so it only stores the stop.
        stop = self.signals[number]
        if stop.insists or stop not in self._requested:
            self._requested.append(stop)


def exit_by_code() -> None:
    """Make this process exit with a shell's code, 128 + n, on SIGTERM and SIGHUP, instead of dying by the signal.

    Call this in the main thread of a command's process. Before the run, a signal raises SystemExit. During the run,
    StopRequests handles the signals. After the run, the signals are ignored. A signal that is ignored at the time of
    the call stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_with_code)


def _exit_with_code(number: int, frame: FrameType | None) -> None:
    # Further signals must not interrupt the cleaning up that SystemExit causes.
    for ignored in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    raise SystemExit(128 + number)


def terminal_stops() -> StopRequests:
    """Return the stops of a run that a user started: Ctrl-C, SIGTERM and SIGHUP, each with a shell's exit code."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return StopRequests({n: Stop("interrupted", 128 + n, insists=True) for n in numbers})
