"""A preflight's result for people: a line a node, then what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding

_COLUMNS = ("node", "GPUs", "memory", "/dev/shm", "run dir", "interface", "all-reduce", "verdict")


def table(evidence: Mapping[str, Mapping[str, Evidence]], findings: Sequence[Finding]) -> str:
    """Lines of text; a value that was not collected is a dash."""
    bad = {finding.host for finding in findings}
    rows = [
        _COLUMNS,
        *((*_cells(evidence[h]), "bad" if h in bad else "ok") for h in sorted(evidence)),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), *map(str, findings)])


def _cells(told: Mapping[str, Any]) -> tuple[str, ...]:
    gpus = told.get("gpus", {}).get("gpus", [])
    kinds = sorted({str(gpu.get("name")) for gpu in gpus})
    speed = told.get("all_reduce", {}).get("all_gb_s")
    return (
        told.get("host", {}).get("name", "-"),
        f"{len(gpus)} x {', '.join(kinds)}" if gpus else "none",
        _gib(told, "memory", "available"),
        _gib(told, "memory", "shm_free"),
        _gib(told, "disk", "run_directory_free"),
        told.get("all_reduce", {}).get("interface", "-"),
        "-" if speed is None else f"{speed:.2f} GB/s",
    )


def _gib(told: Mapping[str, Any], check: str, key: str) -> str:
    value = told.get(check, {}).get(key)
    return "-" if value is None else f"{value / 2**30:.1f} GiB"
