"""A reward that differs from response to response, so that a random model's groups have advantages."""

from __future__ import annotations

import zlib

TARGET = "megatron_dppo.cluster.rehearsal.signal:spread"


def spread(response: str) -> float:
    """Return a hash of the response as a number in [0, 1)."""
    return zlib.crc32(response.encode()) / 2**32
