"""Parquet and Arrow files, row by row; pyarrow is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dppo.data.json_lines import DataError

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"
"""The first four bytes of each format; ``datasets`` saves streams."""
FORMATS = (PARQUET, ARROW_FILE, ARROW_STREAM)
_BATCH = 4096
"""Rows that are Python objects at one time."""


def columns_of(path: Path) -> list[str]:
    """Names of the file's columns. Raises DataError where it can't be read."""
    with _faults_named(path):
        return list(_opened(path, None)[0])


def rows_of(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows as plain Python values, of ``columns`` alone where they are given.

    Holds a few thousand rows at a time: published files have millions. Raises DataError where the
    file can't be read.
    """
    with _faults_named(path):
        for batch in _opened(path, columns)[1]:
            for start in range(0, batch.num_rows, _BATCH):
                part = batch.slice(start, _BATCH)
                yield from (part if columns is None else part.select(list(columns))).to_pylist()


def _opened(path: Path, columns: Sequence[str] | None) -> tuple[list[str], Iterator[Any]]:
    """The names of the columns, and the record batches."""
    import pyarrow
    import pyarrow.parquet

    with open(path, "rb") as file:
        kind = file.read(4)
    if kind == PARQUET:
        parquet = pyarrow.parquet.ParquetFile(path)
        chosen = None if columns is None else list(columns)
        return parquet.schema_arrow.names, parquet.iter_batches(_BATCH, columns=chosen)
    source = pyarrow.memory_map(str(path))
    if kind == ARROW_STREAM:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema.names, iter(stream)
    whole = pyarrow.ipc.open_file(source)
    return whole.schema.names, map(whole.get_batch, range(whole.num_record_batches))


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install pyarrow"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, NotImplementedError) as error:  # pyarrow's own derive from these
        raise DataError(f"{path}: no readable Parquet or Arrow file: {error}") from error
