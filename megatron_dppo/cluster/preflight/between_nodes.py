"""Checks between nodes: visible files in the run directory, connections, and an all-reduce."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from megatron_dppo.cluster.preflight.evidence import (
    EVERYWHERE,
    CheckError,
    Evidence,
    Finding,
    Needs,
    Site,
    culprits,
)
from megatron_dppo.system.network import free_port
from megatron_dppo.system.processes import kill_families, start_process, tail

if TYPE_CHECKING:
    import torch

_CANARY, _REPLACED, _CONTEST = "canary", "replaced", "contest"
_LISTENING, _CONNECTED = "listening", "connected"
_INTERFACE, _MASTER = "interface", "master"
_POLL_S = 0.05
_CONNECT_S = 3.0
_ALL_REDUCE_S = 120.0
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_BYTES = {"nccl": 256 << 20, "gloo": 4 << 20}
_ROUNDS = 5
_WORKER = "from megatron_dppo.cluster.preflight.between_nodes import exchange; exchange()"
_SLOW = 0.5
"""A node is unfit whose own GPUs exchange less than this share of the median node's bandwidth."""


def collect_shared_folder(site: Site) -> dict[str, Any]:
    """Collect the nodes whose files this node saw, those whose replaced files it saw and when, and its exclusive
    creation.
    """
    meeting = site.meeting
    won = meeting.is_first(_CONTEST)
    meeting.say(_CANARY, _canary(meeting.host, "old"))
    # Read the file before it is replaced, so that this node may keep the old one in a cache.
    hosts = sorted(meeting.hear(_CANARY))
    meeting.say(_CANARY, _canary(meeting.host, "new"))
    meeting.say(_REPLACED, {})
    node_count = len(meeting.hear(_REPLACED))
    started = time.monotonic()
    while True:
        canaries = meeting.read(_CANARY)
        replaced = [host for host, canary in canaries.items() if canary == _canary(host, "new")]
        waited = time.monotonic() - started
        if len(replaced) >= node_count or waited > meeting.timeout_s:
            break
        time.sleep(_POLL_S)
    return {
        "seen": hosts,
        "replaced": replaced,
        "replaced_after_s": round(waited, 2),
        "won": won,
    }


def _canary(host: str, age: str) -> dict[str, str]:
    return {"host": host, "age": age}


def judge_shared_folder(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Report nodes that missed another node's last file, or more than one winner of the exclusive creation.

    The fewest nodes that explain all missed files are named.
    """
    missed: set[frozenset[str]] = set()
    for host, entry in evidence.items():
        missed |= {
            frozenset((host, other)) for other in evidence.keys() - {host, *entry["replaced"]}
        }
    for host, count in culprits(missed):
        observation = f"unseen or old with {count} of {len(evidence) - 1} other nodes, either way"
        yield Finding(
            host, f"{needs.run_directory}: files of others", observation, "seen, and replaced"
        )
    winners = [host for host in sorted(evidence) if evidence[host]["won"]]
    if evidence and len(winners) != 1:
        names = ", ".join(winners) or "nobody"
        subject = f"{needs.run_directory}: winner of exclusive creation"
        yield Finding(EVERYWHERE, subject, names, "one node")


def collect_network(site: Site) -> dict[str, Any]:
    """Collect this node's interfaces, and the addresses of each other node that accept a connection."""
    meeting = site.meeting
    interfaces = addresses()
    with _listening() as port:
        meeting.say(_LISTENING, {"addresses": interfaces, "port": port})
        reached: dict[str, list[str]] = {}
        for host, other in meeting.hear(_LISTENING).items():
            if host != meeting.host:
                port_of_other = other["port"]
                addresses_of_other = other["addresses"].items()
                reached[host] = [n for n, ip in addresses_of_other if _connects(ip, port_of_other)]
        meeting.say(_CONNECTED, {})
        # Other nodes may still be connecting.
        meeting.hear(_CONNECTED)
    return {"interfaces": interfaces, "reached": reached}


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that is up and no loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found_addresses: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries if name in up else ():
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                found_addresses[name] = entry.address
    return found_addresses


@contextmanager
def _listening() -> Iterator[int]:
    """Listen at a port of every address, accept connections and close them; yield the port."""
    with socket.create_server(("0.0.0.0", 0), backlog=512) as server:
        thread = threading.Thread(target=_accept, args=(server,), daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def _accept(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            # The socket was shut down: every node has connected.
            return
        connection.close()


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def judge_network(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Report nodes that can't reach another one; the fewest nodes that explain all failures are named."""
    broken: set[frozenset[str]] = set()
    for host, other in permutations(evidence, 2):
        if not evidence[host]["reached"].get(other):
            broken.add(frozenset((host, other)))
    for host, count in culprits(broken):
        observation = f"no connection with {count} of {len(evidence) - 1} other nodes"
        yield Finding(host, "network", observation, "a connection with each")


def reachable_interface(evidence: Mapping[str, Evidence], host: str) -> str | None:
    """Return the interface of ``host`` that most other nodes reach; its first one for a single node."""
    votes = Counter(name for entry in evidence.values() for name in entry["reached"].get(host, ()))
    if votes:
        return votes.most_common(1)[0][0]
    return next(iter(evidence[host]["interfaces"]), None)


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
    command = [sys.executable, "-W", "ignore", "-c", _WORKER]
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


def exchange() -> None:
    """Run one process: join, measure among this node's processes and among all, print the result as a line of JSON.

    Bandwidth is the bus bandwidth of a ring, ``2 (n - 1) / n * bytes / seconds``, which does not depend on the number
    of processes.
    """
    import torch
    import torch.distributed as dist

    backend = os.environ["PREFLIGHT_BACKEND"]
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    result = {"backend": backend, "processes": world}
    if local_world > 1 and world > local_world:
        groups: list[Any] = []
        for start in range(0, world, local_world):
            groups.append(dist.new_group(list(range(start, start + local_world))))
        result["node_gb_s"] = _bandwidth(
            groups[rank // local_world], local_world, device, _BYTES[backend]
        )
    result["all_gb_s"] = _bandwidth(dist.group.WORLD, world, device, _BYTES[backend])
    dist.destroy_process_group()
    print(json.dumps(result))


def _bandwidth(group: object, size: int, device: torch.device, count: int) -> float:
    """Measure the bus bandwidth in GB/s. Raises RuntimeError where the sum is wrong."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    data = torch.ones(count // 4, dtype=torch.float32, device=device)
    dist.all_reduce(data, group=group)
    if not bool((data == size).all()):
        raise RuntimeError(f"the sum over {size} processes is {data.unique().tolist()[:4]}")
    wait()
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(data, group=group)
    wait()
    seconds = (time.perf_counter() - started) / _ROUNDS
    return 2 * (size - 1) / size * count / seconds / 1e9


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
