"""The check of an all-reduce among a node's GPUs and among all nodes: its sum and its bandwidth.

Each node starts one ``all_reduce_process`` for each GPU. A node without GPUs starts one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dppo.cluster.preflight.evidence import (
    EVERYWHERE,
    CheckError,
    EvidenceByHost,
    Finding,
    Needs,
    Site,
)
from megatron_dppo.cluster.preflight.network import reachable_interface
from megatron_dppo.system.ports import free_port
from megatron_dppo.system.processes import kill_families, start_process, tail

# Topics of ``Site.meeting``, by which the nodes exchange files: each node's interfaces, and the address of rank 0.
_INTERFACE, _MASTER = "interface", "master"
_POLL_S = 0.05
_ALL_REDUCE_S = 120.0
_MODULE = "megatron_dppo.cluster.preflight.all_reduce_process"
_LEAST_SHARE = 0.5
"""A node is unfit if the bandwidth among its GPUs is less than this share of the nodes' median."""


def collect_all_reduce(site: Site) -> dict[str, Any]:
    """Collect the interface that was used, and bandwidths in GB/s: among this node's GPUs, and among all nodes.

    If a process fails, the evidence has ``failed`` in place of bandwidths: the last lines of the process that failed
    first.
    """
    meeting = site.meeting
    network = site.evidence.get("network", {})
    if "reached" not in network:
        raise CheckError(
            "the check of the network, which finds the interface to use, did not succeed"
        )
    meeting.write(_INTERFACE, network)
    networks = meeting.wait_for_all(_INTERFACE)
    hosts = sorted(networks)
    process_count = max(1, site.needs.gpus)
    world_size = len(hosts) * process_count
    if world_size == 1:
        return {"skipped": "there is only one process"}
    interface = reachable_interface(networks, meeting.host)
    if interface is None:
        raise CheckError("no interface of this node has an address")
    if meeting.host == hosts[0]:
        address = network["interfaces"][interface]
        meeting.write(_MASTER, {"address": address, "port": free_port("0.0.0.0")})
    masters = meeting.wait_until(_MASTER, lambda contents: hosts[0] in contents)
    if hosts[0] not in masters:
        raise CheckError(f"{hosts[0]} has not written where the processes meet")
    master = masters[hosts[0]]
    environment = os.environ | {
        "MASTER_ADDR": master["address"],
        "MASTER_PORT": str(master["port"]),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(process_count),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "PREFLIGHT_BACKEND": "nccl" if site.needs.gpus else "gloo",
    }
    first_rank = hosts.index(meeting.host) * process_count
    return {"interface": interface} | _run_processes(environment, first_rank, process_count)


def _run_processes(environment: Mapping[str, str], first_rank: int, count: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", _MODULE]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{index}.out" for index in range(count)]
        processes = []
        for index, path in enumerate(outputs):
            ranks = {"RANK": str(first_rank + index), "LOCAL_RANK": str(index)}
            with path.open("wb") as file:
                process = start_process(
                    command, environment={**environment, **ranks}, output=file.fileno()
                )
                processes.append(process)
        failed_index = _first_failure(processes)
        if failed_index is None:
            return json.loads(outputs[0].read_text().splitlines()[-1])
        code = processes[failed_index].returncode
        reason = "does not end" if code is None else f"exits with code {code}"
        # The other processes wait for the failed process in the collective.
        kill_families(processes)
        last_lines = tail(outputs[failed_index], 3)[-500:]
        return {"failed": f"process {failed_index} {reason}: {last_lines}"}


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the index of the first process that failed or does not end in time; None if all end without error."""
    deadline = time.monotonic() + _ALL_REDUCE_S
    while True:
        # Read the clock before the codes, so that a process that ends in time is not judged late.
        is_late = time.monotonic() >= deadline
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code:
                return index
        if None not in codes:
            return None
        if is_late:
            return codes.index(None)
        time.sleep(_POLL_S)


def judge_all_reduce(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report a failed all-reduce, and nodes whose bandwidth among GPUs is far below the median of all nodes."""
    reasons = {host: entry["failed"] for host, entry in evidence.items() if "failed" in entry}
    is_everywhere = len(reasons) == len(evidence)
    for host, reason in reasons.items():
        place = EVERYWHERE if is_everywhere else host
        yield Finding(place, "all-reduce", actual=reason, expected="a result")
        # One finding is enough for a collective that fails on all nodes.
        if is_everywhere:
            break
    speeds = {h: entry["node_gb_s"] for h, entry in evidence.items() if entry.get("node_gb_s")}
    if not speeds:
        return
    median_speed = median(speeds.values())
    expectation = f"at least half of the nodes' median, {median_speed:.1f} GB/s"
    for host, speed in speeds.items():
        if speed < _LEAST_SHARE * median_speed:
            yield Finding(host, "all-reduce among its GPUs", f"{speed:.1f} GB/s", expectation)
