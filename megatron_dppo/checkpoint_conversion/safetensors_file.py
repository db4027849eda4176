"""One safetensors file, read and written by rows, so that memory is bounded by a block and not by the file.

The format: 8 bytes little-endian length, a JSON header {name: {dtype, shape, data_offsets}}, the tensors' bytes without
a gap. A row is an index of dim 0; rows are contiguous.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_dppo.model.errors import CheckpointError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Entry(TensorSpec):
    """A tensor in a file; ``offset``: of its first byte from the start of the file."""

    offset: int


class SafetensorsFile:
    """A file open for reading. Raises CheckpointError where it is missing, truncated or malformed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened ({error.strerror})") from error
        try:
            self.entries, self.metadata = _read_header(self._fd, self.path)
        except CheckpointError:
            os.close(self._fd)
            raise

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a tensor, freshly allocated, on the CPU."""
        entry = self.entries[name]
        out = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
        view = byte_view(out)
        at = entry.offset + start * entry.row_bytes
        while view:
            got = os.preadv(self._fd, [view], at)
            if got == 0:
                raise CheckpointError(f"{self.path}: ended at byte {at} inside {name}")
            view, at = view[got:], at + got
        return out

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def _read_header(fd: int, path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: {size} bytes cannot hold a header of {length} bytes; truncated or another format"
        )
    try:
        header = json.loads(os.pread(fd, length, 8))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: its header is not JSON ({error})") from error
    metadata = header.pop("__metadata__", {})
    entries = {name: _entry(path, name, facts, 8 + length) for name, facts in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset != end:
            raise CheckpointError(f"{path}: {name} begins at byte {entry.offset}, expected {end}")
        end += entry.bytes
    if end != size:
        raise CheckpointError(
            f"{path}: has {size} bytes, its header describes {end}; truncated or overwritten"
        )
    return entries, metadata


def _entry(path: Path, name: str, facts: dict[str, Any], base: int) -> Entry:
    try:
        code, shape, (begin, end) = (
            facts["dtype"],
            tuple(facts["shape"]),
            facts["data_offsets"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: header entry {name} is malformed ({facts})") from error
    if code not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {code}, expected one of {sorted(DTYPES)}")
    entry = Entry(shape, DTYPES[code], base + begin)
    if end - begin != entry.bytes:
        raise CheckpointError(
            f"{path}: {name} of shape {tuple(shape)} and dtype {code} has {end - begin} bytes"
        )
    return entry


class SafetensorsFileWriter:
    """A file of known tensors, filled in any order. Bytes that nobody writes are zero.

    The header's length, with which the file begins, is written when the ``with`` block ends without an error: until
    then nothing reads it as safetensors.
    """

    def __init__(self, path: str | Path, tensors: Mapping[str, TensorSpec]) -> None:
        self.path = Path(path)
        header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        at = 0
        entries: dict[str, tuple[TensorSpec, int]] = {}
        for name, spec in tensors.items():
            entries[name] = (spec, at)
            header[name] = {
                "dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + spec.bytes]
            }  # fmt: skip
            at += spec.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._length = len(text).to_bytes(8, "little")
        base = 8 + len(text)
        self.entries = {
            name: Entry(s.shape, s.dtype, base + begin) for name, (s, begin) in entries.items()
        }
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, base + at)
        _write_all(self._fd, memoryview(text), len(self._length))

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Put ``rows`` (contiguous or not, of the entry's dtype) at row ``start`` of a tensor."""
        entry = self.entries[name]
        if (
            rows.dtype != entry.dtype
            or rows.shape[1:] != entry.shape[1:]
            or start + len(rows) > entry.shape[0]
        ):
            raise ValueError(
                f"{name}: rows {tuple(rows.shape)} {rows.dtype} at {start}, expected to fit "
                f"{tuple(entry.shape)} {entry.dtype}"
            )
        _write_all(self._fd, byte_view(rows), entry.offset + start * entry.row_bytes)

    def __enter__(self) -> SafetensorsFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                _write_all(self._fd, memoryview(self._length), 0)
        finally:
            os.close(self._fd)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order (a copy where it is strided)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count
