"""The watchdog's process: ``python -m tools.slurm_cluster.watchdog_process ROOT SUBNET NODE...``.

Its standard input is a pipe from the cluster's owner.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.slurm_cluster.clearing import clear
from tools.slurm_cluster.network import Network
from tools.slurm_cluster.watchdog import DONE


def main(root: str, subnet: str, *nodes: str) -> None:
    """Wait for the owner's end, and clear the cluster unless the owner sent DONE."""
    if sys.stdin.buffer.read() != DONE:
        clear(Path(root), None if subnet == "none" else Network(int(subnet)), nodes)


if __name__ == "__main__":
    main(*sys.argv[1:])
