"""Check that a node of a cluster can read a recipe's paths.

    python -m megatron_dppo.cluster.rehearsal.paths KEY=PATH ...

One task runs on each node of a job. If a path is missing on a task's node, the exit code is 2, and a line names the
node, the recipe's key and the path.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dppo.config.data_files import data_files
from megatron_dppo.logging import REFUSED
from megatron_dppo.system.secret_variables import hide_secrets

MODULE = "megatron_dppo.cluster.rehearsal.paths"
CHECKPOINT = "model.hf_checkpoint"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every path and return the exit code."""
    hide_secrets()
    words = sys.argv[1:] if arguments is None else arguments
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    faults = list(path_faults(words))
    for fault in faults:
        print(f"FAILED on node {node}: {fault}", flush=True)
    return REFUSED if faults else 0


def path_faults(words: Sequence[str]) -> Iterator[str]:
    """Report each ``KEY=PATH`` whose path can't be read on this node."""
    for word in words:
        key, _, path = word.partition("=")
        if key == CHECKPOINT:
            if not (Path(path) / "config.json").is_file():
                yield f"{key}: got {path!r}, expected a folder with a config.json that every node sees"
        elif (expected := data_files(path).fault) is not None:
            yield f"{key}: got {path!r}, expected {expected}, on every node"


if __name__ == "__main__":
    sys.exit(main())
