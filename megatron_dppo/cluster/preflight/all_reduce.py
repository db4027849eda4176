"""The check of an all-reduce among a node's GPUs and among all nodes: its sum and its bandwidth.

Each node starts one ``all_reduce_process`` per GPU, or one without GPUs.
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
    Evidence,
    Finding,
    Needs,
    Site,
)
from megatron_dppo.cluster.preflight.network import reachable_interface
from megatron_dppo.system.network import free_port
from megatron_dppo.system.processes import kill_families, start_process, tail

_INTERFACE, _MASTER = "interface", "master"
_POLL_S = 0.05
_ALL_REDUCE_S = 120.0
_WORKER = "megatron_dppo.cluster.preflight.all_reduce_process"
_SLOW = 0.5
"""A node is unfit whose own GPUs exchange less than this share of the median node's bandwidth."""


def collect_all_reduce(site: Site) -> dict[str, Any]:
    """Measure bandwidths in GB/s, among a node's GPUs and among all nodes.

    The result has ``failed`` instead, with the last lines of the process that failed first, where one fails.
    """
    meeting = site.meeting
    network = site.evidence.get("network", {})
    if "reached" not in network:
        raise CheckError("the network was not checked, which tells the interface to use")
    meeting.say(_INTERFACE, network)
    networks = meeting.hear(_INTERFACE)
    hosts = sorted(networks)
    processes = max(1, site.needs.gpus)
    if len(hosts) * processes == 1:
        return {"skipped": "one process has nobody to exchange with"}
    interface = reachable_interface(networks, meeting.host)
    if interface is None:
        raise CheckError("no interface of this node has an address")
    if meeting.host == hosts[0]:
        address = network["interfaces"][interface]
        meeting.say(_MASTER, {"address": address, "port": free_port("0.0.0.0")})
    master = _master(site, hosts[0])
    environment = os.environ | {
        "MASTER_ADDR": master["address"],
        "MASTER_PORT": str(master["port"]),
        "WORLD_SIZE": str(len(hosts) * processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "PREFLIGHT_BACKEND": "nccl" if site.needs.gpus else "gloo",
    }
    first_rank = hosts.index(meeting.host) * processes
    return {"interface": interface} | _run_workers(environment, first_rank, processes)


def _master(site: Site, first_host: str) -> dict[str, Any]:
    deadline = time.monotonic() + site.meeting.timeout_s
    while time.monotonic() < deadline:
        if first_host in (masters := site.meeting.read(_MASTER)):
            return masters[first_host]
        time.sleep(_POLL_S)
    raise CheckError(f"{first_host} does not say where the processes meet")


def _run_workers(environment: Mapping[str, str], first_rank: int, count: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", _WORKER]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{index}.out" for index in range(count)]
        workers = []
        for index, path in enumerate(outputs):
            ranks = {"RANK": str(first_rank + index), "LOCAL_RANK": str(index)}
            with path.open("wb") as file:
                workers.append(
                    start_process(
                        command,
                        environment={**environment, **ranks},
                        output=file.fileno(),
                    )
                )
        failed = _first_failure(workers)
        if failed is not None:
            code = workers[failed].returncode
            reason = "does not end"
            if code is not None:
                reason = f"exits with code {code}"
            # The other workers wait for this one in the collective.
            kill_families(workers)
            return {"failed": f"process {failed} {reason}: {tail(outputs[failed], 3)[-500:]}"}
        return json.loads(outputs[0].read_text().splitlines()[-1])


def _first_failure(workers: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the index of the worker that failed or does not end in time; None when all ended without error."""
    deadline = time.monotonic() + _ALL_REDUCE_S
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            return next(index for index, code in enumerate(codes) if code)
        if None not in codes:
            return None
        time.sleep(_POLL_S)
    return next(index for index, worker in enumerate(workers) if worker.poll() is None)


def judge_all_reduce(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Report a failed all-reduce, and nodes whose own GPUs are far slower than those of others."""
    failed = {host: entry["failed"] for host, entry in evidence.items() if "failed" in entry}
    everywhere = len(failed) == len(evidence)
    for host, reason in failed.items():
        yield Finding(EVERYWHERE if everywhere else host, "all-reduce", reason, "a result")
        # One report is enough for a collective that fails on all nodes.
        if everywhere:
            break
    speeds = {h: entry["node_gb_s"] for h, entry in evidence.items() if entry.get("node_gb_s")}
    usual = median(speeds.values()) if speeds else 0.0
    for host, speed in speeds.items():
        if speed < _SLOW * usual:
            expectation = f"at least half of the nodes' median, {usual:.1f} GB/s"
            yield Finding(host, "all-reduce among its GPUs", f"{speed:.1f} GB/s", expectation)
