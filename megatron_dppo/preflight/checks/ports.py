"""TCP ports: those that the run was told to use, and some that the system gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding
from megatron_dppo.preflight.needs import Needs
from megatron_dppo.system.network import PortTakenError, free_port, require_free_port

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ANY = "0.0.0.0"


def collect(site: Site) -> dict[str, Any]:
    """Ports that can't be bound, one free port, and the system's range of free ports."""
    return {
        "taken": [port for port in site.needs.ports if not _is_free(port)],
        "free": free_port(_ANY),
        "range": _RANGE.read_text().split() if _RANGE.exists() else [],
    }


def _is_free(port: int) -> bool:
    try:
        require_free_port(_ANY, port)
    except PortTakenError:
        return False
    return True


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """None of the run's ports is taken."""
    for host, told in evidence.items():
        for port in told["taken"]:
            yield Finding(host, f"port {port}", "taken", "free")
