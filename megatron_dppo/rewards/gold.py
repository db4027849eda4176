r"""The final answer of a worked gold solution: ``#### 72`` of GSM8K, ``\boxed{72}`` of MATH.

Imports none of the rewards' libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST_ANSWER = 500
"""Characters. Anything longer is a derivation, and costly to parse."""

_BOX = re.compile(r"\\(?:boxed|framebox|fbox)\s*\{")
_UNBRACED_BOX = re.compile(r"\\(?:boxed|framebox|fbox)\s+([^${}]+?)\s*(?:\$|$)")
_MARK = "####"
_GROUPED_NUMBER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def gold_answer(text: str) -> str:
    r"""What follows the last ``####``, else the content of the last closed ``\boxed``, else ``text``.

    After ``####`` a number's groups of three digits are joined: ``1,080`` becomes ``1080``. A box
    without braces, ``\boxed 4$`` as in some of MATH's solutions, ends with its formula.
    """
    if _MARK in text:
        answer = text.rpartition(_MARK)[2].strip()
        return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer
    found = [content for _, content in boxes(text)] or _UNBRACED_BOX.findall(text)
    return found[-1].strip() if found else text


def holds_answer(text: str) -> bool:
    """Whether ``gold_answer`` finds an answer in ``text`` that is not all of it."""
    return _MARK in text or any(boxes(text)) or bool(_UNBRACED_BOX.search(text))


def boxes(text: str) -> Iterator[tuple[int, str]]:
    """Position and content of every box that is closed."""
    for match in _BOX.finditer(text):
        content = braced(text, match.end())
        if content is not None:
            yield match.end(), content


def braced(text: str, start: int) -> str | None:
    """What stands between the brace before ``start`` and the one that closes it; None where none
    does.
    """
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(
        text, start, start + LONGEST_ANSWER + 100
    ):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None
