"""JSON Lines as they are read: one object a line, and one error that names file and line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A data set cannot be used; the message names the file, the line (from 1) and the fault."""


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[str], str]:
    """The objects of a JSONL file, the place of each in words, and the file's SHA-256."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n")
    if lines == [b""]:
        raise DataError(f"{path}: the file is empty, expected one JSON object a line")
    places = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    records = [_parse(line, where) for line, where in zip(lines, places, strict=True)]
    return records, places, hashlib.sha256(content).hexdigest()


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if b"\\ud" in line.lower():  # an escape that may be half of a pair
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: holds half of a surrogate pair, which is no text") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply") from error
    except ValueError as error:  # an integer of more than 4300 digits
        raise DataError(f"{where}: {error}; write a long number as text") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: {type(record).__name__}, expected a JSON object")
    return record


def keys(record: Mapping[str, Any]) -> str:
    """The keys of a record, as many as one reads."""
    names = sorted(record)
    return str([_cut(name) for name in names[:12]]) + (" and more" if len(names) > 12 else "")


def shorten(value: object) -> str:
    """A JSON value in at most 60 characters."""
    try:
        return _cut(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
