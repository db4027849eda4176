"""Addresses to listen on and to call: checks of hosts and URLs, and a store of torch on one address."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a name or address of the loopback device. Other machines can't reach such an address."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except (ValueError, OSError):
        return False


def is_of_one_host(address: str) -> bool:
    """Whether ``address`` can be the address of a host: not 0.0.0.0, which stands for all, nor a group's address."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_unspecified or parsed.is_multicast or address == "255.255.255.255")


def resolve(host: str) -> str:
    """Return the address of a host's name: an IPv4 address, or IPv6 if it has no IPv4 address. Raises OSError."""
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ipv4_entries = [entry for entry in entries if entry[0] == socket.AF_INET]
    preferred_entry = (ipv4_entries or entries)[0]
    socket_address = preferred_entry[4]
    return str(socket_address[0])


def source_address(host: str) -> str:
    """Return this machine's address on the network that leads to ``host``. Raises OSError."""
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Connecting a datagram socket sends nothing: it only selects the route. The port (9, "discard") does not matter.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def mutual_addresses(addresses: Sequence[str]) -> list[str]:
    """Return ``addresses`` of several hosts as the hosts reach each other. Raises OSError.

    This host's /etc/hosts may map its own name to 127.0.1.1. The address from which this host reaches another host
    then replaces this loopback address. Loopback addresses stay if no host has another address.
    """
    other_hosts = [address for address in addresses if not is_loopback(address)]
    reachable_addresses = []
    for address in addresses:
        if other_hosts and is_loopback(address):
            reachable_addresses.append(source_address(other_hosts[0]))
        else:
            reachable_addresses.append(address)
    return reachable_addresses


def client_host(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on ``host``.

    A server can listen on all addresses, but a client must connect to one address.
    """
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url_host(host: str) -> str:
    """Return ``host`` as a URL has it: an IPv6 address in brackets, any other host unchanged."""
    if ":" in host:
        return f"[{host}]"
    return host


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
    """Return the fault of ``host`` as an address to listen on, in one line; None for an address or a known name.

    The address need not belong to this machine: a run may be checked on one machine and run on another.
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
    """Return the fault of ``url`` as the base URL of a server, in one line; None for a valid URL.

    A valid URL has ``http`` or ``https``, a host's name or address, and optionally a port above 0 and a path.
    """
    problem = f"got {url!r}, expected http://host:port"
    try:
        parts = urlsplit(url)
        # The message of this fault leaves out the URL, so that no log gets the URL's password.
        if "@" in parts.netloc:
            return (
                f"got one for {parts.hostname} with a user or a password in it, expected "
                "http://host:port; keys are environment variables (docs/fleet.md)"
            )
        host = parts.hostname or ""
        port = parts.port
    except ValueError as error:
        return f"{problem}: {error}"
    # A host with ":" is an IPv6 address: urlsplit has checked it.
    if ":" not in host and not _is_host(host):
        return problem
    if parts.scheme not in ("http", "https") or port == 0:
        return problem
    if parts.query or parts.fragment or re.search(r"\s", url):
        return problem
    return None


class ListenError(RunError):
    """A process can't listen on an address; the message has the address and the system's reason."""


def listening_store(
    host: str, port: int, world_size: int | None, timeout: timedelta, **options: Any
) -> TCPStore:
    """Return a TCPStore that listens for other ranks, only on ``host``. ``port`` 0: any free port.

    torch's own constructor would listen on all addresses of the machine. ``options``: further arguments of TCPStore.
    Raises ListenError if the address can't be bound.
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
