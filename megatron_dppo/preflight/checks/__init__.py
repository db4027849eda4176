"""The table of checks: what each collects on a node, and what it expects of all nodes' evidence."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dppo.preflight.checks import (
    all_reduce,
    disk,
    gpus,
    host,
    memory,
    network,
    open_files,
    ports,
    pythons,
    shared_folder,
    toolkit,
)
from megatron_dppo.preflight.checks.base import Check

CHECKS: Mapping[str, Check] = {
    "host": Check(host.collect, host.judge),
    "gpus": Check(gpus.collect, gpus.judge),
    "memory": Check(memory.collect, memory.judge),
    "disk": Check(disk.collect, disk.judge),
    "open_files": Check(open_files.collect, open_files.judge),
    "ports": Check(ports.collect, ports.judge),
    "pythons": Check(pythons.collect, pythons.judge),
    "toolkit": Check(toolkit.collect, toolkit.judge),
    "shared_folder": Check(shared_folder.collect, shared_folder.judge),
    "network": Check(network.collect, network.judge),
    "all_reduce": Check(all_reduce.collect, all_reduce.judge),
}
"""By name, in the order in which a node goes through them; those that meet the other nodes come last."""
