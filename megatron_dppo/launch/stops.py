"""What asks a supervisor to end its run: signals, and a clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class Stop:
    """A reason to end a run cleanly.

    Attributes:
        why: in a word.
        code: the exit code of a run that ended for it.
        insists: whether it ends a run at once that is stopping already.
    """

    why: str
    code: int
    insists: bool = False


TIME = Stop("time", 0)
"""The time limit is near."""
OVERTIME = Stop("overtime", 1, insists=True)
"""The time limit is near, and the ranks have not ended their step."""


class StopRequests:
    """The stops that came, in order. ``with listening()`` takes signals.

    Args:
        signals: what each signal means.
        deadlines: epoch seconds at which a stop comes by itself.
        now: the clock.
    """

    def __init__(
        self,
        signals: Mapping[int, Stop],
        deadlines: Mapping[Stop, float] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._signals = signals
        self._deadlines: Mapping[Stop, float] = dict(deadlines or {})
        self._now = now
        self._came: list[Stop] = []

    def move_deadlines(self, deadlines: Mapping[Stop, float]) -> None:
        """Have the stops that did not come yet come at other times; from any thread."""
        self._deadlines = dict(deadlines)

    def came(self) -> list[Stop]:
        """Those that came, repetitions of one that does not insist left out."""
        for stop, at in self._deadlines.items():
            if stop not in self._came and self._now() >= at:
                self._came.append(stop)
        return self._came

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; call it in the main thread."""
        previous = {number: signal.signal(number, self._note) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        stop = self._signals[number]
        if stop.insists or stop not in self._came:
            self._came.append(stop)


def terminal_stops() -> StopRequests:
    """Of a run that a user started: Ctrl-C, SIGTERM and SIGHUP, each with a shell's exit code."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return StopRequests({n: Stop("interrupted", 128 + n, insists=True) for n in numbers})
