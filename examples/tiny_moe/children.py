"""Child processes that may shut down cleanly when the user presses Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence


def run_to_the_end(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run ``command`` and return its exit code; Ctrl-C does not cut it short.

    A terminal sends Ctrl-C to parent and child. ``subprocess.run`` would then kill the child after
    0.25 s; here the parent ignores it and waits until the child has saved its state and ended.
    """
    # Started before SIGINT is ignored: a child inherits ignored signals.
    process = subprocess.Popen(command, env=env)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
