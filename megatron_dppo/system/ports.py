"""TCP ports of this machine: find a free one and keep it, or refuse one that is taken."""

from __future__ import annotations

import socket

_kept: list[socket.socket] = []


class PortTakenError(RuntimeError):
    """A port can't be bound; the message names the address and the system's reason."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody has, and that the system gives to nobody else while this process
    runs: as :func:`hold_port`."""
    held = hold_port(host, 0)
    _kept.append(held)
    return int(held.getsockname()[1])


def hold_port(host: str, port: int) -> socket.socket:
    """``port`` of ``host``, 0 for any that is free, bound until the socket is closed.

    While it is, the system gives the port neither to a server that takes any port nor to a connection;
    one that asks for this very port, with SO_REUSEADDR as servers do, can listen on it. A connection
    to it is refused meanwhile. Raises PortTakenError where it can't be bound.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise PortTakenError(f"cannot bind {host}:{port} ({error.strerror})") from error
    return held


def require_free_port(host: str, port: int) -> None:
    """Raise PortTakenError where ``port`` of ``host`` can't be bound."""
    hold_port(host, port).close()
