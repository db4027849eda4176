"""Evidence on disk: one JSON file a node, beside the files through which the nodes meet.

``<run.directory>/preflight/<job>-<attempt>/<host>.json`` holds an object with one entry for each check.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically

Evidence = Mapping[str, Any]
"""What one check found on one node. ``error`` in place of all else: why it could not be told."""


class EvidenceError(RunError, ValueError):
    """A file of evidence holds something else; the message names it."""


def evidence_path(folder: Path, host: str) -> Path:
    """A node's file."""
    return folder / f"{host}.json"


def write_evidence(folder: Path, host: str, evidence: Mapping[str, Evidence]) -> Path:
    """Write a node's file; its path."""
    path = evidence_path(folder, host)
    write_atomically(path, json.dumps(evidence, indent=1, sort_keys=True) + "\n")
    return path


def read_evidence(folder: Path, hosts: Iterable[str]) -> dict[str, dict[str, Evidence]]:
    """Evidence by host; a host without a file is left out. Raises EvidenceError."""
    found = {}
    for host in hosts:
        path = evidence_path(folder, host)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise EvidenceError(f"{path}: not JSON: {error}") from error
        if not isinstance(content, dict):
            raise EvidenceError(f"{path}: got {type(content).__name__}, expected an object")
        found[host] = content
    return found
