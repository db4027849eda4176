"""A child process that is allowed to end in its own way when the user presses Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence


def run_to_the_end(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """The exit code of ``command``, however long it takes.

    A terminal's Ctrl-C reaches parent and child alike. ``subprocess.run`` would then kill the child
    after a quarter of a second; here the child saves what it has and ends, and the parent waits.
    """
    process = subprocess.Popen(
        command, env=env
    )  # before SIGINT is ignored, or it would be there too
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
