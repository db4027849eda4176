"""Describe the machine and its libraries: the figures of the other parts depend on them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from megatron_dppo.cluster.preflight.evidence import CheckError
from megatron_dppo.cluster.preflight.gpus import gpus_here
from megatron_dppo.cluster.preflight.inspection import (
    nccl_version,
    package_version,
    transformer_engine_fault,
)
from megatron_dppo.diagnostics.gpu_check import Bench, CheckRow, part

PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "sglang",
    "flashinfer-python",
    "liger-kernel",
)


@part("GPUs, driver and versions", 60.0)
def machine(bench: Bench) -> Iterator[CheckRow]:
    """Yield a row for each GPU and each library."""
    try:
        gpus = gpus_here()["gpus"]
    except CheckError as error:
        yield CheckRow("GPUs", str(error), "an answer of nvidia-smi", False)
        gpus = []
    for number, gpu in enumerate(gpus):
        memory = ""
        if gpu.get("memory_mib"):
            memory = f", {gpu['memory_mib']} MiB"
        yield CheckRow(f"GPU {number}", f"{gpu['name']}{memory}, driver {gpu['driver']}")
    if not gpus:
        yield CheckRow("GPUs", "none")
    yield CheckRow("Python", sys.version.split()[0])
    for name in PACKAGES:
        yield CheckRow(name, package_version(name) or "not installed")
    fault = transformer_engine_fault()
    if fault is not None:
        yield CheckRow("Transformer Engine", fault, "a complete installation", False)
    yield CheckRow("NCCL", nccl_version() or "none")
    if bench.gpus:
        yield _torch_sees(bench.gpus)


def _torch_sees(expected: int) -> CheckRow:
    import torch

    count = torch.cuda.device_count()
    return CheckRow("GPUs that torch sees", str(count), str(expected), count == expected)
