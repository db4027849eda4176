"""The check that each node can connect to every other one, and the interfaces that other nodes reach."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import psutil

from megatron_dppo.cluster.preflight.evidence import Evidence, Finding, Needs, Site, culprits

_LISTENING, _CONNECTED = "listening", "connected"
_CONNECT_S = 3.0


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
