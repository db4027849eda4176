"""From all nodes' evidence to the nodes that must be left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.preflight.checks import CHECKS
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import EVERYWHERE, Finding
from megatron_dppo.preflight.needs import Needs
from megatron_dppo.system.files import write_atomically

VERDICT_FILE = "verdict.json"


def judge(
    evidence: Mapping[str, Mapping[str, Evidence]], needs: Needs, hosts: Sequence[str]
) -> list[Finding]:
    """Everything that is wrong, by host.

    Args:
        evidence: what each node wrote, by host and check.
        needs: what the run asks of a node.
        hosts: all nodes of the allocation; one without evidence is a finding, too.
    """
    found = [
        Finding(host, "evidence", "none", "a file of the node's preflight task")
        for host in hosts
        if host not in evidence
    ]
    for name, check in CHECKS.items():
        of_check = {host: told[name] for host, told in evidence.items() if name in told}
        found += _errors(name, of_check)
        told = {host: entry for host, entry in of_check.items() if "error" not in entry}
        found += check.judge(told, needs)
    return sorted(set(found))


def _errors(name: str, evidence: Mapping[str, Evidence]) -> Iterator[Finding]:
    for host, entry in evidence.items():
        if "error" in entry:
            yield Finding(host, name.replace("_", " "), entry["error"], "an answer")


@dataclass(frozen=True)
class Verdict:
    """What a preflight found, and which nodes it leaves out."""

    findings: Sequence[Finding]

    @property
    def bad_hosts(self) -> list[str]:
        """Nodes with a finding of their own."""
        return sorted({f.host for f in self.findings} - {EVERYWHERE})

    @property
    def is_good(self) -> bool:
        """Whether all nodes can start."""
        return not self.findings

    def write(self, folder: Path) -> Path:
        """Write ``verdict.json`` beside the evidence, for people and ``status``; its path."""
        content: dict[str, Any] = {
            "bad_hosts": self.bad_hosts,
            "findings": [asdict(finding) for finding in self.findings],
        }
        path = folder / VERDICT_FILE
        write_atomically(path, json.dumps(content, indent=1) + "\n")
        return path
