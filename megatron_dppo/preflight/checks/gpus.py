"""GPUs: how many, which, their driver, and whether their memory is free."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.preflight.checks.base import CheckError, Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding, odd_ones
from megatron_dppo.preflight.needs import Needs
from megatron_dppo.system.compute import DRIVER, driver_version

_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "used_mib": "memory.used",
    "mig": "mig.mode.current",
    "uncorrected_errors": "ecc.errors.uncorrected.volatile.total",
}
_TIMEOUT_S = 30.0
_MOST_USED_MIB = 1024
"""MiB that a driver may hold on a GPU that nobody uses."""


def collect(site: Site) -> dict[str, Any]:
    """One entry a GPU, and where it was read."""
    return gpus_here()


def gpus_here() -> dict[str, Any]:
    """``gpus``: an entry a GPU from ``nvidia-smi``; without it, names and driver from ``/proc``. ``source``: which.

    Raises CheckError where ``nvidia-smi`` fails.
    """
    program = shutil.which("nvidia-smi")
    found = _from_proc(DRIVER) if program is None else parse(_ask(program))
    return {"gpus": found, "source": program or str(DRIVER)}


def _ask(program: str) -> str:
    query = f"--query-gpu={','.join(_FIELDS.values())}"
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"nvidia-smi does not answer within {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise CheckError(f"nvidia-smi exits with code {done.returncode}: {said[-300:]}")
    return done.stdout


def parse(table: str) -> list[dict[str, Any]]:
    """GPUs from ``nvidia-smi``'s lines; what it does not know (``[N/A]``) is None."""
    rows = []
    for line in table.splitlines():
        row = dict(zip(_FIELDS, (word.strip() for word in line.split(",")), strict=True))
        rows.append({key: _value(word) for key, word in row.items()})
    return rows


def _value(word: str) -> str | int | None:
    if word.startswith("["):
        return None
    return int(word) if word.isdigit() else word


def _from_proc(folder: Path) -> list[dict[str, Any]]:
    if not (folder / "version").exists():
        return []
    models = [
        re.search(r"^Model:\s*(.+)$", (gpu / "information").read_text(), re.MULTILINE)
        for gpu in sorted((folder / "gpus").iterdir())
    ]
    return [
        {"name": model and model.group(1).strip(), "driver": driver_version(folder)}
        for model in models
    ]


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """As many as needed, of one kind and driver on all nodes, their memory free and without errors."""
    if not needs.gpus:
        return
    for host, told in evidence.items():
        gpus = told["gpus"]
        if len(gpus) < needs.gpus:
            yield Finding(host, "GPUs", str(len(gpus)), str(needs.gpus))
        for index, gpu in enumerate(gpus):
            yield from _of_one(host, f"GPU {index}", gpu)
    for key, what in (("name", "kind of GPU"), ("driver", "driver")):
        known = {host: _names(told["gpus"], key) for host, told in evidence.items()}
        yield from odd_ones(what, {host: names for host, names in known.items() if names})


def _of_one(host: str, what: str, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    used = gpu.get("used_mib")
    if isinstance(used, int) and used > _MOST_USED_MIB:
        expected = f"at most {_MOST_USED_MIB} MiB: no other process"
        yield Finding(host, f"{what}: memory in use", f"{used} MiB", expected)
    if gpu.get("uncorrected_errors"):
        count = str(gpu["uncorrected_errors"])
        yield Finding(host, f"{what}: uncorrected memory errors", count, "0")
    if gpu.get("mig") == "Enabled":
        yield Finding(host, f"{what}: MIG", "enabled", "disabled: a whole GPU")


def _names(gpus: list[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({str(gpu[key]) for gpu in gpus if gpu.get(key)}))
