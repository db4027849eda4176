"""One rank's steps of an update: timed, until the first that fails."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Steps:
    """``error``: of the step that failed; later ones are not taken. ``seconds``: by phase."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """``call``'s answer; None where it fails (RuntimeError, ValueError, OSError) or one has."""
        if self.error is not None:
            return None
        with self.timed(phase):
            try:
                return call(*arguments)
            except (OSError, RuntimeError, ValueError) as error:
                self.error = error
                return None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's duration to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start
