"""Parts of an answer that are compared between two answers: nouns, ranges, bases, choices such as ``(B) 12``, words and
negations. This module does not import the rewards' libraries.
"""

from __future__ import annotations

import re

from megatron_dppo.data.gold_answers import braced
from megatron_dppo.rewards.notation import NUMBER_AND_NOUN
from megatron_dppo.rewards.units import unit_named


def noun_of(text: str) -> str | None:
    """The words after a number, ``apple`` of ``5 apples``. None without words, or for words inside ``\\text``."""
    match = NUMBER_AND_NOUN.fullmatch(text)
    if match is None or unit_named(match[2]) is not None:
        return None
    return " ".join(word.removesuffix("s") for word in match[2].casefold().split())


def are_different_nouns(noun: str, expected_noun: str) -> bool:
    """Whether each of two nouns has a word that the other has not: "red apple" and "apple" are no different nouns."""
    words, expected_words = set(noun.split()), set(expected_noun.split())
    return not (words <= expected_words or expected_words <= words)


_RANGE = re.compile(
    r"(?i)(?:between\s+|from\s+)?(\d+(?:\.\d+)?)\s*(-+|\b(?:to|and)\b|\\text\s*\{\s*to\s*\})\s*(\d+(?:\.\d+)?)(.*)"
)


def range_of(text: str) -> tuple[float, float] | None:
    """The bounds of ``10-20``, ``10 to 20`` or ``between 10 and 20``; None for other texts, such as ``20-10``."""
    match = _RANGE.fullmatch(text)
    if match is None or any(character in "0123456789-+=*/^" for character in match[4]):
        return None
    is_between = text.casefold().startswith("between")
    if (match[2].casefold() == "and") != is_between:
        return None
    low, high = float(match[1]), float(match[3])
    return (low, high) if low < high else None


_BASED = re.compile(r"([0-9a-zA-Z]+)_(?:(\d+)|\{(\d+)\}|\{\\text\{(\d+)\}\})")


def digits_and_base(text: str) -> tuple[str, int] | None:
    """The digits and the base of ``1011_2``; None for any other text."""
    match = _BASED.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    base = next(group for group in match.groups()[1:] if group)
    return match[1].lower().lstrip("0"), int(base)


_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|textrm|mathbf|mathrm)\s*\{\s*)?"
    r"(?:\(([A-J])\)|\(([a-e])\)(?=\s)|([A-J])(?:\)|[:.](?=[\s~\\}]|$)))"
    r"(?:[\s~]*\})?(?:\\[,;: ]|[\s~])*(.*)",
    re.DOTALL,
)
_FURTHER_CHOICE = re.compile(r"\([A-J]\)|(?:\b(?:and|or)\b|[,;&])\s*[A-J]\b(?!\w)")
_OPTION = re.compile(r"(?i:(?:option|choice)\s*:?\s*)?(?:\(([A-Ja-j])\)|([A-J]))")


def choice_of(text: str) -> tuple[str, str] | None:
    """The letter of a choice and the text after it: B and 12 for ``(B) 12``. None for no or several choices."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter = match[1] or match[2] or match[3]
    value_text = match[4].strip()
    if _FURTHER_CHOICE.search(value_text):
        return None
    return (letter.upper(), value_text)


def option_of(text: str) -> str | None:
    """The letter of an answer that is only a choice's letter: ``B``, ``(B)``, ``option B``; None for other answers."""
    match = _OPTION.fullmatch(text)
    return (match[1] or match[2]).upper() if match else None


_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")


def words_of(text: str) -> str | None:
    """An answer that consists only of words, in lower case with single spaces; None for any other answer."""
    match = _TEXT.match(text)
    if match:
        content = text[match.end() : -1]
        if braced(text, match.end()) == content:
            text = content
    text = " ".join(text.split()).strip(" .")
    if _WORDS.fullmatch(text):
        return text.casefold()
    return None


def is_set_as_text(text: str) -> bool:
    """Whether the answer ends with ``\\text`` or a similar command that contains only words."""
    match = _TEXT.search(text)
    return match is not None and words_of(text[match.start() :].rstrip(" $.*")) is not None


_DENIAL = re.compile(
    r"(?i)\b(?:not|isn't|cannot|can't|wrong|incorrect|impossible|invalid|neither|nor|false)\b|\\(?:ne|neq|not|lnot|neg)(?![a-zA-Z])"
    r"|\b(?:or|and)\s+(?:more|less|fewer|greater|above|below)\b|\b(?:at\s+least|at\s+most|more\s+than|less\s+than)\b|≠"
)


def is_denied(text: str) -> bool:
    """Whether words negate the value, or make it a bound: ``not 5``, ``5 or more``."""
    return _DENIAL.search(text) is not None
