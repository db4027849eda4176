"""Wall-clock seconds of a step by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_dppo.metrics import table

OTHER = "other"


class PhaseTimer:
    """Splits wall-clock time into named, disjoint phases: ``with timer("generate"): ...``.

    An inner phase stops the clock of the outer one; time outside all phases counts as ``other``. So the phases of a
    step sum to the time since the end of the step before. A block that raises is counted too. Not thread-safe.
    ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock()
        self._open: list[str] = []
        self._step: defaultdict[str, float] = defaultdict(float)
        self._total: defaultdict[str, float] = defaultdict(float)

    def _credit(self) -> None:
        """Add the seconds since the last change of phase to the running phase."""
        current_time = self._clock()
        phase = self._open[-1] if self._open else OTHER
        self._step[phase] += current_time - self._mark
        self._total[phase] += current_time - self._mark
        self._mark = current_time

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
        """Return the seconds by phase since the last call, as metrics: ``{"time/generate_s": 7.1, ...}``.

        The step's clock starts anew. The time of a phase that is still open is split at this call.
        """
        self._credit()
        seconds = {table.phase_seconds(phase): value for phase, value in self._step.items()}
        self._step.clear()
        return seconds

    @property
    def total(self) -> dict[str, float]:
        """Seconds by phase since construction."""
        self._credit()
        return dict(self._total)
