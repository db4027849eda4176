"""Signals that end a program which owns a cluster: in order, and never between a resource and its owner."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP came; ``code`` is a shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.code = 128 + number


def raise_interrupted() -> None:
    """Have those signals raise Interrupted in the main thread from here on; what the caller ignores stays
    ignored (nohup)."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def held_back() -> Iterator[None]:
    """Have those signals wait until the block's end, for this thread and the commands that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
