"""Read boxes of elements from the tensors of a ``torch_dist`` checkpoint, however its blocks divide the tensors.

Only the requested rows are read, a few MiB at a time, so a rank of any layout reads only its own part.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from megatron_dppo.checkpoint_conversion.tensor_store import byte_view, memory_of, read_all
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.files import Closing

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A block of a tensor: along each axis, ``sizes`` elements from ``offsets`` on."""

    offsets: Dims
    sizes: Dims

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements that are in both boxes; None if there is no such element."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self._ends, other._ends))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    @property
    def _ends(self) -> Dims:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def of(self, values: torch.Tensor, origin: Dims) -> torch.Tensor:
        """The view of this box in ``values``. ``origin`` is the position of the first element of ``values``."""
        for axis, (offset, size, start) in enumerate(
            zip(self.offsets, self.sizes, origin, strict=True)
        ):
            values = values.narrow(axis, offset - start, size)
        return values


@dataclass(frozen=True)
class TensorBlock:
    """The elements in ``box`` of the checkpoint's tensor ``key`` of shape ``dims``.

    If the block is ``resizable``, the tensor may be stored with another number of rows (a padded vocabulary). Elements
    beyond the stored rows are zero.
    """

    key: str
    dims: Dims
    box: Box
    dtype: torch.dtype
    resizable: bool = False

    @property
    def bytes(self) -> int:
        return self.box.elements * self.dtype.itemsize


def flat_boxes(dims: Dims, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover the elements ``start .. stop``, in row-major order, of a tensor of shape ``dims``.

    Each box is contiguous in that order. There are at most two boxes for each axis. Nothing is yielded if ``stop``
    is not above ``start``.
    """
    if start >= stop:
        return
    if len(dims) <= 1:
        # A tensor without axes has one element, and its box has no offsets and no sizes.
        yield Box((start,) * len(dims), (stop - start,) * len(dims))
        return
    row_elements = math.prod(dims[1:])
    # Rows first_row .. end_row are complete. Before and after them there may be a part of a row.
    first_row = (start + row_elements - 1) // row_elements
    end_row = stop // row_elements
    if first_row > end_row:
        # All elements are in one row, ``end_row``, and do not fill it.
        row_start = end_row * row_elements
        yield from _in_row(dims, end_row, start - row_start, stop - row_start)
        return
    if start % row_elements:
        yield from _in_row(dims, first_row - 1, start % row_elements, row_elements)
    if first_row < end_row:
        yield Box((first_row, *(0 for _ in dims[1:])), (end_row - first_row, *dims[1:]))
    if stop % row_elements:
        yield from _in_row(dims, end_row, 0, stop % row_elements)


def _in_row(dims: Dims, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(dims[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def find_saved_tensor(fd: int, start: int, length: int) -> tuple[int, int]:
    """Find a tensor that ``torch.save`` wrote at ``start``. Return the file offset and the bytes of the elements.

    Raises OSError, zipfile.BadZipFile or StopIteration if there is no tensor.
    """
    # torch.save writes a zip archive with a pickle, ``data.pkl``, that describes the tensor, and the elements in
    # ``data/0``, uncompressed. The reader of torch.distributed.checkpoint would load a whole chunk for each block of
    # rows that is read. With a vocabulary of 150,000 rows, a chunk has hundreds of MB.
    stream = _Span(fd, start, length)
    with zipfile.ZipFile(stream) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("/data/0"))
        # In the archive, a header of 30 bytes, the file's name and an extra field precede the file's content. Bytes 26
        # to 30 of the header are the lengths of the name and of the extra field.
        stream.seek(entry.header_offset)
        header = stream.read(30) or b""
        name_length = int.from_bytes(header[26:28], "little")
        extra_length = int.from_bytes(header[28:30], "little")
        offset = start + entry.header_offset + 30 + name_length + extra_length
        return offset, entry.file_size


class _Span(io.RawIOBase):
    """A file object for the bytes ``start .. start + length`` of an open file."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd = fd
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        count = 0
        if view:
            count = os.preadv(self._fd, [view], self._start + self._position)
        self._position += count
        return count


READ_BYTES = 8 << 20
"""Bytes of one read into a temporary block. A block is needed if the elements are columns of a stored box, or if the
result is strided or on another device."""


class _MetadataUnpickler(pickle.Unpickler):
    """Loads only the plain records that describe a checkpoint; other classes of a pickle could run code."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
    _DTYPES = frozenset(
        ("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)
    )
    # The path is in ``pathlib._local`` if Python 3.13 wrote the pickle.
    _OTHERS = frozenset(
        {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        qualified_name = (module, name)
        if qualified_name in self._DTYPES or qualified_name in self._OTHERS:
            return super().find_class(module, name)
        if module in self._MODULES:
            record = super().find_class(module, name)
            # Allow the classes that the module defines, but not the classes that it imports.
            if isinstance(record, type) and record.__module__ == module:
                return record
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def _enum_member(kind: object, name: object) -> Enum:
    """Replace ``getattr`` in a pickle: pickles of Python 3.11.0 to 3.11.3 call it for a member of an enum."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind.__members__[str(name)]
    raise pickle.UnpicklingError(f"{kind!r} has no member {name!r} that a checkpoint may name")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its shape, its dtype, and the boxes that store it.

    Each box has size 1 on the first ``lead`` axes. ``by_lead`` has the boxes by their offsets on these axes.
    """

    dims: Dims
    dtype: torch.dtype
    lead: int
    by_lead: dict[Dims, list[Box]]
    box_count: int

    @classmethod
    def of(cls, tensor: dcp_metadata.TensorStorageMetadata) -> StoredTensor:
        if not isinstance(tensor.properties.dtype, torch.dtype):
            raise TypeError(f"got {tensor.properties.dtype!r}, expected a dtype")
        boxes = [Box(_dims(c.offsets), _dims(c.sizes)) for c in tensor.chunks]
        lead = 0
        while lead < len(tensor.size) and all(b.sizes[lead] == 1 for b in boxes):
            lead += 1
        by_lead: dict[Dims, list[Box]] = {}
        for box in boxes:
            by_lead.setdefault(box.offsets[:lead], []).append(box)
        return cls(_dims(tensor.size), tensor.properties.dtype, lead, by_lead, len(boxes))

    def overlapping(self, requested: Box) -> Iterator[tuple[Box, Box]]:
        """Yield (stored box, its overlap with ``requested``) for each stored box that overlaps ``requested``."""
        # The candidates are offsets on the first ``lead`` axes: the offsets of all stored boxes, or all offsets in
        # ``requested``. Try the smaller set.
        if math.prod(requested.sizes[: self.lead]) > self.box_count:
            candidates: Iterator[Dims] = iter(self.by_lead)
        else:
            axes = zip(requested.offsets[: self.lead], requested.sizes[: self.lead], strict=True)
            candidates = product(*(range(o, o + s) for o, s in axes))
        for lead_offsets in candidates:
            for box in self.by_lead.get(lead_offsets, ()):
                part = box.overlap(requested)
                if part is not None:
                    yield box, part


def _dims(values: Any) -> Dims:
    """Return sizes or offsets from a pickle. Raises TypeError, ValueError for other values, which a damaged pickle may
    have."""
    dims = tuple(values)
    if not all(type(value) is int and value >= 0 for value in dims):
        raise ValueError(f"got {dims}, expected sizes or offsets")
    return dims


def _checked_position(info: Any) -> Any:
    """Return the position of a stored box if it has a file's name and two numbers. Raises TypeError, AttributeError."""
    if not isinstance(info.relative_path, str):
        raise TypeError(f"got {info.relative_path!r}, expected the name of a file")
    _dims((info.offset, info.length))
    return info


class StoredBlocks(Closing):
    """The tensors of a ``torch_dist`` folder, open for reading. Raises CheckpointError for another or a damaged
    folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = cast(dcp_metadata.Metadata, _MetadataUnpickler(file).load())
            self.tensors = {
                key: StoredTensor.of(tensor)
                for key, tensor in metadata.state_dict_metadata.items()
                if isinstance(tensor, dcp_metadata.TensorStorageMetadata)
            }
            self._positions = {
                (index.fqn, _dims(index.offset)): _checked_position(info)
                for index, info in metadata.storage_data.items()
                if index.offset is not None
            }
        except Exception as error:
            # A damaged pickle can raise any error, for instance MemoryError if a length is damaged.
            raise CheckpointError(
                f"{path}: not a readable torch_dist checkpoint ({error!r})"
            ) from error
        # File name -> descriptor; (key, offsets of a box) -> descriptor and offset of its first element.
        self._files: dict[str, int] = {}
        self._first_elements: dict[tuple[str, Dims], tuple[int, int]] = {}

    def fill(self, block: TensorBlock, values: torch.Tensor) -> None:
        """Copy a block's stored elements into ``values``, a tensor of the box's shape on any device.

        Raises CheckpointError if the checkpoint lacks some elements, or has the tensor in another shape or dtype.
        """
        tensor = self.tensors.get(block.key)
        if tensor is None:
            raise CheckpointError(f"{self.folder}: has no tensor {block.key}")
        fits = tensor.dims == block.dims
        if block.resizable and tensor.dims:
            fits = tensor.dims[1:] == block.dims[1:]
        if not fits or tensor.dtype != block.dtype:
            raise CheckpointError(
                f"{self.folder}: {block.key} is {tensor.dtype} of shape {tensor.dims}, expected "
                f"{block.dtype} of {block.dims}"
            )
        stored_part = Box((0,) * len(tensor.dims), tensor.dims).overlap(block.box)
        if tensor.dims != block.dims:
            values.zero_()
        if stored_part is not None:
            self.read(block.key, stored_part, stored_part.of(values, block.box.offsets))

    def read(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Copy ``box`` of ``key`` into ``out``, of the box's shape. Raises CheckpointError if elements are missing."""
        tensor = self.tensors[key]
        filled = 0
        for stored, part in tensor.overlapping(box):
            self._copy(key, tensor, stored, part, part.of(out, box.offsets))
            filled += part.elements
        if filled != box.elements:
            raise CheckpointError(
                f"{self.folder}: {key}{list(box.offsets)} has {filled} of {box.elements} elements"
            )

    def locate(self, key: str, index: Dims) -> tuple[Path, int]:
        """File and byte offset of an element of ``key``."""
        tensor = self.tensors[key]
        stored, _ = next(tensor.overlapping(Box(index, (1,) * len(index))))
        _, start = self._first_element(key, stored.offsets, tensor.dtype, stored.elements)
        # Number of the element in the row-major order of the stored box.
        number = 0
        for size, offset, i in zip(stored.sizes, stored.offsets, index, strict=True):
            number = number * size + i - offset
        path = self.folder / self._positions[key, stored.offsets].relative_path
        return path, start + number * tensor.dtype.itemsize

    def _copy(
        self, key: str, tensor: StoredTensor, stored: Box, part: Box, out: torch.Tensor
    ) -> None:
        """Copy ``part`` of the ``stored`` box into ``out``.

        ``axis`` is the first axis along which ``part`` has several elements. The slices along ``axis`` are called rows.
        In the file, the rows follow each other, and each row is as wide as the stored box.
        """
        fd, start = self._first_element(key, stored.offsets, tensor.dtype, stored.elements)
        axis = next((i for i, size in enumerate(part.sizes) if size > 1), len(part.sizes) - 1)
        assert axis >= 0, f"{key} has no axis"
        stored_width = stored.sizes[axis + 1 :]
        part_width = part.sizes[axis + 1 :]
        row_bytes = math.prod(stored_width) * tensor.dtype.itemsize
        # Number of the first row of ``part`` among the rows of the stored box.
        first_row = 0
        for i in range(axis + 1):
            first_row = first_row * stored.sizes[i] + part.offsets[i] - stored.offsets[i]
        begin = start + first_row * row_bytes
        fault = f"{self.folder}: a file ended inside {key}"
        if part_width == stored_width and out.is_contiguous() and out.device.type == "cpu":
            read_all(fd, _writable_bytes(out), begin, fault)
            return
        columns = range(axis + 1, len(part.sizes))
        column_starts = [part.offsets[i] - stored.offsets[i] for i in columns]
        rows = part.sizes[axis]
        step = max(1, READ_BYTES // max(1, row_bytes))
        # The axes before ``axis`` have size 1.
        out_rows = out[(0,) * axis]
        for row in range(0, rows, step):
            count = min(step, rows - row)
            block = torch.empty((count, *stored_width), dtype=tensor.dtype)
            read_all(fd, byte_view(block), begin + row * row_bytes, fault)
            for i, (offset, size) in enumerate(zip(column_starts, part_width, strict=True), 1):
                block = block.narrow(i, offset, size)
            out_rows[row : row + count].copy_(block)

    def _first_element(
        self, key: str, offsets: Dims, dtype: torch.dtype, elements: int
    ) -> tuple[int, int]:
        """Return the file descriptor and the byte offset of a stored box's first element."""
        identity = (key, offsets)
        if identity not in self._first_elements:
            info = self._positions.get(identity)
            if info is None:
                raise CheckpointError(
                    f"{self.folder}: .metadata has no position of {key} at {offsets}"
                )
            path = self.folder / info.relative_path
            try:
                fd = self._files.get(info.relative_path)
                if fd is None:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    self._files[info.relative_path] = fd
                offset, size = find_saved_tensor(fd, info.offset, info.length)
            except (
                OSError,
                ValueError,
                OverflowError,
                EOFError,
                struct.error,
                RuntimeError,
                zipfile.BadZipFile,
                StopIteration,
            ) as error:
                raise CheckpointError(
                    f"{path}: {key} is not where the metadata says ({error!r})"
                ) from error
            if size != dtype.itemsize * elements:
                raise CheckpointError(f"{path}: {key} at {offsets} is stored in {size} bytes")
            self._first_elements[identity] = (fd, offset)
        return self._first_elements[identity]

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files = {}


def _writable_bytes(tensor: torch.Tensor) -> memoryview:
    # as_strided makes a view; reshape would copy if an axis of size 1 has an unusual stride.
    return memory_of(tensor.detach().as_strided((tensor.numel(),), (1,)))
