"""JSON that keeps tuples and dictionary keys that are no text, because the checks of reasoning-gym need both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def to_json(value: Any) -> Any:
    """Convert tuples, dictionaries with any keys, and JSON's own types to JSON. Raises ValueError for other types."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {_PAIRS: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"metadata holds a {type(value).__name__}, which is no JSON")


def from_json(value: Any) -> Any:
    """Invert ``to_json``."""
    if isinstance(value, Mapping):
        if value.keys() == {_TUPLE}:
            return tuple(from_json(item) for item in value[_TUPLE])
        if value.keys() == {_PAIRS}:
            return {from_json(key): from_json(item) for key, item in value[_PAIRS]}
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [from_json(item) for item in value]
    return value
