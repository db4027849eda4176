"""Where a step's seconds go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OTHER = "other"


class PhaseTimer:
    """Splits wall-clock time into named phases that never overlap: ``with timer("generate"): ...``.

    A phase inside another one stops the outer one's clock; time in no phase counts as ``other``.
    So the seconds of a step's phases add up to the seconds since the step before it ended. Time
    spent in a block that raises is counted. For one thread; ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock()
        self._open: list[str] = []
        self._step: defaultdict[str, float] = defaultdict(float)
        self._total: defaultdict[str, float] = defaultdict(float)

    def _credit(self) -> None:
        """Give the seconds since the last change of phase to the phase that is running."""
        now = self._clock()
        phase = self._open[-1] if self._open else OTHER
        self._step[phase] += now - self._mark
        self._total[phase] += now - self._mark
        self._mark = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block's time as ``phase``."""
        self._credit()
        self._open.append(phase)
        try:
            yield
        finally:
            self._credit()
            self._open.pop()

    def finish_step(self) -> dict[str, float]:
        """Seconds per phase since the last call, as metrics: ``{"time/generate_s": 7.1, ...}``.
        Starts anew.

        A phase that is still open gives what it has so far to this step and the rest to the next.
        """
        self._credit()
        seconds = {f"time/{phase}_s": value for phase, value in self._step.items()}
        self._step.clear()
        return seconds

    @property
    def total(self) -> dict[str, float]:
        """Seconds per phase since this timer was made, in this process."""
        self._credit()
        return dict(self._total)
