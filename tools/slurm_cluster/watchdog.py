"""Ends a cluster whose owner was killed before it could."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.slurm_cluster.network import Network

_REPOSITORY = Path(__file__).resolve().parents[2]
_PROGRAM = "tools.slurm_cluster.watchdog_process"
DONE = b"done"
"""What the owner says where there is nothing left to end."""


class Watchdog:
    """The owner's end of a pipe to a process, which closes when the owner ends, however it does."""

    def __init__(self, root: Path, network: Network | None, nodes: Sequence[str]) -> None:
        subnet = str(network.subnet) if network else "none"
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(root), subnet, *nodes],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal doesn't reach it
        )

    def dismiss(self) -> None:
        """Have it end without doing anything."""
        self._process.communicate(DONE)
