"""Where a tensor's elements lie in what ``torch.save`` wrote.

The form is a zip archive with a pickle, ``data.pkl``, that says how to rebuild the tensor, and the elements in
``data/0``, stored uncompressed. torch.distributed.checkpoint's own reader is not used: for any rows of a chunk it
loads the whole chunk, and a vocabulary of 150,000 rows takes hundreds of MB, once for every block.
"""

from __future__ import annotations

import io
import os
import zipfile
from typing import Any


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
