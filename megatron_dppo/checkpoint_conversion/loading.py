"""Open any checkpoint folder as Hugging Face tensors: Hugging Face's own, or Megatron-Core's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from megatron_dppo.checkpoint_conversion import tensor_store
from megatron_dppo.checkpoint_conversion.certificate import (
    FILE,
    Certificate,
    TensorHashes,
    load_certificate,
)
from megatron_dppo.checkpoint_conversion.hf_folder import SafetensorsReader
from megatron_dppo.checkpoint_conversion.torch_dist import TorchDistCheckpoint
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing


class Store(tensor_store.TensorStore, Protocol):
    """A folder's tensors."""

    @property
    def folder(self) -> Path:
        """Where they lie."""

    def close(self) -> None:
        """Close the files."""


class CheckedReader(Closing):
    """Slices of Hugging Face tensors; a tensor's SHA-256 is compared with the certificate when it is first read.

    Without a certificate (a folder that was not converted here) nothing is compared.
    """

    def __init__(self, store: Store, certificate: Certificate | None) -> None:
        self._store = store
        self._certificate = certificate
        self._checked: set[str] = set()
        self._hashes = TensorHashes()

    @property
    def specs(self) -> Mapping[str, tensor_store.TensorSpec]:
        """Shape and dtype of every tensor."""
        return self._store.specs

    def check(self, shape: ModelShape) -> None:
        """Raise CheckpointError where a tensor is missing, unknown, or of another shape than ``shape``'s tables say.

        And where a tied model stores an output layer that is not its embedding.
        """
        tensor_store.check_tensors(self.specs, shape, str(self._store.folder))
        tensor_store.check_tied_copy(self._store, shape, str(self._store.folder))

    def read(
        self, name: str, dim: int = 0, start: int = 0, length: int | None = None
    ) -> torch.Tensor:
        """``tensor.narrow(dim, start, length)``, contiguous. Raises MismatchError where the tensor was altered."""
        if self._certificate is not None and name not in self._checked:
            # The whole tensor, though a rank needs a slice of it: its hash is of all its rows.
            digest = self._hashes.add(self._store, name)
            self._certificate.check_tensor(name, digest, self._store.folder)
            self._checked.add(name)
        return tensor_store.read_slice(self._store, name, dim, start, length)

    def close(self) -> None:
        self._hashes.close()
        self._store.close()


def open_checkpoint(folder: str | Path) -> CheckedReader:
    """Open a Hugging Face folder, or one that ``hf_to_megatron`` wrote.

    Raises CheckpointError for anything else.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not (folder / FILE).exists():
        return CheckedReader(SafetensorsReader(folder), None)
    certificate = load_certificate(folder)
    if certificate.form == "huggingface":
        return CheckedReader(SafetensorsReader(folder), certificate)
    return CheckedReader(TorchDistCheckpoint(folder, certificate.shape), certificate)


def tensor_digests(folder: str | Path, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Name -> SHA-256 (hex) of every ``parts``-th tensor of the folder from number ``part`` on, by name."""
    with open_checkpoint(folder) as reader, TensorHashes() as hashes:
        for name in sorted(reader.specs)[part::parts]:
            for start, count in tensor_store.row_blocks(reader.specs[name]):
                hashes.update(name, reader.read(name, 0, start, count))
        return hashes.digests()


def combined_digest(digests: Iterable[dict[str, str]]) -> str:
    """SHA-256 (hex) of the lines ``name digest``, sorted, of all parts together."""
    lines = sorted(f"{name} {digest}\n" for part in digests for name, digest in part.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()
