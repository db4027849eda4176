"""Types of numbers and files on a command line, for the ``type`` of an argparse argument.

A type of numbers refuses text that is no number, numbers that are not finite, and numbers outside of a range, in one
line with the given text and the range.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from megatron_dppo.system.text import cut

MOST_COUNT = 2**31 - 1
MOST_NUMBER = 1e9


def whole_number(least: int, most: int = MOST_COUNT) -> Callable[[str], int]:
    """Return the type of a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {_shown(text)}, expected a whole number from {least} to {most}"
            )
        return value

    return parse


def finite_number(least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> Callable[[str], float]:
    """Return the type of a number from ``least`` to ``most``."""

    def parse(text: str) -> float:
        value = _number(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {_shown(text)}, expected a number from {least:g} to {most:g}"
            )
        return value

    return parse


def positive_number(text: str) -> float:
    """Parse a number above 0 and up to ``MOST_NUMBER``."""
    value = _number(text)
    if not 0 < value <= MOST_NUMBER:
        raise argparse.ArgumentTypeError(
            f"got {_shown(text)}, expected a number above 0 and up to {MOST_NUMBER:g}"
        )
    return value


def file_to_write(text: str) -> Path:
    """Parse the path of a file that a command writes at its end: the file's folder must exist."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"got {_shown(text)}, expected a file in a folder that exists"
        )
    return path


positive_count = whole_number(1)
count_or_zero = whole_number(0)
port_or_zero = whole_number(0, 65535)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shown(text: str) -> str:
    return repr(cut(text, 43))
