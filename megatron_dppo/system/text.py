"""Texts of messages: cut to a length, on a single line, or the first of several."""

from __future__ import annotations

import json
from collections.abc import Sequence


def cut(text: str, most: int = 60) -> str:
    """Return ``text``, or its beginning and ``...``: at most ``most`` characters together."""
    if len(text) <= most:
        return text
    return text[: most - 3] + "..."


def single_line(text: object, most: int = 300) -> str:
    """Return ``text`` with one space in place of each white space, cut to ``most`` characters."""
    return cut(" ".join(str(text).split()), most)


def short_json(value: object) -> str:
    """Return a JSON value in at most 60 characters."""
    try:
        return cut(json.dumps(value, ensure_ascii=False, default=str))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def first_of(texts: Sequence[object], count: int, separator: str = "; ") -> str:
    """Join the first ``count`` texts for a message, which also has the number of further texts."""
    shown = [str(text) for text in texts[:count]]
    if len(texts) > count:
        shown.append(f"and {len(texts) - count} more")
    return separator.join(shown)
