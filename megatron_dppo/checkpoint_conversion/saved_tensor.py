"""One tensor in the form of ``torch.save``, written and found without a copy of its bytes.

The form is a zip archive with a pickle, ``data.pkl``, that says how to rebuild the tensor, and the elements in
``data/0``, stored uncompressed. ``torch.load`` takes it, with ``weights_only`` too.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from typing import Any, BinaryIO

import torch
from torch._utils import _rebuild_tensor_v2

from megatron_dppo.checkpoint_conversion.safetensors_file import byte_view

_ROOT = "archive/"
_STORAGES: dict[torch.dtype, type] = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}


def write_saved_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Append what ``torch.save(tensor, file)`` would write, up to the archive's comments and alignment."""
    with zipfile.ZipFile(_FileFromHere(file), "w") as archive:
        for name, content in (
            ("data.pkl", _rebuilding(tensor)),
            ("byteorder", sys.byteorder.encode()),
            ("data/0", byte_view(tensor)),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(_ROOT + name), content)


def find_saved_tensor(fd: int, start: int, length: int) -> tuple[int, int]:
    """Offset in the file and size of the elements of a tensor that was saved at ``start``.

    Raises OSError, zipfile.BadZipFile or StopIteration where there is none.
    """
    stream = _Span(fd, start, length)
    with zipfile.ZipFile(stream) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("/data/0"))
        stream.seek(entry.header_offset)
        header = stream.read(30) or b""
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return start + entry.header_offset + 30 + names, entry.file_size


class _Storage:
    """Stands for the elements in the pickle."""


class _Tensor:
    """Pickles as torch pickles a contiguous tensor on the CPU."""

    def __init__(self, size: torch.Size) -> None:
        strides = [1]
        for dim in reversed(size[1:]):
            strides.insert(0, strides[0] * dim)
        self._place = (0, tuple(size), tuple(strides))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_tensor_v2, (_Storage(), *self._place, False, OrderedDict())


class _Pickler(pickle.Pickler):
    """Names the storage as torch.save does: kind, key, device, number of elements."""

    def __init__(self, file: io.BytesIO, tensor: torch.Tensor) -> None:
        super().__init__(file, protocol=2)
        self._storage = ("storage", _STORAGES[tensor.dtype], "0", "cpu", tensor.numel())

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        return self._storage if isinstance(value, _Storage) else None


def _rebuilding(tensor: torch.Tensor) -> bytes:
    out = io.BytesIO()
    _Pickler(out, tensor).dump(_Tensor(tensor.shape))
    return out.getvalue()


class _FileFromHere(io.RawIOBase):
    """An open file from its position on, as a file that begins there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._start = file, file.tell()

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._start, os.SEEK_CUR: self._file.tell()}[whence]
        return self._file.seek(base + offset) - self._start

    def tell(self) -> int:
        return self._file.tell() - self._start


class _Span(io.RawIOBase):
    """Bytes ``start .. start + length`` of an open file, as a file."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._at = fd, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        got = os.preadv(self._fd, [view], self._start + self._at) if view else 0
        self._at += got
        return got
