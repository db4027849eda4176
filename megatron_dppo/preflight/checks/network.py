"""Which address of each node the others can reach, by opening a connection to it."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding, culprits
from megatron_dppo.preflight.needs import Needs

_TOPIC, _END = "listening", "connected"
_CONNECT_S = 3.0


def collect(site: Site) -> dict[str, Any]:
    """Interfaces of this node, and which addresses of each other node accept a connection."""
    meeting = site.meeting
    own = addresses()
    with _listening() as port:
        meeting.say(_TOPIC, {"addresses": own, "port": port})
        heard = meeting.hear(_TOPIC)
        others = {host: told for host, told in heard.items() if host != meeting.host}
        reached = {host: _reached(told) for host, told in others.items()}
        meeting.say(_END, {})
        meeting.hear(_END)  # the others may still be connecting
    return {"interfaces": own, "reached": reached}


def addresses() -> dict[str, str]:
    """IPv4 address by network interface, those that are up and no loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET
    }
    return {name: address for name, address in found.items() if not address.startswith("127.")}


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
        except OSError:  # shut down: everyone has connected
            return
        connection.close()


def _reached(told: Mapping[str, Any]) -> list[str]:
    """Interfaces of another node that can be connected to."""
    return [name for name, ip in told["addresses"].items() if _connects(ip, told["port"])]


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Every node reaches every other; the fewest nodes that explain all failures are named."""
    broken = {
        frozenset((host, other))
        for host in evidence
        for other in evidence
        if host != other and not evidence[host]["reached"].get(other)
    }
    for host, count in culprits(broken):
        got = f"no connection with {count} of {len(evidence) - 1} other nodes"
        yield Finding(host, "network", got, "a connection with each")


def reachable_interface(evidence: Mapping[str, Evidence], host: str) -> str | None:
    """The interface of ``host`` that most others reach; its first where it is alone."""
    votes = Counter(
        name for other, told in evidence.items() for name in told["reached"].get(host, ())
    )
    own = list(evidence[host]["interfaces"])
    return votes.most_common(1)[0][0] if votes else next(iter(own), None)
