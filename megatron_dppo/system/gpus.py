"""What this machine has of CUDA, as its files tell it: GPUs and their driver. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia")
LEAST_DRIVER = {12: 525, 13: 580}
"""The oldest driver's major version by CUDA's (CUDA Compatibility, "minor version compatibility")."""
_HIDE = "CUDA_VISIBLE_DEVICES= (empty) leaves them alone on purpose"


def has_visible_gpu() -> bool:
    """Whether the NVIDIA driver shows a GPU that CUDA_VISIBLE_DEVICES does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(DEVICES.glob("nvidia[0-9]*"))


def driver_version(folder: Path | None = None) -> str | None:
    """Of the loaded kernel module, such as ``580.65.06``; None without one. ``folder``: in place of DRIVER."""
    path = (folder or DRIVER) / "version"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
    return found and found.group()


def unusable_gpu(torch_version: str, cuda: str | None) -> str:
    """Why this torch, which sees no GPU, can't use the one that is visible: got, expected, the way out.

    ``cuda``: the version that torch was built for, such as ``13.0``; None: for CPUs.
    """
    if cuda is None:
        needed = "expected the packages of tools/environment/gpu.txt"
        return f"GPU: torch {torch_version} is built for CPUs alone, {needed}; {_HIDE}"
    driver = driver_version() or "of unknown version"
    least = LEAST_DRIVER.get(int(cuda.partition(".")[0]))
    if least is not None and driver[0].isdigit() and int(driver.partition(".")[0]) >= least:
        expected = "one that answers: nvidia-smi says why"
    else:
        expected = f"{least} or newer" if least else f"one for CUDA {cuda}"
    return (
        f"GPU: torch {torch_version} (CUDA {cuda}) can't use it: got driver {driver}, expected "
        f"{expected}; {_HIDE}"
    )


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
"""Dense bfloat16 FLOP/s by NVIDIA's data sheets (half of what they tell with sparsity); the longer names first."""
_SHARE = re.compile(r"\bMIG\b", re.IGNORECASE)


def peak_flops(name: str) -> int | None:
    """Dense bf16 FLOP/s of ``name``, e.g. "NVIDIA H100 80GB HBM3"; None for an unknown GPU and for a share
    of one (MIG)."""
    if _SHARE.search(name):
        return None
    for known, peak in PEAKS.items():
        if re.search(rf"\b{known}\b", name, re.IGNORECASE):
            return peak
    return None
