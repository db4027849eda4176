"""Child processes that may shut down cleanly when the user presses Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence


def run_to_the_end(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run ``command`` and return its exit code; what ends the parent does not cut it short.

    A terminal sends Ctrl-C, and SIGHUP when it closes, to parent and child. ``subprocess.run`` would then
    kill the child after 0.25 s; here the parent ignores it and waits until the child has saved its state and
    ended. SIGTERM, which comes to the parent alone, is passed on.
    """
    # Started before signals are ignored: a child inherits that.
    process = subprocess.Popen(command, env=env)
    handlers = {
        signal.SIGINT: signal.SIG_IGN,
        signal.SIGHUP: signal.SIG_IGN,
        signal.SIGTERM: lambda *_: process.terminate(),
    }
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
