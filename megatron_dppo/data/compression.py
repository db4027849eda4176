"""Compressed files of data: the first bytes of a file decide how it is decompressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable

from megatron_dppo.config.data_files import COMPRESSED_ENDINGS


def _decompress_with_pyarrow(name: str) -> Callable[[bytes], bytes]:
    def decompress(content: bytes) -> bytes:
        import pyarrow

        return bytes(pyarrow.input_stream(io.BytesIO(content), compression=name).read())

    return decompress


_FORMATS: dict[bytes, tuple[str, Callable[[bytes], bytes]]] = {
    b"\x1f\x8b": ("gzip", gzip.decompress),
    b"BZh": ("bzip2", bz2.decompress),
    b"\xfd7zXZ\x00": ("xz", lzma.decompress),
    b"\x28\xb5\x2f\xfd": ("zstd", _decompress_with_pyarrow("zstd")),
    b"\x04\x22\x4d\x18": ("lz4", _decompress_with_pyarrow("lz4")),
}
"""First bytes of a compressed file -> the format's name, and the function that decompresses the file."""
_ARCHIVES = {b"PK\x03\x04": "zip", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!": "rar"}
"""First bytes of an archive of files -> its name."""


class CompressionError(ValueError):
    """A file is damaged, or it is an archive of several files."""


def decompressed(content: bytes) -> bytes:
    """Decompress a file's content; other content is returned unchanged. Raises CompressionError."""
    for first_bytes, (name, decompress) in _FORMATS.items():
        if not content.startswith(first_bytes):
            continue
        try:
            return decompress(content)
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise CompressionError(f"no readable {name} file: {error}") from error
        except ImportError as error:
            raise CompressionError(
                f"{name} is read by pyarrow, which is not installed: pip install pyarrow"
            ) from error
    for first_bytes, name in _ARCHIVES.items():
        if content.startswith(first_bytes):
            raise CompressionError(f"a {name} archive, expected a file: unpack it")
    return content


def without_compressed_ending(name: str) -> str:
    """A file's name without the ending of its compression, in any case: ``a.csv.gz`` becomes ``a.csv``."""
    for ending in COMPRESSED_ENDINGS:
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return name
