"""Recordings that a server has finished and nobody has fetched yet: files in shared memory."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron_dppo.engine.recordings.notice import Notice, content_hash
from megatron_dppo.system.scratch import SHARED_MEMORY, free_bytes, private_name

FOLDER_VARIABLE = "MEGATRON_DPPO_RECORDINGS"
"""The folder, in the environment of a server's processes."""
KEPT_S = 900.0
"""A recording that was not fetched for so long belongs to an answer that nobody waits for."""
NARROWEST = 256
"""Experts that a byte can name."""
_ID = re.compile(r"[0-9a-f]{32}")


@contextmanager
def recordings_folder() -> Iterator[Path | None]:
    """A folder of this process in shared memory that its user alone can enter, named in the environment.

    None where shared memory can't be written; recordings then stay in the answers. What a killed
    process leaves is found by its name (``system.runtime_directory.remove_left_behind``).
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{private_name()}routing-", dir=SHARED_MEMORY))
    except OSError:
        yield None
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        del os.environ[FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def path_of(folder: Path, recording: str) -> Path | None:
    """The file of a recording; None where ``recording`` is no id."""
    return folder / recording if _ID.fullmatch(recording) else None


def narrowed(routed: np.ndarray) -> np.ndarray | None:
    """``routed`` as uint8, or uint16 where a byte can't name the largest; None where neither can."""
    low, high = (int(routed.min()), int(routed.max())) if routed.size else (0, 0)
    if low < 0 or high > np.iinfo(np.uint16).max:
        return None
    return routed.astype(np.uint8 if high < NARROWEST else np.uint16)


class RecordingStore:
    """Writes recordings to ``folder``, while shared memory may be taken (``free_bytes``); what is older
    than ``kept_s`` goes.

    Args:
        clock: seconds that only grow.
    """

    def __init__(
        self, folder: Path, kept_s: float = KEPT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._kept_s = kept_s
        self._clock = clock
        self._written: dict[str, float] = {}

    def put(self, routed: np.ndarray) -> Notice | None:
        """Keep a recording [rows, layers, experts a token]; None where there is no room for it, or it is none."""
        self._forget_old()
        array = narrowed(routed)
        if array is None or array.nbytes > free_bytes(self._folder):
            return None
        name = secrets.token_hex(16)
        path = self._folder / name
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(array.data)
        except OSError:
            path.unlink(missing_ok=True)
            return None
        self._written[name] = self._clock()
        rows, layers, top_k = array.shape
        digest = content_hash(array)
        return Notice(name, str(self._folder), array.dtype.name, (rows, layers, top_k), digest)

    def _forget_old(self) -> None:
        limit = self._clock() - self._kept_s
        for name in [n for n, written in self._written.items() if written < limit]:
            del self._written[name]
            (self._folder / name).unlink(missing_ok=True)
