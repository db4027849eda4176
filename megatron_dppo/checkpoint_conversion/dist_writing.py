"""Writing ``torch_dist`` checkpoints without Megatron: one rank's file in a checkpoint of a run, or a converted model.

The files have the format of torch.distributed.checkpoint: tensors in the form of ``torch.save``, one after another, and
a pickled index. This module does not use torch's own writer for two reasons: the writer plans with all ranks before it
writes, and its files must be read again to be hashed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

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

from megatron_dppo.checkpoint_conversion.dist_reading import Box, TensorBlock
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec, byte_view, row_blocks
from megatron_dppo.checkpoint_conversion.torch_dist import (
    StackedParameter,
    stack_sizes,
    written_parameter,
)
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import LocalParameter, local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.failpoints import file_failpoint, keep_half

INDEX_FILE = ".metadata"
COMMON_FILE = "common.pt"
BACKEND_FILE = "metadata.json"
CONVERTED_FILE = "__0_0.distcp"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

StoredItem = list[Any]
"""JSON list: key, file, first byte, number of bytes; for a tensor's block also dims, offsets, sizes, dtype."""
ReadRows = Callable[[str, int, int], torch.Tensor]
"""(Hugging Face name, first row, number of rows) -> the rows. Every row of every tensor is read once, in order."""


class NewFile:
    """A new binary file, as a context manager. If the block ends without an error, the bytes are on the disk.

    ``error`` is the OSError of the first failed write: torch.save replaces it by a RuntimeError without the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.error: OSError | None = None
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(descriptor, "wb", 1 << 20)
        file_failpoint("create", path.name)

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing; torch.save calls this method."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with self._file:
                # In a test of torn writes, the failpoint calls the lambda.
                file_failpoint("write", self.path.name, lambda: keep_half(self._file))
                self._file.flush()
                os.fsync(self._file.fileno())
            file_failpoint("synced", self.path.name)
            return
        try:
            self._file.close()
        except OSError as close_error:
            # On a full disk, writing the buffer fails too. Keep the first error: it has the reason.
            self.error = self.error or close_error


class HashedFile(NewFile):
    """A new binary file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        count = super().write(data)
        self._digest.update(data)
        return count

    @property
    def record(self) -> dict[str, Any]:
        """The manifest's entry: {"bytes", "sha256"}."""
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}


def write_hashed(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file to the disk. Returns its manifest entry."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


class BlockFile:
    """Appends blocks and objects to a file. ``items`` has their positions."""

    def __init__(self, file: NewFile) -> None:
        self.items: list[StoredItem] = []
        self._file = file

    def add(self, block: TensorBlock, values: torch.Tensor) -> None:
        """Append a block. ``values`` are its elements in row-major order, contiguous on the CPU."""
        # Build a tensor of only these bytes, because torch.save writes the whole storage of a view.
        tensor = torch.frombuffer(byte_view(values), dtype=block.dtype).view(block.box.sizes)
        dtype = str(block.dtype).removeprefix("torch.")
        self._save(tensor, block.key, [block.dims, block.box.offsets, block.box.sizes, dtype])

    def add_object(self, key: str, value: Any) -> None:
        """Append an object that is not part of a tensor."""
        # Megatron-Core reads a list of objects for each key. This list has one object.
        self._save([value], key, [])

    def _save(self, value: Any, key: str, block_fields: list[Any]) -> None:
        start = self._file.size
        try:
            torch.save(value, cast(IO[bytes], self._file))
        except (OSError, RuntimeError) as error:
            raise (self._file.error or error) from None
        self.items.append(
            [key, self._file.path.name, start, self._file.size - start, *block_fields]
        )


def write_headers(folder: Path, items: Iterable[StoredItem], step: int) -> dict[str, Any]:
    """Write the index over all ranks' ``items``, and the other files that Megatron's loader expects.

    Returns the manifest entries of these files by name.
    """
    common = io.BytesIO()
    # Megatron-LM reads both entries; 3.0 is the version that it writes.
    torch.save({"checkpoint_version": 3.0, "iteration": step}, common)
    contents = {
        INDEX_FILE: pickle.dumps(_metadata(items)),
        COMMON_FILE: common.getvalue(),
        BACKEND_FILE: json.dumps(BACKEND).encode(),
    }
    return {name: write_hashed(folder / name, data) for name, data in contents.items()}


def _metadata(items: Iterable[StoredItem]) -> Metadata:
    contents: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    locations = {}
    for key, file, start, length, *block in items:
        location = _StorageInfo(file, start, length)
        if not block:
            contents[key] = BytesStorageMetadata()
            locations[MetadataIndex(key)] = location
            continue
        dims, offsets, sizes, dtype = block
        properties = TensorProperties(dtype=getattr(torch, dtype))
        new_tensor = TensorStorageMetadata(properties, torch.Size(dims), [])
        tensor = contents.setdefault(key, new_tensor)
        assert isinstance(tensor, TensorStorageMetadata), f"{key}: a tensor and an object"
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        locations[MetadataIndex(key, chunk.offsets, len(tensor.chunks))] = location
        tensor.chunks.append(chunk)
    return Metadata(contents, None, locations, StorageMeta(), CURRENT_DCP_VERSION)


def write_torch_dist(
    folder: Path, shape: ModelShape, dtypes: Mapping[str, torch.dtype], read: ReadRows
) -> None:
    """Write a model into ``folder``, an existing empty folder. Every layout can load the result.

    ``dtypes`` has the dtype of each Hugging Face tensor; all tensors of one Megatron parameter have one dtype. The
    function needs memory for one chunk: a layer's matrix or a block of rows. It also writes the empty extra states that
    Transformer Engine's modules expect when they load.
    """
    with NewFile(folder / CONVERTED_FILE) as file:
        blocks = BlockFile(file)
        for key in _extra_states(shape):
            blocks.add_object(key, None)
        for chunk in _chunks(shape, dtypes):
            blocks.add(chunk.block(shape), _assemble(chunk, read).to(chunk.dtype))
    write_headers(folder, blocks.items, 0)


@dataclass(frozen=True)
class _Chunk:
    """Rows ``start .. start + count`` of ``parameter``, which is whole: one rank has the whole model.

    ``stacked`` is the parameter's position in a tensor of the checkpoint. The chunk becomes one block of this tensor.
    """

    parameter: LocalParameter
    stacked: StackedParameter
    dtype: torch.dtype
    start: int
    count: int

    def block(self, shape: ModelShape) -> TensorBlock:
        dims = self.parameter.shape
        stack = stack_sizes(shape, self.stacked)
        # The axes of the stacked tensor: layers, experts (``stacked.index``), then the parameter's rows and columns.
        offsets = (*self.stacked.index, self.start, *(0 for _ in dims[1:]))
        sizes = (*(1 for _ in self.stacked.index), self.count, *dims[1:])
        return TensorBlock(self.stacked.key, (*stack, *dims), Box(offsets, sizes), self.dtype)


def _chunks(shape: ModelShape, dtypes: Mapping[str, torch.dtype]) -> Iterator[_Chunk]:
    """Yield the chunks of the model, parameter after parameter.

    The chunks depend on the source of the parameter's rows:

    1. Every n-th row of a tensor: one chunk.
    2. One Hugging Face tensor (the vocabulary): a chunk for each block of rows.
    3. Several tensors, one after another (gate and up): a chunk for each tensor.
    4. Several tensors whose rows alternate (queries, keys and values): one chunk.
    """
    for p in local_parameters(shape, Layout(), 0):
        stacked = written_parameter(shape, p.name)
        sources = {s.hf_name for s in p.segments}
        dtype = dtypes[p.segments[0].hf_name]
        if any(s.hf_step > 1 for s in p.segments):
            yield _Chunk(p, stacked, dtype, 0, p.shape[0])
        elif len(sources) == 1:
            for start, count in row_blocks(TensorSpec(p.shape, dtype)):
                yield _Chunk(p, stacked, dtype, start, count)
        elif len(sources) == len(p.segments):
            for s in p.segments:
                yield _Chunk(p, stacked, dtype, s.local_start, s.length)
        else:
            yield _Chunk(p, stacked, dtype, 0, p.shape[0])


def _assemble(chunk: _Chunk, read: ReadRows) -> torch.Tensor:
    """Read the chunk's rows. Over all chunks, every Hugging Face tensor is read once, in order."""
    segments = chunk.parameter.segments
    if len(segments) == 1:
        # The parameter is a Hugging Face tensor: a row has the same number in both.
        return read(segments[0].hf_name, chunk.start, chunk.count)
    # A chunk of a parameter with several segments consists of one or more whole Hugging Face tensors.
    end = chunk.start + chunk.count
    chunk_segments = [s for s in segments if chunk.start <= s.local_start < end]
    lengths = Counter[str]()
    for s in chunk_segments:
        lengths[s.hf_name] += s.length
    sources = {name: read(name, 0, length) for name, length in lengths.items()}
    return torch.cat([s.of_hf(sources[s.hf_name]) for s in chunk_segments])


_WITHOUT_EXTRA_STATE = (
    ".shared_experts.gate_weight",
    ".self_attention.A_log",
    ".self_attention.conv1d.weight",
    ".self_attention.dt_bias",
    ".self_attention.out_norm.weight",
)
"""Ends of the names of parameters whose modules are not Transformer Engine's. These modules have no extra state."""


def _extra_states(shape: ModelShape) -> Iterable[str]:
    """Return the keys of the modules' extra states: one key for each layer, or for each layer and expert.

    A key is ``<module>._extra_state/shard_<index>_<sizes>``, with the index and the sizes of the axes over which the
    module is stacked. For a module that is not stacked, the index is 0 and the size is 1.
    """
    # The keys of a dict are an ordered set: the parameters of one module give one key.
    keys: dict[str, None] = {}
    for p in local_parameters(shape, Layout(), 0):
        stacked = written_parameter(shape, p.name)
        module = stacked.key.rpartition(".")[0]
        # Only Transformer Engine's modules have an extra state.
        if "router" in module or module in ("embedding.word_embeddings", "output_layer"):
            continue
        if p.name.endswith(_WITHOUT_EXTRA_STATE):
            continue
        # A norm over all heads is a module of ``families/shared/all_heads_norm``.
        if shape.norms_all_heads and module.endswith(("q_layernorm", "k_layernorm")):
            continue
        modules = [module]
        # The core attention has an extra state, but no parameters.
        if module.endswith("linear_qkv"):
            modules.append(module.replace("linear_qkv", "core_attention"))
        sizes = stack_sizes(shape, stacked) or (1,)
        shard = ".".join(map(str, stacked.index or (0,)))
        for name in modules:
            keys[f"{name}._extra_state/shard_{shard}_{'.'.join(map(str, sizes))}"] = None
    return keys
