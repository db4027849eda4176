"""Parts of an answer that are compared between two answers: nouns, units, bases, choices such as ``(B) 12``, words and
negations. This module does not import the rewards' libraries.
"""

from __future__ import annotations

import re

from megatron_dppo.data.gold_answers import braced
from megatron_dppo.rewards.notation import NUMBER_AND_NOUN


def noun_of(text: str) -> str | None:
    """The words after a number, ``apple`` of ``5 apples``. None without words, or for words inside ``\\text``."""
    match = NUMBER_AND_NOUN.fullmatch(text)
    if match is None:
        return None
    return match[2].casefold().removesuffix("s")


# ``unit_of`` also removes a final s, so "inches" becomes "inche".
_UNIT_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inche",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "lb": "lb pound",
    "oz": "oz ounce",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
}
_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
_UNIT = re.compile(
    r"[\d})\]]\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*)?([a-zA-Z]+)\.?\s*\}?(?:\^\{?(\d)\}?)?"
)


def unit_of(text: str) -> tuple[str, str] | None:
    """The unit after a number, and the unit's power: ``("cm", "2")``. None for no unit, or an unknown unit."""
    matches_at_end = [match for match in _UNIT.finditer(text) if match.end() == len(text)]
    if not matches_at_end:
        return None
    name, power = matches_at_end[0].groups()
    name = name.lower()
    unit = _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
    if unit is None:
        return None
    return (unit, power or "1")


_BASED = re.compile(r"([0-9a-zA-Z]+)_(?:(\d+)|\{(\d+)\}|\{\\text\{(\d+)\}\})")


def digits_and_base(text: str) -> tuple[str, int] | None:
    """The digits and the base of ``1011_2``; None for any other text."""
    match = _BASED.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    base = next(group for group in match.groups()[1:] if group)
    return match[1].lower().lstrip("0"), int(base)


_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|textrm|mathbf|mathrm)\s*\{\s*)?(?:\(([A-J])\)|([A-J])[):.](?!\d))"
    r"(?:[\s~]*\})?(?:\\[,;: ]|[\s~])*(.*)",
    re.DOTALL,
)
_FURTHER_CHOICE = re.compile(r"\([A-J]\)|(?:\b(?:and|or)\b|[,;&])\s*[A-J]\b(?!\w)")


def choice_of(text: str) -> tuple[str, str] | None:
    """The letter of a choice and the text after it: B and 12 for ``(B) 12``. None for no or several choices."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter = match[1] or match[2]
    value_text = match[3].strip()
    if _FURTHER_CHOICE.search(value_text):
        return None
    return (letter, value_text)


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
    r"(?i)\b(?:not|isn't|cannot|can't|wrong|incorrect|neither|nor|false)\b|\\(?:ne|neq|not|lnot|neg)(?![a-zA-Z])"
    r"|\b(?:or|and)\s+(?:more|less|fewer|greater|above|below)\b|\b(?:at\s+least|at\s+most|more\s+than|less\s+than)\b|≠"
)


def is_denied(text: str) -> bool:
    """Whether words negate the value, or make it a bound: ``not 5``, ``5 or more``."""
    return _DENIAL.search(text) is not None
