"""Exact match of one integer: the arithmetic problems of the demo."""

from __future__ import annotations

import re

INTEGER = re.compile(r"[+-]?[0-9]+")


def exact_integer(response: str, answer: str) -> float:
    """1 where what follows the response's last ``=`` is exactly the integer ``answer``, else 0.

    A response without ``=`` counts as a whole. White space around the integer is let pass; a sign
    is optional; leading zeros do not matter; a unit, a full stop or any other character makes it
    no integer. Raises ValueError where ``answer`` is not an integer.
    """
    expected = answer.strip()
    if not INTEGER.fullmatch(expected):
        raise ValueError(f"the answer is {answer!r}, expected an integer")
    given = response.rpartition("=")[2].strip()
    return float(bool(INTEGER.fullmatch(given)) and _normalise(given) == _normalise(expected))


def _normalise(integer: str) -> str:
    """Without a plus sign and leading zeros; compared as text, because int() of a long one takes
    quadratic time.
    """
    digits = integer.lstrip("+-").lstrip("0")
    return ("-" if integer.startswith("-") and digits else "") + digits
