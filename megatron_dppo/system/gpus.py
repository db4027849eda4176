"""This machine's NVIDIA GPUs: how many are visible, the driver's version, peak FLOP/s. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import re
from pathlib import Path

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia")
LEAST_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> major version of the oldest driver that runs it (NVIDIA's page "CUDA Compatibility", minor
version compatibility)."""
_MODEL = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)
_HIDE = "an empty CUDA_VISIBLE_DEVICES hides the GPUs on purpose"


def visible_gpus() -> int:
    """Return the number of GPUs that the NVIDIA driver shows and that CUDA_VISIBLE_DEVICES does not hide.

    As in CUDA, an empty name and -1 end the list in CUDA_VISIBLE_DEVICES. A container has only the device files of its
    GPUs, while the driver's folder in /proc lists all GPUs of the machine.
    """
    shown = len(list(DEVICES.glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return shown
    names = itertools.takewhile(_names_gpu, visible.split(","))
    return min(shown, len(list(names)))


def _names_gpu(name: str) -> bool:
    return name.strip() not in ("", "-1")


def has_visible_gpu() -> bool:
    """Whether ``visible_gpus`` is not 0."""
    return visible_gpus() > 0


def driver_version(folder: Path | None = None) -> str | None:
    """Return the version of the driver's loaded kernel module, for example ``580.65.06``; None without a driver.

    ``folder`` replaces DRIVER.
    """
    path = (folder or DRIVER) / "version"
    if not path.exists():
        return None
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text())
    return match and match.group()


def torch_gpu_fault(torch_version: str, cuda: str | None) -> str:
    """Return why this torch can't use the machine's visible GPU: given value, expected value and remedy.

    Call this if the driver shows a GPU and torch does not. ``cuda`` is the version of CUDA that torch was built for,
    for example ``13.0``; None for a torch without CUDA.
    """
    if cuda is None:
        requirement = "expected the packages of tools/environment/gpu.txt"
        return f"GPU: torch {torch_version} is built only for CPUs, {requirement}; {_HIDE}"
    driver = driver_version()
    driver_major = int(driver.partition(".")[0]) if driver else 0
    oldest_driver = LEAST_DRIVER.get(int(cuda.partition(".")[0]))
    if oldest_driver is None:
        expected_driver = f"one for CUDA {cuda}"
    elif driver_major >= oldest_driver:
        expected_driver = "one that answers: nvidia-smi says why"
    else:
        expected_driver = f"{oldest_driver} or newer"
    return (
        f"GPU: torch {torch_version} (CUDA {cuda}) can't use it: got driver {driver or 'of unknown version'}, expected "
        f"{expected_driver}; {_HIDE}"
    )


_SGLANG_DEEP_EP = "sgl-deep-ep"
_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b", re.IGNORECASE)


def has_megatrons_deep_ep() -> bool:
    """Whether the installed package ``deep_ep`` is DeepEP's own, which Megatron-Core uses.

    SGLang's distribution sgl-deep-ep has another package of this name.
    """
    if importlib.util.find_spec("deep_ep") is None:
        return False
    return not any(importlib.metadata.distributions(name=_SGLANG_DEEP_EP))


def has_hopper() -> bool:
    """Whether the driver lists a GPU of the Hopper generation."""
    return any(map(_HOPPER.search, gpu_models()))


def gpu_models(folder: Path | None = None) -> list[str]:
    """Return the driver's name of each GPU, for example ``NVIDIA H200``; an empty text for a GPU without a name.

    ``folder`` replaces DRIVER.
    """
    models: list[str] = []
    for file in sorted(((folder or DRIVER) / "gpus").glob("*/information")):
        model = _MODEL.search(file.read_text(encoding="utf-8"))
        models.append(model[1].strip() if model else "")
    return models


TERA = 10**12
PEAKS = {
    "H100 PCIe": 756 * TERA,
    "H100 NVL": 835 * TERA,
    "H200 NVL": 835 * TERA,
    "A100": 312 * TERA,
    "H100": 989 * TERA,
    "H200": 989 * TERA,
    "GB200": 2500 * TERA,
    "B200": 2250 * TERA,
}
"""Model of a GPU -> its dense bfloat16 FLOP/s (half of the figure with sparsity in NVIDIA's data sheets). The first
match counts, so longer names come first."""
_MIG = re.compile(r"\bMIG\b", re.IGNORECASE)


def peak_flops(name: str) -> int | None:
    """Return the dense bf16 FLOP/s of the GPU ``name``, for example ``NVIDIA H100 80GB HBM3``.

    Returns None for an unknown GPU, and for a part of a GPU (MIG).
    """
    if _MIG.search(name):
        return None
    for model, peak in PEAKS.items():
        if re.search(rf"\b{model}\b", name, re.IGNORECASE):
            return peak
    return None
