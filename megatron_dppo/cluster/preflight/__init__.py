"""Checks of the nodes of an allocation before a run, by evidence that each node collects.

One task on each node writes a JSON file (``megatron-dppo preflight``). ``judge``, a pure function of all files, names
the faulty nodes and their faults. docs/preflight.md lists the checks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.cluster.planner.devices import gib
from megatron_dppo.cluster.preflight import (
    all_reduce,
    gpus,
    machine,
    network,
    shared_folder,
    toolkit,
)
from megatron_dppo.cluster.preflight.evidence import (
    EVERYWHERE,
    Check,
    CheckError,
    Evidence,
    EvidenceByHost,
    Finding,
    Meeting,
    Needs,
    Site,
)
from megatron_dppo.logging import aligned
from megatron_dppo.system.files import write_atomically

log = logging.getLogger(__name__)

CHECKS: Mapping[str, Check] = {
    "host": Check(machine.collect_host, machine.judge_host),
    "gpus": Check(lambda _: gpus.gpus_here(), gpus.judge_gpus),
    "memory": Check(machine.collect_memory, machine.judge_memory),
    "disk": Check(machine.collect_disk, machine.judge_disk),
    "open_files": Check(machine.collect_open_files, machine.judge_open_files),
    "ports": Check(machine.collect_ports, machine.judge_ports),
    "pythons": Check(machine.collect_pythons, machine.judge_pythons),
    "toolkit": Check(toolkit.collect_toolkit, toolkit.judge_toolkit),
    "shared_folder": Check(shared_folder.collect_shared_folder, shared_folder.judge_shared_folder),
    "network": Check(network.collect_network, network.judge_network),
    "all_reduce": Check(all_reduce.collect_all_reduce, all_reduce.judge_all_reduce),
}
"""Checks by name, in the order in which a node runs them. Checks that exchange data with other nodes come last."""

_COLUMNS = ("node", "GPUs", "memory", "/dev/shm", "run dir", "interface", "all-reduce", "verdict")


def collect_evidence(
    needs: Needs, meeting: Meeting, skipped: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Collect this node's evidence by check, without the ``skipped`` checks. A check that fails has only ``error``."""
    evidence: dict[str, dict[str, Any]] = {}
    site = Site(needs, meeting, evidence)
    for name, check in CHECKS.items():
        if name in skipped:
            continue
        try:
            evidence[name] = check.collect(site)
        except (CheckError, OSError) as error:
            evidence[name] = {"error": str(error)}
        log.debug("preflight: %s: %s", name, evidence[name])
    return evidence


def judge(
    evidence: Mapping[str, Mapping[str, Evidence]], needs: Needs, hosts: Sequence[str]
) -> list[Finding]:
    """Return every finding, sorted by host.

    Args:
        evidence: the evidence by host and check.
        needs: requirements on each node.
        hosts: the nodes that take part; a node without evidence is a finding.
    """
    expectation = "a file of the node's preflight task"
    findings = {Finding(h, "evidence", "none", expectation) for h in hosts if h not in evidence}
    for name, check in CHECKS.items():
        entries = {host: checks[name] for host, checks in evidence.items() if name in checks}
        findings.update(_errors(name, entries))
        # An entry with an error has no values.
        collected_values = {h: entry for h, entry in entries.items() if "error" not in entry}
        findings.update(check.judge(collected_values, needs))
    return sorted(findings)


def _errors(name: str, entries: EvidenceByHost) -> Iterator[Finding]:
    for host, entry in entries.items():
        if "error" in entry:
            yield Finding(host, name.replace("_", " "), entry["error"], "an answer")


def bad_hosts(findings: Sequence[Finding]) -> list[str]:
    """Return the nodes with findings. A run leaves these nodes out."""
    return sorted({finding.host for finding in findings} - {EVERYWHERE})


def write_verdict(folder: Path, findings: Sequence[Finding]) -> None:
    """Write ``verdict.json`` beside the evidence, for the user and ``status``."""
    rows = [
        {"host": f.host, "what": f.subject, "got": f.actual, "expected": f.expected}
        for f in findings
    ]
    content = {"bad_hosts": bad_hosts(findings), "findings": rows}
    write_atomically(folder / "verdict.json", json.dumps(content, indent=1) + "\n")


def table(evidence: Mapping[str, Mapping[str, Evidence]], findings: Sequence[Finding]) -> str:
    """Return a table for the user: one line for each node, with a dash for a missing value, then the faults."""
    hosts_with_findings = {finding.host for finding in findings}
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for host in sorted(evidence):
        verdict = "bad" if host in hosts_with_findings else "ok"
        rows.append((*_cells(evidence[host]), verdict))
    return "\n".join([*aligned(rows), *map(str, findings)])


def _cells(checks: Mapping[str, Evidence]) -> tuple[str, ...]:
    gpu_list = checks.get("gpus", {}).get("gpus", [])
    gpu_text = "none"
    if gpu_list:
        kinds = sorted({str(gpu.get("name")) for gpu in gpu_list})
        gpu_text = f"{len(gpu_list)} x {', '.join(kinds)}"
    all_reduce_entry = checks.get("all_reduce", {})
    speed = all_reduce_entry.get("all_gb_s")
    return (
        checks.get("host", {}).get("name", "-"),
        gpu_text,
        _gib(checks, "memory", "available"),
        _gib(checks, "memory", "shm_free"),
        _gib(checks, "disk", "run_directory_free"),
        all_reduce_entry.get("interface", "-"),
        "-" if speed is None else f"{speed:.2f} GB/s",
    )


def _gib(checks: Mapping[str, Evidence], check: str, key: str) -> str:
    value = checks.get(check, {}).get(key)
    if value is None:
        return "-"
    return gib(value)
