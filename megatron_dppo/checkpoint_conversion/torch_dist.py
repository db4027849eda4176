"""Megatron-Core's distributed checkpoints (``torch_dist``), read by rows and without Megatron.

They are torch.distributed.checkpoint folders whose tensors are the whole model's: layers stacked along a first axis,
experts along a second. So one folder loads under every layout, and a parameter here is that of a single-rank layout.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from megatron_dppo.checkpoint_conversion.errors import CheckpointError
from megatron_dppo.checkpoint_conversion.safetensors_file import byte_view
from megatron_dppo.checkpoint_conversion.saved_tensor import find_saved_tensor

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


@dataclass(frozen=True)
class GlobalPlace:
    """``tensor[index]`` of the checkpoint's tensor ``key`` is one parameter of a single-rank layout."""

    key: str
    index: tuple[int, ...]


def global_places(name: str) -> list[GlobalPlace]:
    """Where a single-rank parameter may lie: stacked over layers (the default), else in a tensor a layer."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return [GlobalPlace(name, ())]
    number, rest = int(layer[1]), layer[2]
    expert = _EXPERT.fullmatch(rest)
    index: tuple[int, ...] = ()
    if expert is not None:
        rest, index = f"mlp.experts.experts.{expert[1]}.weight", (int(expert[2]),)
    return [
        GlobalPlace(f"decoder.layers.{rest}", (number, *index)),
        GlobalPlace(f"decoder.layers.{number}.{rest}", index),
    ]


class _MetadataUnpickler(pickle.Unpickler):
    """Loads only the plain records that describe a checkpoint."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
    _NAMES = frozenset(
        {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size")}
        | {("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
        | {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # the latter: Python 3.13
        | {("torch", n) for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module in self._MODULES:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


class TorchDistFolder:
    """Row access to the tensors of a ``torch_dist`` folder. Raises CheckpointError where it is none, or damaged."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = cast(dcp_metadata.Metadata, _MetadataUnpickler(file).load())
            self._tensors = metadata.state_dict_metadata
            self._stored = {
                (index.fqn, tuple(index.offset)): info
                for index, info in metadata.storage_data.items()
                if index.offset is not None
            }
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise CheckpointError(
                f"{path}: not a readable torch_dist checkpoint ({error})"
            ) from error
        self._files: dict[str, int] = {}
        self._data: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}

    def dtype(self, name: str) -> torch.dtype:
        """Of a single-rank parameter."""
        return self._find(name)[1].properties.dtype

    def dims(self, name: str) -> tuple[int, ...]:
        """Shape of a single-rank parameter; a padded vocabulary may have more rows than the model."""
        place, tensor = self._find(name)
        return tuple(tensor.size)[len(place.index) :]

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a single-rank parameter."""
        place, tensor = self._find(name)
        lead = len(place.index)
        dims = tuple(tensor.size)[lead:]
        low = (*place.index, start, *(0 for _ in dims[1:]))
        high = (*(i + 1 for i in place.index), start + count, *dims[1:])
        out = torch.empty((count, *dims[1:]), dtype=tensor.properties.dtype)
        filled = 0
        for chunk in tensor.chunks:
            box = [
                (max(a, o), min(b, o + s))
                for a, b, o, s in zip(low, high, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(a < b for a, b in box):
                rows = self._chunk_rows(place.key, tensor, chunk, box[: lead + 1])
                target = out[box[lead][0] - start : box[lead][1] - start]
                for axis, (a, b) in enumerate(box[lead + 1 :], 1):
                    target = target.narrow(axis, a, b - a)
                target.copy_(rows)
                filled += rows.numel()
        if filled != out.numel():
            raise CheckpointError(
                f"{self.folder}: {place.key}{list(place.index)} has {filled} of {out.numel()} elements"
            )
        return out

    def _find(self, name: str) -> tuple[GlobalPlace, dcp_metadata.TensorStorageMetadata]:
        places = global_places(name)
        for place in places:
            tensor = self._tensors.get(place.key)
            if isinstance(tensor, dcp_metadata.TensorStorageMetadata):
                if any(i >= n for i, n in zip(place.index, tensor.size, strict=False)):
                    raise CheckpointError(
                        f"{self.folder}: {place.key} of shape {tuple(tensor.size)} has no {place.index}"
                    )
                return place, tensor
        raise CheckpointError(f"{self.folder}: has no tensor {' or '.join(p.key for p in places)}")

    def _chunk_rows(
        self,
        key: str,
        tensor: dcp_metadata.TensorStorageMetadata,
        chunk: dcp_metadata.ChunkStorageMetadata,
        box: list[tuple[int, int]],
    ) -> torch.Tensor:
        """The chunk's rows in ``box`` (leading indices, then the row range), as wide as the chunk."""
        lead = len(box) - 1
        widths = tuple(chunk.sizes)[lead + 1 :]
        first = 0
        for (a, _), offset, size in zip(box, chunk.offsets, chunk.sizes, strict=False):
            first = first * size + (a - offset)
        out = torch.empty((box[-1][1] - box[-1][0], *widths), dtype=tensor.properties.dtype)
        row_bytes = out.dtype.itemsize * torch.Size(widths).numel()
        fd, at = self._locate(key, chunk, out.dtype.itemsize)
        view, at = byte_view(out), at + first * row_bytes
        while view:
            got = os.preadv(fd, [view], at)
            if got == 0:
                raise CheckpointError(f"{self.folder}: a file ended inside {key}")
            view, at = view[got:], at + got
        return out

    def _locate(
        self, key: str, chunk: dcp_metadata.ChunkStorageMetadata, item_bytes: int
    ) -> tuple[int, int]:
        """Descriptor and offset of a chunk's first element: the uncompressed record of a torch.save stream."""
        place = (key, tuple(chunk.offsets))
        if place not in self._data:
            info = self._stored[place]
            path = self.folder / info.relative_path
            try:
                fd = self._files.get(info.relative_path)
                if fd is None:
                    fd = self._files[info.relative_path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                offset, size = find_saved_tensor(fd, info.offset, info.length)
            except (OSError, zipfile.BadZipFile, StopIteration) as error:
                raise CheckpointError(
                    f"{path}: {key} is not where the metadata says ({error!r})"
                ) from error
            if size != item_bytes * torch.Size(chunk.sizes).numel():
                raise CheckpointError(f"{path}: {key} at {place[1]} is stored in {size} bytes")
            self._data[place] = (fd, offset)
        return self._data[place]

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)
        self._files = {}
