"""Files of records in every format that is read: JSON Lines, JSON, Parquet, Arrow.

The first bytes decide, not the name: published files have many. One error names file and line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dppo.system.errors import RunError

Record = dict[str, Any]
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"
"""The first four bytes of each format; ``datasets`` saves streams."""
COLUMNAR = (PARQUET, ARROW_FILE, ARROW_STREAM)
# Rows that are Python objects at one time: published files have millions.
_BATCH = 4096


class DataError(RunError, ValueError):
    """A data set cannot be used; the message names the file, the line (from 1) and the fault."""


def read_records(path: Path) -> tuple[list[Record], list[str], str]:
    """The objects of a file, the place of each in words, and the SHA-256 of the file's bytes."""
    if is_columnar(path):
        records = list(_rows(path))
        if not records:
            raise DataError(f"{path}: the file is empty, expected at least one row")
        locations = [f"{path}, row {number}" for number in range(1, len(records) + 1)]
        with open(path, "rb") as file:
            return records, locations, hashlib.file_digest(file, "sha256").hexdigest()
    content = _content(path)
    records, locations = _parse_lines(path, content)
    return records, locations, hashlib.sha256(content).hexdigest()


def columns_of(path: Path) -> list[str]:
    """The names of a file's columns; of the first object where it is JSON."""
    if not is_columnar(path):
        return sorted(_objects(path)[0])
    with _faults_named(path):
        return list(_opened(path, None)[0])


def stream_records(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The objects of a file one after the other, with ``columns`` at least.

    Takes a JSON document too: a list of objects, or a single one, as MATH was first published.
    """
    return _rows(path, columns) if is_columnar(path) else iter(_objects(path))


def is_columnar(path: Path) -> bool:
    """Whether the file is Parquet or Arrow. Raises DataError where it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) in COLUMNAR
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


# --- JSON


def _parse_lines(path: Path, content: bytes) -> tuple[list[Record], list[str]]:
    """The objects of a JSONL file and the place of each in words."""
    lines = content.removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n")
    if lines == [b""]:
        raise DataError(f"{path}: the file is empty, expected one JSON object a line")
    locations = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    records = [_parse_text(line, where) for line, where in zip(lines, locations, strict=True)]
    for record, where in zip(records, locations, strict=True):
        if not isinstance(record, dict):
            raise DataError(f"{where}: {type(record).__name__}, expected a JSON object")
    return records, locations


def _parse_text(text: bytes, where: str) -> Any:
    """A JSON value. Raises DataError beginning with ``where``, also for what can't be written back."""
    try:
        value = json.loads(text)
        # An escape may be half of a surrogate pair, which json takes and no file can hold.
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: holds half of a surrogate pair, which is no text") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply") from error
    # Python reads no integer of more than 4300 digits.
    except ValueError as error:
        raise DataError(f"{where}: {error}; write a long number as text") from error
    return value


def _objects(path: Path) -> list[Record]:
    content = _content(path)
    try:
        return _parse_lines(path, content)[0]
    except DataError:
        if path.suffix != ".json":
            raise
        document = _parse_text(content, str(path))
    records = document if isinstance(document, list) else [document]
    if not records or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: expected an object, or a list of objects")
    return records


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


# --- Parquet and Arrow


def _rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows as plain Python values, of ``columns`` alone where they are given."""
    with _faults_named(path):
        for batch in _opened(path, columns)[1]:
            for start in range(0, batch.num_rows, _BATCH):
                rows = batch.slice(start, _BATCH)
                yield from (rows if columns is None else rows.select(list(columns))).to_pylist()


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
    # pyarrow's own errors derive from these.
    except (ValueError, KeyError, NotImplementedError) as error:
        raise DataError(f"{path}: no readable Parquet or Arrow file: {error}") from error


# --- values, and how messages show them


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """The value under ``a``, or under ``a.b`` in a structure; None where it is not there."""
    if path in record:
        return record[path]
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def keys(record: Mapping[str, Any]) -> str:
    names = sorted(record)
    return str([_cut(name) for name in names[:12]]) + (" and more" if len(names) > 12 else "")


def shorten(value: object) -> str:
    """A JSON value in at most 60 characters."""
    try:
        return _cut(json.dumps(value, ensure_ascii=False, default=str))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
