"""Addresses of this machine: ports, network interfaces, base URLs, and torch's rendezvous on one of them."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from torch.distributed import TCPStore


# --- ports

_bound: list[socket.socket] = []


class PortTakenError(RuntimeError):
    """A port can't be bound; the message names the address and the system's reason."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody has, and that the system gives to nobody else while this process
    runs: as :func:`hold_port`."""
    bound = hold_port(host, 0)
    _bound.append(bound)
    return int(bound.getsockname()[1])


def hold_port(host: str, port: int) -> socket.socket:
    """``port`` of ``host``, 0 for any that is free, bound until the socket is closed.

    While it is, the system gives the port neither to a server that takes any port nor to a connection;
    one that asks for this very port, with SO_REUSEADDR as servers do, can listen on it. A connection
    to it is refused meanwhile. Raises PortTakenError where it can't be bound.
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


# --- interfaces and their addresses


class InterfaceError(RunError, ValueError):
    """This machine has no such interface, or it has no address; the message names those that it has."""


def interface_address(name: str) -> str:
    """The address of an interface, IPv4 where it has one; ``name`` may be an address of this machine.

    Raises InterfaceError.
    """
    interfaces = {n: _usable(addresses) for n, addresses in psutil.net_if_addrs().items()}
    if name in {address for addresses in interfaces.values() for address in addresses}:
        return name
    if not interfaces.get(name):
        names = ", ".join(f"{n} ({a[0]})" for n, a in sorted(interfaces.items()) if a)
        raise InterfaceError(f"got {name!r}, expected a network interface with an address: {names}")
    return interfaces[name][0]


def interface_of(address: str) -> str | None:
    """The name of the interface that has ``address``; None where none of this machine has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in _usable(addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own, which nobody else reaches."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except (ValueError, OSError):
        return False


def resolve(host: str) -> str:
    """The address that a host's name stands for, IPv4 where it has one. Raises OSError."""
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def source_address(host: str) -> str:
    """This machine's address on the network that leads to ``host``. Raises OSError."""
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # A datagram socket's connect sends nothing: it only chooses the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _usable(addresses: Sequence[Any]) -> list[str]:
    """IPv4 addresses, then IPv6 ones that need no interface's name to be reached."""
    families = socket.AF_INET, socket.AF_INET6
    wanted = [a for a in addresses if a.family in families and "%" not in a.address]
    return [a.address for a in sorted(wanted, key=lambda a: families.index(a.family))]


# --- URLs


def url_host(host: str) -> str:
    """``host`` as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


_HOST = re.compile(r"[\w-]+(\.[\w-]+)*")
_FOUR_NUMBERS = re.compile(r"\d+(\.\d+){3}")


def _is_host(host: str) -> bool:
    """Whether it can be a host's name, or is an IPv4 address."""
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
    """What is wrong with ``host`` as an address to listen on, in a line: it is no address, and no name known here.

    An address need not be this machine's: a run may be checked on another one.
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
    """What is wrong with ``url``, in a line; None where a server can have it.

    It is ``http`` or ``https``, a host's name or address, perhaps a port from 1 on and a path.
    """
    problem = f"got {url!r}, expected http://host:port"
    try:
        parts = urlsplit(url)
        # Told without the URL: it would be in every log.
        if "@" in parts.netloc:
            return (
                f"got one for {parts.hostname} with a user or a password in it, expected "
                "http://host:port; keys are environment variables (docs/fleet.md)"
            )
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return f"{problem}: {error}"
    # An IPv6 address is checked by urlsplit.
    named = ":" in host or _is_host(host)
    plain = not (parts.query or parts.fragment or re.search(r"\s", url))
    return None if parts.scheme in ("http", "https") and named and port != 0 and plain else problem


HIDDEN_SECRET = "<api key>"


def without_secrets(text: str, secrets: Iterable[str | None]) -> str:
    """``text`` of a server, for a message, with each key replaced: a server may echo the key that it was sent."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, HIDDEN_SECRET)
    return text


# --- the rendezvous of torch.distributed


class ListenError(RunError):
    """An address can't be listened on; the message names it, and the system's reason."""


def listening_store(
    host: str, port: int, world_size: int | None, timeout: timedelta, **options: Any
) -> TCPStore:
    """The store that the others connect to, on ``host`` only; a free port where ``port`` is 0.

    ``options``: of TCPStore. Raises ListenError where the address can't be bound.
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
