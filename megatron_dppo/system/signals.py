"""The signals that end a program, and a block that they wait for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Have those signals wait until the block's end, also for the programs that it starts; what is ignored stays
    ignored (nohup). Main thread only.

    Programs inherit the mask. It holds for this thread alone, and another one, of a library, may take a signal
    that is meant for the process: so the handlers only note it until the end.
    """
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    handlers = {
        number: signal.signal(number, lambda n, _: came.append(n))
        for number in ENDING_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for noted in came:
            signal.raise_signal(noted)
