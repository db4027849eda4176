"""Checks of an error's message: a test checks the keys and values in it, not its sentence."""

from __future__ import annotations

import re


def mentioning(*values: object) -> str:
    """Return a pattern for a text that has all ``values`` as whole words, in this order."""
    words = (rf"(?<!\w){re.escape(str(value))}(?!\w)" for value in values)
    return "(?s)" + ".*?".join(words)


def mentions(text: str, *values: object) -> bool:
    """Return whether ``text`` has all ``values`` as whole words, in this order."""
    return re.search(mentioning(*values), text) is not None
