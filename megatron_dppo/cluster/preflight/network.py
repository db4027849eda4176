"""The check that each node can connect to every other node, and the interfaces that other nodes reach."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import psutil

from megatron_dppo.cluster.preflight.evidence import EvidenceByHost, Finding, Needs, Site, culprits

_LISTENING, _CONNECTED = "listening", "connected"
_CONNECT_S = 3.0


def collect_network(site: Site) -> dict[str, Any]:
    """Collect this node's interfaces, and for each other node the interfaces that accept a connection."""
    meeting = site.meeting
    interfaces = addresses()
    reached_interfaces: dict[str, list[str]] = {}
    with _listening() as port:
        meeting.write(_LISTENING, {"addresses": interfaces, "port": port})
        for host, other_node in meeting.wait_for_all(_LISTENING).items():
            if host == meeting.host:
                continue
            reached_interfaces[host] = []
            for interface, address in other_node["addresses"].items():
                if _connects(address, other_node["port"]):
                    reached_interfaces[host].append(interface)
        meeting.write(_CONNECTED, {})
        # Listen until all other nodes have connected too.
        meeting.wait_for_all(_CONNECTED)
    return {"interfaces": interfaces, "reached": reached_interfaces}


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that is up, without loopback addresses."""
    states = psutil.net_if_stats()
    address_by_interface: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        if name not in states or not states[name].isup:
            continue
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                address_by_interface[name] = entry.address
    return address_by_interface


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


def judge_network(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report the nodes to blame for the pairs of nodes without a connection (``culprits``)."""
    broken_pairs: set[frozenset[str]] = set()
    for host, other_host in permutations(evidence, 2):
        if not evidence[host]["reached"].get(other_host):
            broken_pairs.add(frozenset((host, other_host)))
    for host, count in culprits(broken_pairs):
        observation = f"no connection with {count} of {len(evidence) - 1} other nodes"
        yield Finding(host, "network", observation, "a connection with each")


def reachable_interface(evidence: EvidenceByHost, host: str) -> str | None:
    """Return the interface of ``host`` that most other nodes reach.

    If no other node reaches ``host``, the result is the first interface of ``host``, or None without interfaces.
    """
    counts: Counter[str] = Counter()
    for entry in evidence.values():
        counts.update(entry["reached"].get(host, ()))
    if counts:
        return counts.most_common(1)[0][0]
    return next(iter(evidence[host]["interfaces"]), None)
