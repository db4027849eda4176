"""A file by which a process on one host asks those on others to stop.

It is written in place and never renamed: a file that is opened anew shows what was written before (NFS
keeps that for a file that it knows, but may hide for a minute that a new one has appeared).
"""

from __future__ import annotations

import time
from pathlib import Path

STOP_FILE_VARIABLE = "MEGATRON_DPPO_STOP_FILE"
"""Names the file in the environment of those that are asked."""
_STOP = "stop"
_LOOK_EVERY_S = 1.0


def ask_to_stop(path: Path) -> None:
    """Ask whoever watches ``path``."""
    path.write_text(_STOP, encoding="utf-8")


def withdraw_stop(path: Path) -> None:
    """Make the file, asking for nothing."""
    path.write_text("", encoding="utf-8")


class StopFile:
    """Watches a file; call it to learn whether a stop was asked for. Looks once a second at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = False
        self._next_look = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._asked and now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            self._asked = self._path.exists() and self._path.read_text(encoding="utf-8") == _STOP
        return self._asked
