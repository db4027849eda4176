"""Ends a cluster whose owner was killed before it could.

A process of its own: ``python -m tools.slurm_cluster.watchdog ROOT SUBNET NODE...``. Its standard
input is a pipe from the owner, which closes when the owner ends, however it does.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.slurm_cluster.clearing import clear
from tools.slurm_cluster.network import Network

_REPOSITORY = Path(__file__).resolve().parents[2]
_DONE = b"done"


class Watchdog:
    """The owner's end of the pipe."""

    def __init__(self, root: Path, network: Network | None, nodes: Sequence[str]) -> None:
        subnet = str(network.subnet) if network else "none"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.slurm_cluster.watchdog", str(root), subnet, *nodes],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal doesn't reach it
        )

    def dismiss(self) -> None:
        """Have it end without doing anything."""
        self._process.communicate(_DONE)


def main(root: str, subnet: str, *nodes: str) -> None:
    """Wait for the owner's end; clear the cluster unless it said that it is done."""
    if sys.stdin.buffer.read() != _DONE:
        clear(Path(root), None if subnet == "none" else Network(int(subnet)), nodes)


if __name__ == "__main__":
    main(*sys.argv[1:])
