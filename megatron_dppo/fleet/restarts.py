"""When a server that failed is started again: a little later each time, and only so often in a window."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """At most ``limit`` restarts of one server within any ``window_s`` seconds.

    Before the first one in a window it pauses for ``first_pause_s``, before each further one twice as
    long as before the last, and never longer than LONGEST_PAUSE_S.

    Args:
        limit: restarts within a window.
        window_s: its length in seconds.
        clock: tells the time in seconds.
        first_pause_s: before the first restart.
    """

    def __init__(
        self,
        limit: int,
        window_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.limit = limit
        self.window_s = window_s
        self.clock = clock
        self._first_pause = first_pause_s
        self._taken: list[float] = []

    def take(self) -> float | None:
        """Use up one restart: the seconds to wait before it, or None where the window has none left."""
        now = self.clock()
        self._taken = [at for at in self._taken if at > now - self.window_s]
        if len(self._taken) >= self.limit:
            return None
        pause = self.pause(len(self._taken))
        self._taken.append(now)
        return pause

    @property
    def taken(self) -> int:
        """Restarts in the window, at the time of the last ``take``."""
        return len(self._taken)

    def pause(self, before: int) -> float:
        """Seconds to wait where ``before`` attempts came to nothing."""
        return min(self._first_pause * 2.0 ** min(before, 30), LONGEST_PAUSE_S)
