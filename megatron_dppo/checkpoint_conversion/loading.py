"""Open any checkpoint folder as Hugging Face tensors: Hugging Face's own, or Megatron-Core's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from megatron_dppo.checkpoint_conversion import certificate as certificates
from megatron_dppo.checkpoint_conversion.certificate import Certificate, load_certificate
from megatron_dppo.checkpoint_conversion.hf_io import SafetensorsReader
from megatron_dppo.checkpoint_conversion.safetensors_file import TensorSpec, byte_view
from megatron_dppo.checkpoint_conversion.tensor_store import (
    TensorStore,
    check_tensors,
    check_tied_copy,
    read_slice,
    row_blocks,
)
from megatron_dppo.checkpoint_conversion.torch_dist_checkpoint import TorchDistCheckpoint
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing


class Store(TensorStore, Protocol):
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

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        return self._store.specs

    def check(self, shape: ModelShape) -> None:
        """Raise CheckpointError where a tensor is missing, unknown, or of another shape than ``shape``'s tables say.

        And where a tied model stores an output layer that is not its embedding.
        """
        check_tensors(self.specs, shape, str(self._store.folder))
        check_tied_copy(self._store, shape, str(self._store.folder))

    def read(
        self, name: str, dim: int = 0, start: int = 0, length: int | None = None
    ) -> torch.Tensor:
        """``tensor.narrow(dim, start, length)``, contiguous. Raises MismatchError where the tensor was altered."""
        if self._certificate is not None and name not in self._checked:
            self._check(name, self._certificate.tensors)
        return read_slice(self._store, name, dim, start, length)

    def _check(self, name: str, recorded: Mapping[str, str]) -> None:
        digest = hashlib.sha256()
        for start, count in row_blocks(self._store.specs[name]):
            digest.update(byte_view(self._store.read_rows(name, start, count)))
        if digest.hexdigest() != recorded.get(name):
            raise MismatchError(
                f"{self._store.folder}: {name} has SHA-256 {digest.hexdigest()}, {certificates.FILE} recorded "
                f"{recorded.get(name)}; if its weights were changed on purpose, remove {certificates.FILE}"
            )
        self._checked.add(name)

    def close(self) -> None:
        """Close the store's files."""
        self._store.close()


def open_checkpoint(folder: str | Path) -> CheckedReader:
    """Open a Hugging Face folder, or one that ``hf_to_megatron`` wrote.

    Raises CheckpointError for anything else.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not (folder / certificates.FILE).exists():
        return CheckedReader(SafetensorsReader(folder), None)
    certificate = load_certificate(folder)
    return CheckedReader(_STORES[certificate.form](folder, certificate), certificate)


_STORES: dict[str, Callable[[Path, Certificate], Store]] = {
    "huggingface": lambda folder, _: SafetensorsReader(folder),
    "torch_dist": lambda folder, certificate: TorchDistCheckpoint(folder, certificate.shape),
}
