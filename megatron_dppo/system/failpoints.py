"""Failpoints: named points at which a test makes this process fail.

There are points before and after each durable step, and in each phase of a weight update.
``failpoint("checkpoint/publish")`` does nothing unless the environment variable MEGATRON_DPPO_FAILPOINT has a plan
``POINT,KIND,NUMBER`` for this point::

    MEGATRON_DPPO_FAILPOINT=checkpoint/publish,kill,3     fail the third time that the point is reached

    kill     the process ends by SIGKILL
    error    OSError: no space left on device
    delay    the process sleeps for a second
    torn     the last write is cut to its first half, then the process ends by SIGKILL. At a point without a write,
             ``torn`` is the same as ``kill``
    record   no failure: every point that is reached appends its name to a file. The plan is ``POINT,record,PATH`` with
             the file PATH; POINT is ignored. If ``torn`` can cut a write at the point, ``(torn)`` follows the name

Several plans are separated by semicolons. A plan ``POINT,KIND,NUMBER,PATH`` appends itself to the file PATH before it
fails. ``tools/faults/failpoints.py`` makes every point fail in turn.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO

VARIABLE = "MEGATRON_DPPO_FAILPOINT"
TORN = " (torn)"
KINDS = ("kill", "error", "delay", "torn")
DELAY_S = 1.0
_lock = threading.Lock()
_times_reached = Counter[str]()
"""Plan -> number of times that its point was reached."""
_NUMBERS = re.compile(r"[0-9a-f]{12,}|\d+")


def failpoint(name: str, tear: Callable[[], None] | None = None) -> None:
    """Fail here if the environment has a plan for this point, and the point has been reached as often as planned.

    ``tear`` cuts the last write to its first half; None if nothing was written. It is called before ``torn`` ends the
    process.
    """
    for plan in os.environ.get(VARIABLE, "").split(";"):
        if plan:
            _act(plan, name, tear)


def file_failpoint(stage: str, file_name: str, tear: Callable[[], None] | None = None) -> None:
    """Call ``failpoint`` for a stage of writing a file, for example ``rename``.

    The point is ``STAGE/FILE NAME`` with # in place of each number and hexadecimal id, so that the points of two runs
    have equal names.
    """
    if VARIABLE in os.environ:
        failpoint(f"{stage}/{_NUMBERS.sub('#', file_name)}", tear)


def keep_half(file: IO[bytes]) -> None:
    """Cut an open file on the disk to the first half of its bytes."""
    file.flush()
    os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
    os.fsync(file.fileno())


def write_whole(stage: str, file_name: str, file: IO[str], text: str) -> None:
    """Write ``text``; only its first half if a plan tears this write."""

    def write_half() -> None:
        file.write(text[: len(text) // 2])
        file.flush()

    file_failpoint(stage, file_name, write_half)
    file.write(text)


def _act(plan: str, name: str, tear: Callable[[], None] | None) -> None:
    planned_name, kind, number_or_path, *log_path = plan.split(",", 3)
    if kind == "record":
        line = name
        if tear is not None:
            line += TORN
        _append(Path(number_or_path), line)
        return
    if name != planned_name:
        return
    with _lock:
        _times_reached[plan] += 1
        if _times_reached[plan] != int(number_or_path):
            return
    if log_path:
        _append(Path(log_path[0]), plan)
    if kind == "delay":
        time.sleep(DELAY_S)
    elif kind == "error":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {name}")
    else:
        if kind == "torn" and tear is not None:
            tear()
        os.kill(os.getpid(), signal.SIGKILL)


def _append(path: Path, line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
