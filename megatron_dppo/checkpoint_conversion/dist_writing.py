"""A rank's file of a ``torch_dist`` checkpoint, hashed while it is written, and the index over all ranks' files.

The files are those of torch.distributed.checkpoint: tensors in the form of ``torch.save``, one after another, and a
pickled index. torch's own writer is not used: it plans with all ranks before it writes, and its files must be read
again to be hashed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_dppo.checkpoint_conversion.dist_blocks import Block
from megatron_dppo.checkpoint_conversion.safetensors_file import byte_view
from megatron_dppo.checkpoint_conversion.torch_dist_writing import BACKEND

INDEX_FILE = ".metadata"
COMMON_FILE = "common.pt"
BACKEND_FILE = "metadata.json"

StoredItem = list[Any]
"""JSON: key, file, first byte, bytes; of a tensor's block also dims, offsets, sizes, dtype."""


class HashedFile:
    """A new binary file that is hashed on its way. A context manager; at its end the bytes are on the disk.

    ``error``: of the disk, where writing failed; torch.save reports another one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.error: OSError | None = None
        self._digest = hashlib.sha256()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(descriptor, "wb", 1 << 20)

    def write(self, data: bytes) -> int:
        """Append."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """For torch.save."""

    @property
    def record(self) -> dict[str, Any]:
        """The manifest's entry: {"bytes", "sha256"}."""
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abandon()
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _abandon(self) -> None:
        try:
            self._file.close()
        except OSError as late:  # what is still in the buffer doesn't fit either
            self.error = self.error or late


def write_hashed(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file to the disk; its manifest entry."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


class BlockFile:
    """Appends blocks and objects to a HashedFile; ``items`` says where each of them lies."""

    def __init__(self, file: HashedFile) -> None:
        self.items: list[StoredItem] = []
        self._file = file

    def add(self, block: Block, values: torch.Tensor) -> None:
        """Append a block: ``values`` are its elements in row-major order, contiguous on the CPU."""
        # A tensor over these bytes alone: torch.save writes all of what a view looks into.
        alone = torch.frombuffer(byte_view(values), dtype=block.dtype).view(block.box.sizes)
        dtype = str(block.dtype).removeprefix("torch.")
        self._save(alone, block.key, [block.dims, block.box.offsets, block.box.sizes, dtype])

    def add_object(self, key: str, value: Any) -> None:
        """Append what is not a tensor, or has no place in one."""
        self._save([value], key, [])

    def _save(self, value: Any, key: str, described: list[Any]) -> None:
        start = self._file.size
        try:
            torch.save(value, cast(IO[bytes], self._file))
        except (OSError, RuntimeError) as error:
            raise (self._file.error or error) from None
        self.items.append([key, self._file.path.name, start, self._file.size - start, *described])


def write_headers(folder: Path, items: Iterable[StoredItem], step: int) -> dict[str, Any]:
    """Write the index over all ranks' ``items``, and the other files that Megatron's loader expects.

    Returns their manifest entries by name.
    """
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": step}, common)
    contents = {
        INDEX_FILE: pickle.dumps(_metadata(items)),
        COMMON_FILE: common.getvalue(),
        BACKEND_FILE: json.dumps(BACKEND).encode(),
    }
    return {name: write_hashed(folder / name, data) for name, data in contents.items()}


def _metadata(items: Iterable[StoredItem]) -> Metadata:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored = {}
    for key, file, start, length, *block in items:
        place = _StorageInfo(file, start, length)
        if not block:
            described[key] = BytesStorageMetadata()
            stored[MetadataIndex(key)] = place
            continue
        dims, offsets, sizes, dtype = block
        tensor = described.setdefault(
            key,
            TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, dtype)), torch.Size(dims), []
            ),
        )
        assert isinstance(tensor, TensorStorageMetadata), f"{key}: a tensor and an object"
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        stored[MetadataIndex(key, chunk.offsets, len(tensor.chunks))] = place
        tensor.chunks.append(chunk)
    return Metadata(described, None, stored, StorageMeta(), CURRENT_DCP_VERSION)
