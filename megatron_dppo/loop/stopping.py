"""Clean stop: SIGTERM, or a file, sets a flag, which the loop reads at its next safe point.

The supervisor turns Ctrl-C into SIGTERM; under Slurm, where ranks run on other hosts, it writes the file.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

from megatron_dppo.system.processes import STOP_FILE_VARIABLE, StopFile


class RunStoppedError(Exception):
    """All ranks agreed to stop; the state is the one after the last completed step."""


class StopFlag:
    """Flag that SIGTERM, or the file that the environment names, sets; call it to read.

    Either reaches ranks at different times, so they must agree before they stop.
    """

    def __init__(self) -> None:
        self.requested = False
        path = os.environ.get(STOP_FILE_VARIABLE)
        self._file = None if path is None else StopFile(Path(path))

    def install(self) -> StopFlag:
        """Handle SIGTERM and ignore SIGINT, which a terminal sends to all processes of the run."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True

    def __call__(self) -> bool:
        return self.requested or (self._file is not None and self._file())
