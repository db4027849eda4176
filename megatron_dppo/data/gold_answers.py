r"""The final answer in a worked solution: ``#### 72`` of GSM8K and ``\boxed{72}`` of MATH."""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST_ANSWER = 500
"""Largest number of characters of an answer. A longer text is a derivation, and slow to parse."""

BOX = re.compile(r"\\(?:boxed|framebox|fbox)\s*\{")
UNBRACED_BOX = re.compile(r"\\(?:boxed|framebox|fbox)\s+([^${}]+?)\s*(?:\$|$)")
_MARK = "####"
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character. The escaped ``\\{`` does not count as a brace."""
_GROUPED_NUMBER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def gold_answer(text: str) -> str:
    r"""The text after the last ``####``, else the content of the last closed ``\boxed``, else ``text``.

    After ``####``, commas between a number's groups of three digits are removed: ``1,080`` becomes ``1080``. The
    content of a box without braces, ``\boxed 4$`` as in some of MATH's solutions, ends at the ``$``.
    """
    if _MARK in text:
        answer = text.rpartition(_MARK)[2].strip()
        if _GROUPED_NUMBER.fullmatch(answer):
            return answer.replace(",", "")
        return answer
    contents = [content for _, content in boxes(text)] or UNBRACED_BOX.findall(text)
    return contents[-1].strip() if contents else text


def holds_answer(text: str) -> bool:
    """Whether ``text`` marks an answer that ``gold_answer`` extracts."""
    return _MARK in text or any(boxes(text)) or bool(UNBRACED_BOX.search(text))


def boxes(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position of the content and the content of every closed box."""
    for match in BOX.finditer(text):
        content = braced(text, match.end())
        if content is not None:
            yield match.end(), content


def braced(text: str, start: int) -> str | None:
    """The text between the brace before ``start`` and its closing brace; None without a closing brace."""
    depth = 1
    # Stop well beyond the longest answer, because texts may be very long.
    end = start + LONGEST_ANSWER + 100
    for match in _BRACE_OR_ESCAPE.finditer(text, start, end):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
        if depth == 0:
            return text[start : match.start()]
    return None
