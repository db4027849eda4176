"""What nodes do together: see each other's files in the run directory, connect, exchange in an all-reduce."""

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
"""A node whose own GPUs exchange less than this share of the median node's bandwidth is ill."""


def collect_shared_folder(site: Site) -> dict[str, Any]:
    """Whom this node saw, whose file it saw replaced and after how many seconds, whether it won exclusive creation."""
    meeting = site.meeting
    won = meeting.is_first(_CONTEST)
    meeting.say(_CANARY, _canary(meeting.host, "old"))
    # Read before it is replaced, so that this node may keep the old file in a cache.
    hosts = sorted(meeting.hear(_CANARY))
    meeting.say(_CANARY, _canary(meeting.host, "new"))
    meeting.say(_REPLACED, {})
    expected = len(meeting.hear(_REPLACED))
    started = time.monotonic()
    while True:
        canaries = meeting.read(_CANARY)
        replaced = [host for host, canary in canaries.items() if canary == _canary(host, "new")]
        waited = time.monotonic() - started
        if len(replaced) >= expected or waited > meeting.timeout_s:
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
    """Every node saw every other's file, as it was written last, and one node won the contest.

    The fewest nodes that explain all unseen files are named.
    """
    missed = {
        frozenset((host, other))
        for host in evidence
        for other in evidence
        if host != other and other not in evidence[host]["replaced"]
    }
    for host, count in culprits(missed):
        others = f"unseen or old with {count} of {len(evidence) - 1} other nodes, either way"
        yield Finding(host, f"{needs.run_directory}: files of others", others, "seen, and replaced")
    winners = [host for host in sorted(evidence) if evidence[host]["won"]]
    if evidence and len(winners) != 1:
        names = ", ".join(winners) or "nobody"
        subject = f"{needs.run_directory}: winner of exclusive creation"
        yield Finding(EVERYWHERE, subject, names, "one node")


def collect_network(site: Site) -> dict[str, Any]:
    """Interfaces of this node, and which addresses of each other node accept a connection."""
    meeting = site.meeting
    interfaces = addresses()
    with _listening() as port:
        meeting.say(_LISTENING, {"addresses": interfaces, "port": port})
        reached = {
            host: [name for name, ip in other["addresses"].items() if _connects(ip, other["port"])]
            for host, other in meeting.hear(_LISTENING).items()
            if host != meeting.host
        }
        meeting.say(_CONNECTED, {})
        # The others may still be connecting.
        meeting.hear(_CONNECTED)
    return {"interfaces": interfaces, "reached": reached}


def addresses() -> dict[str, str]:
    """IPv4 address by network interface, those that are up and no loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }


@contextmanager
def _listening() -> Iterator[int]:
    """A port of every address that accepts connections and closes them."""
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
            # Shut down: everyone has connected.
            return
        connection.close()


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def judge_network(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Every node reaches every other; the fewest nodes that explain all failures are named."""
    broken = {
        frozenset((host, other))
        for host in evidence
        for other in evidence
        if host != other and not evidence[host]["reached"].get(other)
    }
    for host, count in culprits(broken):
        others = f"no connection with {count} of {len(evidence) - 1} other nodes"
        yield Finding(host, "network", others, "a connection with each")


def reachable_interface(evidence: Mapping[str, Evidence], host: str) -> str | None:
    """The interface of ``host`` that most others reach; its first where it is alone."""
    votes = Counter(name for entry in evidence.values() for name in entry["reached"].get(host, ()))
    return votes.most_common(1)[0][0] if votes else next(iter(evidence[host]["interfaces"]), None)


def collect_all_reduce(site: Site) -> dict[str, Any]:
    """Bandwidths in GB/s, among a node's GPUs and among all nodes, or ``failed`` with the last lines of the process
    that failed first."""
    meeting, network = site.meeting, site.evidence.get("network", {})
    if "reached" not in network:
        raise CheckError("the network was not checked, which tells the interface to use")
    meeting.say(_INTERFACE, network)
    networks = meeting.hear(_INTERFACE)
    hosts, processes = sorted(networks), max(1, site.needs.gpus)
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


def _master(site: Site, first: str) -> dict[str, Any]:
    deadline = time.monotonic() + site.meeting.timeout_s
    while time.monotonic() < deadline:
        if first in (masters := site.meeting.read(_MASTER)):
            return masters[first]
        time.sleep(_POLL_S)
    raise CheckError(f"{first} does not say where the processes meet")


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
                        command, environment={**environment, **ranks}, output=file.fileno()
                    )
                )
        failed = _first_failure(workers)
        if failed is not None:
            code = workers[failed].returncode
            why = "does not end" if code is None else f"exits with code {code}"
            # The others wait for it in the collective.
            kill_families(workers)
            return {"failed": f"process {failed} {why}: {tail(outputs[failed], 3)[-500:]}"}
        return json.loads(outputs[0].read_text().splitlines()[-1])


def _first_failure(workers: list[subprocess.Popen[bytes]]) -> int | None:
    """Index of the worker that failed or does not end in time; None when all ended well."""
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
    """One process: join, measure among this node's processes and among all, print the result as a line of JSON.

    Bandwidth is the bus bandwidth of a ring: ``2 (n - 1) / n * bytes / seconds``, which does not depend on how many
    take part.
    """
    import torch
    import torch.distributed as dist

    backend = os.environ["PREFLIGHT_BACKEND"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    result = {"backend": backend, "processes": world}
    if here > 1 and world > here:
        groups = [
            dist.new_group(list(range(first, first + here))) for first in range(0, world, here)
        ]
        result["node_gb_s"] = _bandwidth(groups[rank // here], here, device, _BYTES[backend])
    result["all_gb_s"] = _bandwidth(dist.group.WORLD, world, device, _BYTES[backend])
    dist.destroy_process_group()
    print(json.dumps(result))


def _bandwidth(group: object, size: int, device: torch.device, count: int) -> float:
    """Bus bandwidth in GB/s. Raises RuntimeError where the sum is wrong."""
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
    """It worked, and no node's own GPUs are far slower than the others'."""
    failed = {host: entry["failed"] for host, entry in evidence.items() if "failed" in entry}
    everywhere = len(failed) == len(evidence)
    for host, why in failed.items():
        yield Finding(EVERYWHERE if everywhere else host, "all-reduce", why, "a result")
        # Of a collective that fails as a whole one report is enough.
        if everywhere:
            break
    speeds = {h: entry["node_gb_s"] for h, entry in evidence.items() if entry.get("node_gb_s")}
    usual = median(speeds.values()) if speeds else 0.0
    for host, speed in speeds.items():
        if speed < _SLOW * usual:
            expected = f"at least half of the nodes' median, {usual:.1f} GB/s"
            yield Finding(host, "all-reduce among its GPUs", f"{speed:.1f} GB/s", expected)
