"""The end of a process that native threads still work in."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn


def end_now(code: int) -> NoReturn:
    """Run the exit handlers, flush the logs and both standard streams, and end without the interpreter's shutdown.

    As ``multiprocessing`` ends its children. A thread of gloo or NCCL may hold a tensor for a moment after
    its collective has ended; one that lets go of it while the interpreter shuts down aborts the process.
    Whatever a ``with`` block must close is closed before.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk; the logs have said so
            continue
    os._exit(code)
