"""Named points at which a test makes this process fail: before and after each durable step, and in each phase of an
update.

``failpoint("checkpoint/publish")`` does nothing unless the variable MEGATRON_DPPO_FAILPOINT names the point::

    MEGATRON_DPPO_FAILPOINT=checkpoint/publish,kill,3     the third time that the point is reached

    kill     the process ends by SIGKILL
    error    OSError: no space left on device
    delay    the process sleeps for a second
    torn     half of what was written is there, then the process ends by SIGKILL; where nothing is written, as ``kill``
    record   with a file's path in place of the number: append the name of each point that is reached, and after it
             TORN where something was written that can be torn

Several plans are separated by semicolons. A plan may have a file's path behind the number: a failure appends its plan
to that file first.

``tools/faults/failpoints.py`` runs all of them.
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
_reached = Counter[str]()
"""How often the point of each plan was reached."""
_NUMBERS = re.compile(r"[0-9a-f]{12,}|\d+")


def failpoint(name: str, tear: Callable[[], None] | None = None) -> None:
    """Fail here if the environment names this point, the kind of failure, and this occurrence of the point.

    ``tear`` undoes half of the last write; called before a torn write ends the process.
    """
    for plan in os.environ.get(VARIABLE, "").split(";"):
        if plan:
            _act(plan, name, tear)


def file_failpoint(stage: str, file_name: str, tear: Callable[[], None] | None = None) -> None:
    """Call ``failpoint`` for a stage of writing a file. Numbers and hexadecimal names of files
    are "#" in the name of the point."""
    if VARIABLE in os.environ:
        failpoint(f"{stage}/{_NUMBERS.sub('#', file_name)}", tear)


def keep_half(file: IO[bytes]) -> None:
    """Cut an open file to half of its bytes, on the disk."""
    file.flush()
    os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
    os.fsync(file.fileno())


def write_whole(stage: str, file_name: str, file: IO[str], text: str) -> None:
    """Write ``text``; at a torn point only its first half."""

    def write_half() -> None:
        file.write(text[: len(text) // 2])
        file.flush()

    file_failpoint(stage, file_name, write_half)
    file.write(text)


def _act(plan: str, name: str, tear: Callable[[], None] | None) -> None:
    planned_name, kind, occurrence, *note_path = plan.split(",", 3)
    if kind == "record":
        _append(Path(occurrence), name if tear is None else name + TORN)
        return
    if name != planned_name:
        return
    with _lock:
        _reached[plan] += 1
        if _reached[plan] != int(occurrence):
            return
    if note_path:
        _append(Path(note_path[0]), plan)
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
