"""One SHA-256 for all tensors of a checkpoint folder, whatever files and layout they lie in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from megatron_dppo.checkpoint_conversion.hashing import TensorHashes
from megatron_dppo.checkpoint_conversion.loading import open_checkpoint
from megatron_dppo.checkpoint_conversion.tensor_store import row_blocks


def tensor_digests(folder: str | Path, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Name -> SHA-256 (hex) of every ``parts``-th tensor of the folder from number ``part`` on, by name."""
    with open_checkpoint(folder) as reader, TensorHashes() as hashes:
        for name in sorted(reader.specs)[part::parts]:
            for start, count in row_blocks(reader.specs[name]):
                hashes.update(name, reader.read(name, 0, start, count))
        return hashes.digests()


def combined_digest(digests: Iterable[dict[str, str]]) -> str:
    """SHA-256 (hex) of the lines ``name digest``, sorted, of all parts together."""
    lines = sorted(f"{name} {digest}\n" for part in digests for name, digest in part.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()
