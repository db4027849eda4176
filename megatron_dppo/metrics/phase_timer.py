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

    An inner phase stops the clock of the outer phase; time outside all phases counts as ``other``. So the seconds of a
    step's phases sum to the time since the end of the step before. The time of a block counts even if the block raises.
    Not thread-safe. ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_change = clock()
        self._open_phases: list[str] = []
        self._step_seconds: defaultdict[str, float] = defaultdict(float)

    def _credit(self) -> None:
        """Add the seconds since the last change of phase to the running phase."""
        current_time = self._clock()
        phase = OTHER
        if self._open_phases:
            phase = self._open_phases[-1]
        self._step_seconds[phase] += current_time - self._last_change
        self._last_change = current_time

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block's time as ``phase``."""
        self._credit()
        self._open_phases.append(phase)
        try:
            yield
        finally:
            self._credit()
            self._open_phases.pop()

    def finish_step(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, as metrics: ``{"time/generate_s": 7.1, ...}``.

        The step's clock starts anew. The time of a phase that is still open is split at this call.
        """
        self._credit()
        metrics: dict[str, float] = {}
        for phase, seconds in self._step_seconds.items():
            metrics[table.phase_seconds(phase)] = seconds
        self._step_seconds.clear()
        return metrics
