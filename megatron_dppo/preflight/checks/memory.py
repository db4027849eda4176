"""Memory of the host, and of ``/dev/shm``, through which processes share it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding, too_little
from megatron_dppo.preflight.needs import Needs


def collect(site: Site) -> dict[str, Any]:
    """Bytes: total and available memory, free space in ``/dev/shm``."""
    memory = psutil.virtual_memory()
    shm_free = shutil.disk_usage("/dev/shm").free
    return {"total": memory.total, "available": memory.available, "shm_free": shm_free}


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """At least what the run needs of both."""
    available = {host: told["available"] for host, told in evidence.items()}
    yield from too_little("free memory", available, needs.memory_bytes, "GiB")
    shm = {host: told["shm_free"] for host, told in evidence.items()}
    yield from too_little("free space in /dev/shm", shm, needs.shm_bytes, "GiB")
