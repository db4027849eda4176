"""End a cluster of which only the folder is known."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tools.slurm_cluster.leftovers import end_process, processes_of, remove_cgroups
from tools.slurm_cluster.network import Network

_END_S = 5.0


def clear(root: Path, network: Network | None, nodes: Sequence[str]) -> None:
    """End every process of a cluster, remove its network, its control groups and its folder.

    It is no error if a part is gone already.
    """
    for pid_file in (root / "slurmctld.pid", root / "munge" / "munged.pid"):
        end_process(pid_file)
    # Repeat until three looks in a row find no process: a look may miss a process that is forked while /proc is read.
    deadline, seen_none = time.monotonic() + _END_S, 0
    while seen_none < 3 and time.monotonic() < deadline:
        left = processes_of(root / "etc" / "slurm.conf")
        seen_none = 0 if left else seen_none + 1
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for node in nodes:
        remove_cgroups(node)
    if network is not None:
        network.remove(range(1, len(nodes) + 1))
    shutil.rmtree(root, ignore_errors=True)
