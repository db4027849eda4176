"""Free ports, held until a server takes them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

_held_ports: dict[int, list[socket.socket]] = {}
"""Port that ``free_port`` returned -> the sockets that hold it and its further ports. ``free_port`` may return one
number for several addresses of this machine. The list then has the sockets of all these addresses."""


class PortTakenError(RuntimeError):
    """A port can't be bound; the message names the address and the system's reason."""


def free_port(host: str = "127.0.0.1", distances: Sequence[int] = ()) -> int:
    """Return a free port of ``host``. It stays held (``hold_port``) until ``give_back_port`` or this process's end.

    Further ports are free and held as long: the returned port plus each of ``distances``.
    """
    unusable: list[socket.socket] = []
    while True:
        held = [hold_port(host, 0)]
        port = int(held[0].getsockname()[1])
        try:
            for distance in distances:
                held.append(hold_port(host, port + distance))
        except PortTakenError:
            # Keep the ports until other ports are found: otherwise the system may return the first one again.
            unusable += held
            continue
        # A port of the same number may be held on another address of this machine. Then add to its list.
        _held_ports.setdefault(port, []).extend(held)
        for candidate in unusable:
            candidate.close()
        return port


def give_back_port(port: int) -> None:
    """Stop holding a port that ``free_port`` returned, after the server that used it has ended."""
    # Several threads may call this function for one port at once, because each server is ended by a separate thread.
    # pop returns the sockets to only one of them.
    for held in _held_ports.pop(port, []):
        held.close()


def hold_port(host: str, port: int) -> socket.socket:
    """Bind ``port`` of ``host`` (0: any free port) until the returned socket is closed.

    Until then the system does not assign the port to a server that takes any free port, or to an outgoing connection.
    A server that binds exactly this port with SO_REUSEADDR, as servers do, can listen on it. Raises PortTakenError.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        # A number above 65535 is an OverflowError.
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise PortTakenError(f"cannot bind {host}:{port} ({reason})") from error
    return bound


def require_free_port(host: str, port: int) -> None:
    hold_port(host, port).close()
