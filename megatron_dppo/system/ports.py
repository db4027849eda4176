"""TCP ports of this machine: find a free one, or refuse one that is taken."""

from __future__ import annotations

import socket


class PortTakenError(RuntimeError):
    """A port can't be bound; the message names the address and the system's reason."""


class FreePorts:
    """Free ports of ``host``, none given twice: who got one may not have bound it yet."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._given: set[int] = set()

    def next(self) -> int:
        """A port that nobody listens on, and that was not given before."""
        while (port := free_port(self._host)) in self._given:
            continue
        self._given.add(port)
        return port


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody listens on now; another process may take it next."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """Raise PortTakenError where ``port`` of ``host`` can't be bound."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTakenError(f"cannot bind {host}:{port} ({error.strerror})") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
