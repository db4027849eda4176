r"""The value that a sentence states: 73 of "She has 73 apples." This module does not import the rewards' libraries."""

from __future__ import annotations

import re

_LEAD = re.compile(
    r"(?i)(?:(?:therefore|thus|hence|so|then|finally|consequently|in total|altogether|simply|just|indeed|approximately"
    r"|approx\.?|about|roughly)(?![a-z])|∴|⇒|→|≈|=>|=|~|\\(?:therefore|approx|sim|implies|Rightarrow)(?![a-z]))[\s,:]*"
)
"""A word or sign before an answer that is no part of its value."""
_NUMBER = r"[+-]?(?:\d[\d,]*(?:\.\d+)?\s+\d+/\d+|(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?)(?:\s*\\?%)?"
_CURRENCY = r"(?:US)?\\?\$|[€£¥₹₩]"
_WORD = r"[A-Za-z][A-Za-z'’-]*"
_UNIT = r"(?:\s*°\s*[CF]?|\s*[A-Za-z]+(?:[²³]|\^\d)?(?:/[A-Za-z]+(?:[²³]|\^\d)?)?)"
_SENTENCE = re.compile(
    rf"(?P<before>{_WORD}(?:,?\s+{_WORD})*)(?P<colon>\s*:)?\s+(?:{_CURRENCY})?\s*(?P<number>{_NUMBER})\s*[€£¥₹₩]?"
    rf"(?P<unit>{_UNIT})?(?P<after>(?:,?\s+{_WORD})*)"
)
"""A sentence with one number. The first word after the number may be a unit, with a power or a slash."""
_SIGN_OR_LETTER = r"(?:[^A-Za-z=,;]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))"
_EQUATION = re.compile(
    rf"(?:^|(?<=[\s:]))({_SIGN_OR_LETTER}{{1,200}}(?:={_SIGN_OR_LETTER}{{1,200}})+)((?:{_WORD}\s*)*)$"
)
"""An equation of signs, digits and single letters, and the words after it, at the end of a sentence."""
_BOUND_BEFORE = r"\b(?:(?:more|less|fewer|greater|larger|smaller|higher|lower)\s+than|at\s+(?:least|most)|up\s+to)\b"
_BOUND_AFTER = r"\bor\s+(?:more|less|fewer|greater|so)\b"
_BEFORE_BOUND = re.compile(rf"(?i){_BOUND_BEFORE}[\s*]*$")
_AFTER_BOUND = re.compile(
    rf"(?i)[\s*]*(?:{_BOUND_AFTER}|(?:is|are|was)\s+(?:not|impossible|wrong|incorrect|invalid)\b)"
)
_DENIAL = re.compile(
    r"(?i)\b(?:not|no|never|neither|nor|none|cannot|\w+n['’]t|wrong|incorrect|impossible|invalid|false|if|unless|suppose|assume|let|guess"
    r"|sure|confident|certain)\b"
    rf"|{_BOUND_BEFORE}|{_BOUND_AFTER}"
)
"""Words that deny a statement, make it a condition, or make its number a bound."""


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORDS_BEFORE = _word_set(
    "sqrt log ln lg sin cos tan sec csc cot exp mod base root plus minus times over negative positive by and or "
    "between from than above below under exceeds exceed almost nearly step case part problem question equation "
    "figure chapter page pi point twice thrice double triple half"
)
"""A number after one of these words may be a part of a larger expression, a bound or a label."""
_WORDS_AFTER = _word_set(
    "squared cubed factorial half halves third thirds quarter quarters fifths tenth tenths hundred thousand million "
    "billion trillion dozen plus minus times over and or to pi root divided multiplied mod choose point"
)
"""A number before one of these words may be a part of a larger expression."""


def without_lead(text: str) -> str:
    """``text`` without words and signs before its value: "Therefore, x = 18" becomes "x = 18"."""
    while match := _LEAD.match(text):
        text = text[match.end() :]
    return text


def denies(sentence: str) -> bool:
    """Whether a sentence is denied or a condition, or makes a number a bound: "at least 5"."""
    return _DENIAL.search(sentence) is not None


def is_bound(line: str, start: int, end: int) -> bool:
    """Whether the words beside the value from ``start`` to ``end`` make it a bound or deny it: "at least 5"."""
    text_before = line[max(0, start - 40) : start]
    return bool(_BEFORE_BOUND.search(text_before) or _AFTER_BOUND.match(line, end))


def stated_value(sentence: str) -> str | None:
    r"""The value that a sentence of words states, with the words after it as ``\text``; None if it is unclear.

    The value is an equation at the end of the sentence, or its only number. A question, a denial, a bound and a
    condition state no value, nor does a sentence whose words are a part of the value: "half of 10".
    """
    sentence = without_lead(sentence.strip()).rstrip(" .!")
    if "?" in sentence or len(sentence) > _LONGEST_SENTENCE or denies(sentence):
        return None
    if "=" in sentence:
        return _right_equation(sentence)
    match = _SENTENCE.fullmatch(sentence)
    if match is None or not _is_label_or_clause(match):
        return None
    unit = (match["unit"] or "").strip()
    words_after = match["after"].replace(",", " ").split()
    first_word = (unit or "".join(words_after[:1])).casefold()
    if first_word in _WORDS_AFTER:
        return None
    # A single letter may be a unit or a variable: leave it as it is.
    if len(unit) == 1 and unit.isalpha():
        return f"{match['number']} {unit}"
    return match["number"].rstrip(",") + _as_text(" ".join([unit, *words_after]))


_LONGEST_SENTENCE = 400
"""Largest number of characters of a sentence that is read."""


def _is_label_or_clause(match: re.Match[str]) -> bool:
    """Whether the words before the number leave its value as it is: "Total:", "She has"."""
    words = match["before"].replace(",", " ").casefold().split()
    if match["colon"] is not None:
        # A single letter may be an option.
        return len(words[-1]) > 1 and words[-1] not in _WORDS_BEFORE
    # One word before a number may be a function.
    if len(words) < 2 or words[-1] in _WORDS_BEFORE:
        return False
    return words[-1] != "of" or words[-2] in ("total", "average")


def _right_equation(sentence: str) -> str | None:
    match = _EQUATION.search(sentence)
    # An equation before this one would be another part of the answer.
    if match is None or "=" in sentence[: match.start()]:
        return None
    words_before = sentence[: match.start()].replace(",", " ").casefold().split()
    words_after = match[2].casefold().split()
    if words_before[-1:] in (["and"], ["or"]) or set(words_after[:1]) & _WORDS_AFTER:
        return None
    equation = re.sub(_CURRENCY, "", match[1]).strip()
    return equation + _as_text(match[2].strip())


def _as_text(words: str) -> str:
    words = words.strip()
    return rf" \text{{ {words}}}" if words else ""
