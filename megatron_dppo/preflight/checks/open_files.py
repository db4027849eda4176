"""How many files and sockets one process may open."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding, too_little
from megatron_dppo.preflight.needs import Needs


def collect(site: Site) -> dict[str, Any]:
    """The soft and the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """The soft limit is what counts: nothing here raises it."""
    soft = {host: told["soft"] for host, told in evidence.items()}
    yield from too_little("open files (ulimit -n)", soft, needs.open_files, "files")
