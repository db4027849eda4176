"""Nodes that meet in a folder: each says something, and reads what all others said.

This is the shared filesystem's first test as well: a file is written under another name, renamed, and
must be seen by all others. No locks: new names, renames and exclusive creation are all it takes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.system.files import write_atomically

_POLL_S = 0.05


class Meeting:
    """One node's place among ``count``.

    Args:
        folder: seen by all nodes under this path.
        host: this node's name.
        count: nodes that take part.
        timeout_s: longest wait for the others in each round.
    """

    def __init__(self, folder: Path, host: str, count: int, timeout_s: float) -> None:
        self.host = host
        self.count = count
        self.timeout_s = timeout_s
        self._folder = folder / "meeting"

    def say(self, topic: str, content: Mapping[str, Any]) -> None:
        """Publish this node's word on a topic."""
        folder = self._folder / topic
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / self.host, json.dumps(content))

    def hear(self, topic: str) -> dict[str, Any]:
        """What every node said on it, by host; fewer than ``count`` where the others are late."""
        folder = self._folder / topic
        deadline = time.monotonic() + self.timeout_s
        while len(_names(folder)) < self.count and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.read(topic)

    def read(self, topic: str) -> dict[str, Any]:
        """What has been said on it so far, by host.

        The folder is listed first: on NFS that refreshes what this node remembers of its names.
        """
        folder = self._folder / topic
        return {name: json.loads((folder / name).read_text()) for name in sorted(_names(folder))}

    def is_first(self, name: str) -> bool:
        """Whether this node was the one that created a file which must not exist before."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def _names(folder: Path) -> list[str]:
    """Names of complete files; one that is being written begins with a dot."""
    if not folder.is_dir():
        return []
    return [name for name in os.listdir(folder) if not name.startswith(".")]
