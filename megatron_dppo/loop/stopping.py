"""A clean stop: SIGTERM asks (Ctrl-C arrives as one, through the supervisor); the loop obeys at its next safe point."""

from __future__ import annotations

import signal
from types import FrameType


class RunStoppedError(Exception):
    """All ranks agreed to stop; the state is that of the last completed step."""


class StopFlag:
    """Set by SIGTERM. Ranks must agree on it before they act, since the signal reaches them at different moments."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> StopFlag:
        """Take over SIGTERM and leave SIGINT to the supervisor: a terminal sends it to everyone."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True

    def __call__(self) -> bool:
        return self.requested
