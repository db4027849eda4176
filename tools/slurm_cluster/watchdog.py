"""A process that ends a cluster if the cluster's owner is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.slurm_cluster.network import Network

_REPOSITORY = Path(__file__).resolve().parents[2]
_PROGRAM = "tools.slurm_cluster.watchdog_process"
DONE = b"done"
"""The owner's message if the cluster has ended already."""


class Watchdog:
    """The owner's end of a pipe to the watchdog's process. The pipe closes when the owner ends for any reason."""

    def __init__(self, root: Path, network: Network | None, nodes: Sequence[str]) -> None:
        subnet = str(network.subnet) if network else "none"
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(root), subnet, *nodes],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal doesn't reach it
        )

    def dismiss(self) -> None:
        """Let the watchdog's process end without clearing the cluster."""
        self._process.communicate(DONE)
