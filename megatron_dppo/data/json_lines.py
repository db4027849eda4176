"""JSON Lines as they are read: one object a line, and one error that names file and line.

Which reader a file takes is ``records.read_records``'s choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A data set cannot be used; the message names the file, the line (from 1) and the fault."""


def parse_lines(path: Path, content: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a JSONL file and the place of each in words."""
    lines = content.removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n")
    if lines == [b""]:
        raise DataError(f"{path}: the file is empty, expected one JSON object a line")
    places = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    records = [_parse(line, where) for line, where in zip(lines, places, strict=True)]
    return records, places


def parse_text(text: bytes, where: str) -> Any:
    """A JSON value. Raises DataError beginning with ``where``, also for what can't be written back."""
    try:
        value = json.loads(text)
        if b"\\ud" in text.lower():  # an escape that may be half of a pair
            json.dumps(value, ensure_ascii=False).encode()
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
    return value


def _parse(line: bytes, where: str) -> dict[str, Any]:
    record = parse_text(line, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: {type(record).__name__}, expected a JSON object")
    return record


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """The value under ``a``, or under ``a.b`` in a structure; None where it is not there."""
    if path in record:
        return record[path]
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def keys(record: Mapping[str, Any]) -> str:
    """The keys of a record, as many as one reads."""
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
