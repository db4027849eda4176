"""The check of a node's GPUs: their number, kind, driver, used memory and memory errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.cluster.preflight.evidence import (
    CheckError,
    EvidenceByHost,
    Finding,
    Needs,
    outlier_findings,
)
from megatron_dppo.system import gpus as machine_gpus
from megatron_dppo.system.programs import ProgramError, output_of

_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "used_mib": "memory.used",
    "mig": "mig.mode.current",
    "uncorrected_errors": "ecc.errors.uncorrected.volatile.total",
}
_SMI_S = 30.0
_MOST_USED_MIB = 1024
"""Most memory in use on an idle GPU, in MiB. Only the driver uses memory of an idle GPU."""


def gpus_here() -> dict[str, Any]:
    """Return the machine's GPUs from ``nvidia-smi``; without ``nvidia-smi``, return their names and driver from /proc.

    ``gpus`` has one entry for each GPU, and ``source`` is the program or the folder that was read. Raises CheckError
    if ``nvidia-smi`` fails.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"gpus": gpus_of_driver(machine_gpus.DRIVER), "source": str(machine_gpus.DRIVER)}
    return {"gpus": parse(_query(program)), "source": program}


def _query(program: str) -> str:
    query = f"--query-gpu={','.join(_FIELDS.values())}"
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        return output_of(command, _SMI_S)
    except ProgramError as error:
        raise CheckError(f"nvidia-smi: {error}") from error


def parse(table: str) -> list[dict[str, Any]]:
    """Parse GPUs from the lines of ``nvidia-smi``. A value that the GPU does not report (``[N/A]``) is None."""
    gpus: list[dict[str, Any]] = []
    for line in table.splitlines():
        values = [_value(cell.strip()) for cell in line.split(",")]
        gpus.append(dict(zip(_FIELDS, values, strict=True)))
    return gpus


def _value(cell: str) -> str | int | None:
    if cell.startswith("["):
        return None
    return int(cell) if cell.isdigit() else cell


def gpus_of_driver(folder: Path) -> list[dict[str, Any]]:
    """Return names and driver from the driver's ``folder`` in /proc."""
    if not (folder / "version").exists():
        return []
    driver = machine_gpus.driver_version(folder)
    models = machine_gpus.gpu_models(folder)
    return [{"name": model or None, "driver": driver} for model in models]


def judge_gpus(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report too few GPUs, different kinds or drivers, used memory and memory errors."""
    if not needs.gpus:
        return
    for host, entry in evidence.items():
        gpus = entry["gpus"]
        if len(gpus) < needs.gpus:
            yield Finding(host, "GPUs", str(len(gpus)), str(needs.gpus))
        for index, gpu in enumerate(gpus):
            yield from _judge_gpu(host, f"GPU {index}", gpu)
    for key, subject in (("name", "kind of GPU"), ("driver", "driver")):
        names = {host: _names(entry["gpus"], key) for host, entry in evidence.items()}
        yield from outlier_findings(subject, {host: text for host, text in names.items() if text})


def _judge_gpu(host: str, subject: str, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    used = gpu.get("used_mib")
    if isinstance(used, int) and used > _MOST_USED_MIB:
        expectation = f"at most {_MOST_USED_MIB} MiB: no other process"
        yield Finding(host, f"{subject}: memory in use", f"{used} MiB", expectation)
    if errors := gpu.get("uncorrected_errors"):
        yield Finding(host, f"{subject}: uncorrected memory errors", str(errors), "0")
    if gpu.get("mig") == "Enabled":
        yield Finding(host, f"{subject}: MIG", "enabled", "disabled: a whole GPU")


def _names(gpus: list[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({str(gpu[key]) for gpu in gpus if gpu.get(key)}))
