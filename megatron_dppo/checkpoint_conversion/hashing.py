"""SHA-256 of tensors that are streamed."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_dppo.checkpoint_conversion.safetensors_file import byte_view
from megatron_dppo.system.files import Closing


class TensorHashes(Closing):
    """SHA-256 of tensors that arrive in row blocks, tensor after tensor; computed in a thread, one block behind."""

    def __init__(self) -> None:
        self._hashes: dict[str, hashlib._Hash] = {}
        self._pool = ThreadPoolExecutor(1, "hash")
        self._pending: Future | None = None

    def update(self, name: str, rows: torch.Tensor) -> None:
        """Add a block to ``name``'s hash; the tensor must not change afterwards."""
        self._wait()
        digest = self._hashes.setdefault(name, hashlib.sha256())
        self._pending = self._pool.submit(digest.update, byte_view(rows))

    def digests(self) -> dict[str, str]:
        """Hex digests, in the order in which the tensors came."""
        self._wait()
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()
