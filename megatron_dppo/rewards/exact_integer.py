"""Reward by exact match of one integer; used for the demo's arithmetic problems."""

from __future__ import annotations

import re

INTEGER = re.compile(r"[+-]?[0-9]+")


def exact_integer(response: str, answer: str) -> float:
    """Score 1 if the text after the response's last ``=`` is the integer ``answer``, else 0.

    Without ``=`` the whole response is compared. White space around the integer, a plus sign and
    leading zeros are ignored; any other character scores 0. Raises ValueError if ``answer`` is not
    an integer.
    """
    expected = answer.strip()
    if not INTEGER.fullmatch(expected):
        raise ValueError(f"the answer is {answer!r}, expected an integer")
    given = stated_result(response)
    return float(bool(INTEGER.fullmatch(given)) and _normalise(given) == _normalise(expected))


def stated_result(response: str) -> str:
    """The text after the response's last ``=``; without one, all of it."""
    return response.rpartition("=")[2].strip()


def _normalise(integer: str) -> str:
    """``integer`` without plus sign and leading zeros; text, as int() takes quadratic time."""
    digits = integer.lstrip("+-").lstrip("0")
    return ("-" if integer.startswith("-") and digits else "") + digits
