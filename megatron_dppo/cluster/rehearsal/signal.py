"""A reward that differs from response to response, so that a random model's groups have advantages."""

from __future__ import annotations

import zlib

TARGET = "megatron_dppo.cluster.rehearsal.signal:spread"


def spread(response: str) -> float:
    """Return a number in [0, 1) that depends on every character of the response, and on nothing else."""
    return zlib.crc32(response.encode()) / 2**32
