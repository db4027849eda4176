"""One node's preflight: goes through the checks, and writes what it found."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.preflight.checks import CHECKS
from megatron_dppo.preflight.checks.base import CheckError, Site
from megatron_dppo.preflight.evidence import write_evidence
from megatron_dppo.preflight.meeting import Meeting
from megatron_dppo.preflight.needs import Needs

log = logging.getLogger(__name__)


def this_host() -> str:
    """The node's name: Slurm's where there is one, which may differ from the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def collect_evidence(
    needs: Needs, meeting: Meeting, skipped: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """This node's evidence by check; a check that can't tell leaves ``error``."""
    told: dict[str, dict[str, Any]] = {}
    site = Site(needs, meeting, told)
    for name, check in CHECKS.items():
        if name in skipped:
            continue
        try:
            told[name] = check.collect(site)
        except (CheckError, OSError) as error:
            told[name] = {"error": str(error)}
        log.debug("preflight: %s: %s", name, told[name])
    return told


def run_task(
    needs: Needs, folder: Path, count: int, *, timeout_s: float, skipped: Collection[str] = ()
) -> Mapping[str, dict[str, Any]]:
    """Collect on this node and write ``<folder>/<host>.json``; the evidence.

    Args:
        needs: what the run asks of a node.
        folder: of this preflight, seen by all nodes.
        count: nodes that take part.
        timeout_s: longest wait for the others in each round.
        skipped: names of checks to leave out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    host = this_host()
    evidence = collect_evidence(needs, Meeting(folder, host, count, timeout_s), skipped)
    write_evidence(folder, host, evidence)
    return evidence
