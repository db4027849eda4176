"""A dead-man switch: a process that ends when the heartbeat of another one, on whatever host, stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

HEARTBEAT_VARIABLE = "MEGATRON_DPPO_HEARTBEAT"
"""Names the file that is renewed, in the environment of those that watch it."""
PATIENCE_VARIABLE = "MEGATRON_DPPO_HEARTBEAT_PATIENCE_S"
"""For how many seconds it may stand still: far longer than the time between two renewals, so that a file
system that hangs for a while ends nothing."""
_LOOK_EVERY_S = 5.0


class Heartbeat:
    """Tells how long the content of ``path`` has not changed, by this process's clock."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen = self._content()
        self._since = clock()

    def stands_still_s(self) -> float:
        """Seconds since it was last seen to change."""
        content = self._content()
        if content != self._seen:
            self._seen, self._since = content, self._clock()
        return self._clock() - self._since

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""


def when_it_stops(path: Path, act: Callable[[], None], patience_s: float) -> None:
    """Watch ``path`` from a thread of its own; ``act`` once its heartbeat has stopped."""

    def watch() -> None:
        heartbeat = Heartbeat(path)
        while heartbeat.stands_still_s() < patience_s:
            time.sleep(_LOOK_EVERY_S)
        act()

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()
