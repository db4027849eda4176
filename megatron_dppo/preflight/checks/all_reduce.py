"""A short all-reduce, among a node's GPUs and among all nodes, with its bandwidth."""

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

from megatron_dppo.preflight.checks.base import CheckError, Site
from megatron_dppo.preflight.checks.network import reachable_interface
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import EVERYWHERE, Finding
from megatron_dppo.preflight.needs import Needs
from megatron_dppo.system.network import free_port
from megatron_dppo.system.processes import kill_families, start_process, tail

_TOPIC, _MASTER = "interface", "master"
_WORKER = "megatron_dppo.preflight.all_reduce_worker"
_TIMEOUT_S = 120.0
_SLOW = 0.5
"""A node whose own GPUs exchange less than this share of the median node's bandwidth is ill."""


def collect(site: Site) -> dict[str, Any]:
    """Bandwidths in GB/s, or ``failed`` with the last lines of the process that failed first."""
    network = site.told.get("network", {})
    if "reached" not in network:
        raise CheckError("the network was not checked, which tells the interface to use")
    site.meeting.say(_TOPIC, network)
    heard = site.meeting.hear(_TOPIC)
    hosts, here = sorted(heard), site.meeting.host
    processes = max(1, site.needs.gpus)
    if len(hosts) * processes == 1:
        return {"skipped": "one process has nobody to exchange with"}
    interface = reachable_interface(heard, here)
    if interface is None:
        raise CheckError("no interface of this node has an address")
    if here == hosts[0]:
        address = network["interfaces"][interface]
        site.meeting.say(_MASTER, {"address": address, "port": free_port("0.0.0.0")})
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
    first_rank = hosts.index(here) * processes
    return {"interface": interface} | _run_workers(environment, first_rank, processes)


def _master(site: Site, first: str) -> dict[str, Any]:
    deadline = time.monotonic() + site.meeting.timeout_s
    while time.monotonic() < deadline:
        if first in (told := site.meeting.read(_MASTER)):
            return told[first]
        time.sleep(0.05)
    raise CheckError(f"{first} does not say where the processes meet")


def _run_workers(environment: Mapping[str, str], first_rank: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{index}.out" for index in range(count)]
        workers = []
        for index, path in enumerate(outputs):
            own = {"RANK": str(first_rank + index), "LOCAL_RANK": str(index)}
            with path.open("wb") as file:
                command = [sys.executable, "-W", "ignore", "-m", _WORKER]
                variables = {**environment, **own}
                workers.append(start_process(command, environment=variables, output=file.fileno()))
        failed = _first_failure(workers)
        if failed is not None:
            code = workers[failed].returncode
            why = "does not end" if code is None else f"exits with code {code}"
            kill_families(workers)
            return {"failed": f"process {failed} {why}: {tail(outputs[failed], 3)[-500:]}"}
        return json.loads(outputs[0].read_text().splitlines()[-1])


def _first_failure(workers: list[subprocess.Popen[bytes]]) -> int | None:
    """Index of the worker that failed or does not end in time; None when all ended well."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            return next(index for index, code in enumerate(codes) if code)
        if None not in codes:
            return None
        time.sleep(0.05)
    return next(index for index, worker in enumerate(workers) if worker.poll() is None)


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """It worked, and no node's own GPUs are far slower than the others'."""
    failed = {host: told["failed"] for host, told in evidence.items() if "failed" in told}
    everywhere = len(failed) == len(evidence)
    for host, why in failed.items():
        yield Finding(EVERYWHERE if everywhere else host, "all-reduce", why, "a result")
        if everywhere:  # of a collective that fails as a whole one report is enough
            break
    speeds = {h: told["node_gb_s"] for h, told in evidence.items() if told.get("node_gb_s")}
    usual = median(speeds.values()) if speeds else 0.0
    for host, speed in speeds.items():
        if speed < _SLOW * usual:
            expected = f"at least half of the nodes' median, {usual:.1f} GB/s"
            yield Finding(host, "all-reduce among its GPUs", f"{speed:.1f} GB/s", expected)
