"""Files of records in every format that is read: JSON Lines, JSON, Parquet, Arrow.

The first bytes decide, not the name: published files have many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.data import parquet
from megatron_dppo.data.json_lines import DataError, parse_lines, parse_text

Record = dict[str, Any]


def read_records(path: Path) -> tuple[list[Record], list[str], str]:
    """The objects of a file, the place of each in words, and the SHA-256 of the file's bytes."""
    if is_columnar(path):
        records = list(parquet.rows_of(path))
        if not records:
            raise DataError(f"{path}: the file is empty, expected at least one row")
        places = [f"{path}, row {number}" for number in range(1, len(records) + 1)]
        with open(path, "rb") as file:
            return records, places, hashlib.file_digest(file, "sha256").hexdigest()
    content = _content(path)
    records, places = parse_lines(path, content)
    return records, places, hashlib.sha256(content).hexdigest()


def columns_of(path: Path) -> list[str]:
    """The names of a file's columns; of the first object where it is JSON."""
    return parquet.columns_of(path) if is_columnar(path) else sorted(_objects(path)[0])


def stream_records(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The objects of a file one after the other, with ``columns`` at least.

    Takes a JSON document too: a list of objects, or a single one, as MATH was first published.
    """
    return parquet.rows_of(path, columns) if is_columnar(path) else iter(_objects(path))


def is_columnar(path: Path) -> bool:
    """Whether the file is Parquet or Arrow. Raises DataError where it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) in parquet.FORMATS
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _objects(path: Path) -> list[Record]:
    content = _content(path)
    if path.suffix != ".json":
        return parse_lines(path, content)[0]
    try:
        return parse_lines(path, content)[0]
    except DataError:
        document = parse_text(content, str(path))
    records = document if isinstance(document, list) else [document]
    if not records or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: expected an object, or a list of objects")
    return records


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
