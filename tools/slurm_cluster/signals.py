"""Signals that end a program with a cluster: the program then ends the cluster in order."""

from __future__ import annotations

import signal
from types import FrameType

from megatron_dppo.system.processes import ENDING_SIGNALS


class Interrupted(KeyboardInterrupt):
    """This process received Ctrl-C, SIGTERM or SIGHUP. ``code``: a shell's exit code for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.code = 128 + number


def raise_interrupted() -> None:
    """Make ENDING_SIGNALS raise Interrupted in the main thread from now on. Signals that the caller ignores
    stay ignored (nohup)."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
