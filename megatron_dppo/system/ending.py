"""The end of a process that native threads still work in."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn


def end_now(code: int) -> NoReturn:
    """Run the exit handlers, flush the logs and both standard streams, and end without the interpreter's shutdown.

    As ``multiprocessing`` ends its children. A daemon thread that is in native code while the interpreter
    shuts down, such as what watches the collectives, aborts the process when it comes back to Python.
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
