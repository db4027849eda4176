"""The calls of one trainer rank in a weight update, timed by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.weights.engines import ENGINE_FAULTS

P = ParamSpec("P")
T = TypeVar("T")


class Phases:
    """One rank's calls of an update, timed by phase. After a call fails with one of ENGINE_FAULTS, no further call
    runs.

    Attributes:
        error: the exception of the call that failed, or None.
        seconds: wall time by phase.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(
        self, phase: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T | None:
        """Return the result of ``call``; None if it fails, or if an earlier call failed."""
        if self.error is not None:
            return None
        with self.timed(phase):
            try:
                failpoint(f"update/{phase}")
                return call(*arguments, **options)
            except ENGINE_FAULTS as error:
                self.error = error
                return None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start
