"""Addresses of this machine: ports, network interfaces, base URLs, and torch's rendezvous on one of them."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from torch.distributed import TCPStore


_bound: list[socket.socket] = []
"""Sockets that hold the ports of ``free_port``."""
_bound_lock = threading.Lock()


class PortTakenError(RuntimeError):
    """A port can't be bound; the message names the address and the system's reason."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of ``host`` that the system assigns to no other process while this one runs.

    See :func:`hold_port`. ``give_back_port`` ends it earlier.
    """
    bound = hold_port(host, 0)
    _bound.append(bound)
    return int(bound.getsockname()[1])


def give_back_port(port: int) -> None:
    """Let the system assign a port of ``free_port`` again: the server that used it has ended."""
    # Servers end in threads of their own.
    with _bound_lock:
        for bound in list(_bound):
            if bound.getsockname()[1] == port:
                _bound.remove(bound)
                bound.close()


def hold_port(host: str, port: int) -> socket.socket:
    """Bind ``port`` of ``host`` (0: any free one) until the socket is closed.

    Meanwhile the system assigns the port neither to a server that takes any port nor to a connection. A server that
    requests this very port, with SO_REUSEADDR as servers do, can listen on it. A connection to the port is refused.
    Raises PortTakenError where it can't be bound.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise PortTakenError(f"cannot bind {host}:{port} ({error.strerror})") from error
    return bound


def require_free_port(host: str, port: int) -> None:
    hold_port(host, port).close()


class InterfaceError(RunError, ValueError):
    """This machine has no such interface, or the interface has no address; the message names the machine's
    interfaces.
    """


def interface_address(name: str) -> str:
    """Return the address of an interface, IPv4 where it has one; ``name`` may be an address of this machine.

    Raises InterfaceError.
    """
    interfaces = {n: _usable(addresses) for n, addresses in psutil.net_if_addrs().items()}
    if any(name in addresses for addresses in interfaces.values()):
        return name
    if not interfaces.get(name):
        names = ", ".join(f"{n} ({a[0]})" for n, a in sorted(interfaces.items()) if a)
        raise InterfaceError(f"got {name!r}, expected a network interface with an address: {names}")
    return interfaces[name][0]


def interface_of(address: str) -> str | None:
    """Return the name of the interface with ``address``; None where this machine has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in _usable(addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own, which other machines can't reach."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except (ValueError, OSError):
        return False


def resolve(host: str) -> str:
    """Return the address of a host's name, IPv4 where it has one. Raises OSError."""
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ipv4_entries = [entry for entry in entries if entry[0] == socket.AF_INET]
    return str((ipv4_entries or entries)[0][4][0])


def source_address(host: str) -> str:
    """Return this machine's address on the network that leads to ``host``. Raises OSError."""
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Connecting a datagram socket sends nothing: it only selects the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _usable(addresses: Sequence[Any]) -> list[str]:
    """Return IPv4 addresses, then IPv6 ones that can be reached without an interface's name."""
    families = socket.AF_INET, socket.AF_INET6
    usable_addresses: list[str] = []
    for family in families:
        for entry in addresses:
            if entry.family == family and "%" not in entry.address:
                usable_addresses.append(entry.address)
    return usable_addresses


def url_host(host: str) -> str:
    """Return ``host`` in the form of a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


_HOST = re.compile(r"[\w-]+(\.[\w-]+)*")
_FOUR_NUMBERS = re.compile(r"\d+(\.\d+){3}")


def _is_host(host: str) -> bool:
    """Whether the text can be a host's name, or is an IPv4 address."""
    if _FOUR_NUMBERS.fullmatch(host):
        return _is_address(host)
    return _HOST.fullmatch(host) is not None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_fault(host: str) -> str | None:
    """Return the fault of ``host`` as an address to listen on, in one line: neither an address nor a known name.

    The address need not be this machine's: a run may be checked on another one.
    """
    if _is_address(host):
        return None
    try:
        if not _is_host(host):
            raise OSError("no address and no name")
        resolve(host)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"got {host!r}, expected an address to listen on, or a host's name ({reason})"
    return None


def url_fault(url: str) -> str | None:
    """Return the fault of ``url`` in one line; None where a server can have it.

    A valid URL is ``http`` or ``https``, a host's name or address, and optionally a port from 1 on and a path.
    """
    problem = f"got {url!r}, expected http://host:port"
    try:
        parts = urlsplit(url)
        # Report this without the URL, whose password would be in every log.
        if "@" in parts.netloc:
            return (
                f"got one for {parts.hostname} with a user or a password in it, expected "
                "http://host:port; keys are environment variables (docs/fleet.md)"
            )
        host = parts.hostname or ""
        port = parts.port
    except ValueError as error:
        return f"{problem}: {error}"
    # urlsplit checks an IPv6 address.
    has_valid_host = ":" in host or _is_host(host)
    plain = not (parts.query or parts.fragment or re.search(r"\s", url))
    if parts.scheme in ("http", "https") and has_valid_host and port != 0 and plain:
        return None
    return problem


HIDDEN_SECRET = "<api key>"


def without_secrets(text: str, secrets: Iterable[str | None]) -> str:
    """Return ``text`` of a server, for a message, with each key replaced: a server may echo a key that it received."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, HIDDEN_SECRET)
    return text


class ListenError(RunError):
    """An address can't be listened on; the message names it, and the system's reason."""


def listening_store(
    host: str, port: int, world_size: int | None, timeout: timedelta, **options: Any
) -> TCPStore:
    """Return a store that other ranks connect to, on ``host`` only; a free port where ``port`` is 0.

    ``options`` are TCPStore's. Raises ListenError where the address can't be bound.
    """
    from torch.distributed import TCPStore

    try:
        address = resolve(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise ListenError(f"can't listen on {host}:{port}: {error.strerror} ({code})") from error
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        world_size,
        True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        **options,
    )
