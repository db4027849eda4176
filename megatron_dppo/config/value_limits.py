"""Limits of libraries that every value of a configuration keeps: characters, numbers and times."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from megatron_dppo.config.data_schema import Section
from megatron_dppo.config.errors import given

LONGEST_TEXT = 4096
"""Characters of the longest text that is not in ``PROSE``: Linux has no longer paths."""
LONGEST_PROSE = 65536
"""Characters of the longest text in ``PROSE``."""
PROSE = {"data.system_prompt", "data.prompt_template", "rollout.stop", "prologue"}
"""Keys whose text is for the model, or is a script (``prologue`` of Slurm's site file). It may have several lines."""
LARGEST_NUMBER = 2**63 - 1
LARGEST_FLOAT = 3e38
LONGEST_WAIT_S = 10**8
"""Longest time in seconds: three years. ``threading`` and ``select.select`` accept a hundred times as much.
``select.poll`` accepts only 24 days."""
_UNUSABLE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of surrogate pairs: UTF-8 can't encode a half."""


def unusable_values(config: Section) -> list[str]:
    """Report texts with control characters, and texts, numbers and times above the limits of libraries."""
    faults: list[str] = []
    for key, value in leaves(config.model_dump(), ""):
        if value_fault := _value_fault(key, value):
            faults.append(f"{key}: {value_fault}")
    return faults


def leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield each value of a tree of tables and lists with its dotted key. Items of a list have the key of the list."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from leaves(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value


def _value_fault(key: str, value: Any) -> str | None:
    """Return the fault of a single value without its key; None for a usable value."""
    if isinstance(value, str):
        text, max_characters = value, LONGEST_TEXT
        if key in PROSE:
            text = value.replace("\n", " ").replace("\t", " ")
            max_characters = LONGEST_PROSE
        if _UNUSABLE_CHARACTERS.search(text):
            return f"got {given(value)}, expected text without control characters"
        if len(value) > max_characters:
            return f"got {len(value)} characters, expected at most {max_characters}"
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return f"got {given(value)}, expected at most {LARGEST_NUMBER}"
    if isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST_FLOAT:
        return (
            f"got {given(value)}, expected at most {LARGEST_FLOAT:g}: float32 has no larger numbers"
        )
    is_time = key.endswith("_s")
    if isinstance(value, int | float) and is_time and value > LONGEST_WAIT_S:
        return f"got {given(value)}, expected at most {LONGEST_WAIT_S} s: clocks can't wait longer"
    return None
