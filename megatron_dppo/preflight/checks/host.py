"""The node's names and clock."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding
from megatron_dppo.preflight.needs import Needs


def collect(site: Site) -> dict[str, Any]:
    """Names, kernel, processor cores, and how the node's own name resolves."""
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except socket.gaierror:
        found = []
    return {
        "name": site.meeting.host,
        "host_name": name,
        "resolves_to": found,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "time": time.time(),
    }


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Where there are several nodes, a host name must resolve, and not to the loopback alone."""
    if len(evidence) < 2:
        return
    for host, told in evidence.items():
        outside = [a for a in told["resolves_to"] if not a.startswith("127.") and a != "::1"]
        if not outside:
            got = ", ".join(told["resolves_to"]) or "no address"
            what = f"address of its own host name {told['host_name']}"
            yield Finding(host, what, got, "one that other nodes can reach")
