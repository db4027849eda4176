"""Units in which the planner counts and prints: bytes, seconds, FLOPs; memory in GiB, traffic in GB."""

from __future__ import annotations

GIB = 2**30
GB = 10**9
MIB = 2**20


def gib(count: float) -> str:
    """Bytes of memory as GiB, one decimal; three where they are few."""
    value = count / GIB
    return f"{value:.1f} GiB" if value >= 0.1 or not value else f"{value:.3f} GiB"


def gb(count: float) -> str:
    """Bytes that travel or are stored, as GB."""
    value = count / GB
    return f"{value:.1f} GB" if value >= 0.1 or not value else f"{value:.3f} GB"


def power_of_two(count: int) -> int:
    """The least power of two that is not below ``count``; 0 of none."""
    return 1 << (count - 1).bit_length() if count else 0


def ceil_to(value: int, multiple: int) -> int:
    """``value`` rounded up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple
