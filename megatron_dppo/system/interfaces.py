"""The network interfaces of this machine, and their addresses."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import psutil

from megatron_dppo.system.errors import RunError


class InterfaceError(RunError, ValueError):
    """This machine does not have the interface, or the interface has no address. The message names all interfaces."""


def interface_address(name: str) -> str:
    """Return the address of a network interface: an IPv4 address, or IPv6 if it has no IPv4 address.

    If ``name`` is an address of this machine, the function returns ``name``. Raises InterfaceError.
    """
    addresses_of: dict[str, list[str]] = {}
    for interface, entries in psutil.net_if_addrs().items():
        addresses_of[interface] = _usable(entries)
    if any(name in addresses for addresses in addresses_of.values()):
        return name
    if not addresses_of.get(name):
        choices: list[str] = []
        for interface, addresses in sorted(addresses_of.items()):
            if addresses:
                choices.append(f"{interface} ({addresses[0]})")
        names = ", ".join(choices)
        raise InterfaceError(f"got {name!r}, expected a network interface with an address: {names}")
    return addresses_of[name][0]


def interface_of(address: str) -> str | None:
    """Return the name of the interface with ``address``; None if no interface of this machine has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if address in _usable(entries):
            return name
    return None


def _usable(entries: Sequence[Any]) -> list[str]:
    """Return the IPv4 addresses in psutil's entries of an interface, then its IPv6 addresses.

    An IPv6 address with "%" is left out: it is valid only together with the interface's name.
    """
    families = socket.AF_INET, socket.AF_INET6
    usable_addresses: list[str] = []
    for family in families:
        for entry in entries:
            if entry.family == family and "%" not in entry.address:
                usable_addresses.append(entry.address)
    return usable_addresses
