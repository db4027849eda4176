"""What a GPU's tensor cores do at most, by the name that its driver gives it."""

from __future__ import annotations

import re

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
