"""Network interfaces of this machine: the address of one, and the one of an address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import psutil


class InterfaceError(ValueError):
    """This machine has no such interface, or it has no address; the message names those that it has."""


def interface_address(name: str) -> str:
    """The address of an interface, IPv4 where it has one; ``name`` may be an address of this machine.

    Raises InterfaceError.
    """
    found = {n: _usable(addresses) for n, addresses in psutil.net_if_addrs().items()}
    if name in {address for addresses in found.values() for address in addresses}:
        return name
    if not found.get(name):
        known = ", ".join(f"{n} ({a[0]})" for n, a in sorted(found.items()) if a)
        raise InterfaceError(f"got {name!r}, expected a network interface with an address: {known}")
    return found[name][0]


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
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def _usable(addresses: Sequence[Any]) -> list[str]:
    """IPv4 addresses, then IPv6 ones that need no interface's name to be reached."""
    families = socket.AF_INET, socket.AF_INET6
    wanted = [a for a in addresses if a.family in families and "%" not in a.address]
    return [a.address for a in sorted(wanted, key=lambda a: families.index(a.family))]
