"""Clean stop: SIGTERM sets a flag, which the loop reads at its next safe point.

The supervisor turns Ctrl-C into SIGTERM.
"""

from __future__ import annotations

import signal
from types import FrameType


class RunStoppedError(Exception):
    """All ranks agreed to stop; the state is the one after the last completed step."""


class StopFlag:
    """Flag that SIGTERM sets; call it to read.

    The signal reaches ranks at different times, so they must agree before they stop.
    """

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> StopFlag:
        """Handle SIGTERM and ignore SIGINT, which a terminal sends to all processes of the run."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True

    def __call__(self) -> bool:
        return self.requested
