r"""Notations of an answer: other digits, thousands, mixed numbers, repeating decimals, currencies, units and choices.

``plain_notation`` converts an answer to a notation that math-verify parses. Each of the other functions extracts a part
by which two answers are compared: nouns, units, bases, choices such as ``(B) 12``, words, negations. Imports none of
the rewards' libraries.
"""

from __future__ import annotations

import re
import unicodedata

from megatron_dppo.data.gold_answers import braced
from megatron_dppo.rewards.answers import in_ascii_punctuation

_SUPERSCRIPTS = {ord(c): str(i) for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {ord("⁻"): "-"}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z]|\([^()]*\))")

_FONT_COMMAND = re.compile(
    r"\\(?:bf|rm|it|sf|tt|displaystyle|textstyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])\s*"
)
_THIN_SPACE = r"(?:\\[,;:! ]|~|\\thinspace\s|\{,\}|\\!,\\!|,\\!)"
_LATEX_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_THIN_SPACE}\d{{3}})+(?!\d)")
r"""A number whose groups of three digits are separated by LaTeX: ``1\,234``."""
_PLAIN_THOUSANDS = re.compile(r"([+-]?\d{1,3}(?:[ '_]\d{3})+)((?:\.\d+)?(?:\s*\D.*)?)")
"""A number whose groups of three digits are separated by characters: ``1 234``, ``1'234``, ``1_234``."""
_LAYOUT_SPACE = re.compile(r"~|(?<!\\)\\[,;: ]|\\!|\\q?quad(?![a-zA-Z])")
_REPEATING = re.compile(
    r"(\d*)\.(\d*?)(?:\\overline\s*\{(\d+)\}|\\bar\s*\{(\d+)\}|\\dot\s*\{(\d)\}|\((\d+)\))"
)
_MIXED_NUMBER = re.compile(r"([+-]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_LATEX_MIXED_NUMBER = re.compile(r"([+-]?\d+)\s+(\\[dtc]?frac)")
_EXPONENT = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)[eE]([+-]?\d+)")
_CURRENCY = re.compile(
    r"([+-]?)\s*(?:(?:US|CA|AU|NZ|HK|A|C)?\\?\$|[€£¥₹₩]|\\(?:pounds|euro)(?![a-zA-Z])|(?:USD|EUR|GBP|CNY|RMB|INR|Rs)\b\.?)"
    r"\s*(?=[+-]?[\d.])"
)
_NUMBER_AND_NOUN = re.compile(r"([+-]?[\d.,/]*\d)\s+([A-Za-z][a-z]{3,}(?:[ -][A-Za-z]+)*|[A-Z]{3})")
_NUMBER_AND_VARIABLE = re.compile(r"(.*\d)\s*(t|c|d|ab|bc)")
"""A number times a variable that math-verify would parse as a unit."""


def plain_notation(text: str) -> str:
    """Convert ``text``, an answer without markup around it, to ASCII digits and to numbers that math-verify parses."""
    text = _in_ascii(text)
    text = _FONT_COMMAND.sub("", text)
    text = _REPEATING.sub(_as_fraction, text)
    text = _LATEX_THOUSANDS.sub(_digits_only, text)
    text = _LAYOUT_SPACE.sub(" ", text).strip()
    if _CURRENCY.match(text):
        text = _CURRENCY.sub(r"\1", text, count=1)
    if match := _PLAIN_THOUSANDS.fullmatch(text):
        number, rest = match.groups()
        text = re.sub("[ '_]", "", number) + rest
    if match := _MIXED_NUMBER.fullmatch(text):
        sign, integer, numerator, denominator = match.groups()
        return rf"{sign}({integer}+\frac{{{numerator}}}{{{denominator}}})"
    if match := _EXPONENT.fullmatch(text):
        number, exponent = match.groups()
        return rf"{number} \times 10^{{{int(exponent)}}}"
    if match := _NUMBER_AND_VARIABLE.fullmatch(text):
        number, variable = match.groups()
        return rf"{number} \cdot {variable}"
    if match := _NUMBER_AND_NOUN.fullmatch(text):
        number, noun = match.groups()
        return rf"{number} \text{{ {noun}}}"
    return _LATEX_MIXED_NUMBER.sub(r"\1\2", text)


def _in_ascii(text: str) -> str:
    text = in_ascii_punctuation(text)
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(_superscript_in_latex, text)
    text = _ROOT.sub(_root_in_latex, text)
    return "".join(map(_character_in_ascii, text))


def _superscript_in_latex(match: re.Match[str]) -> str:
    digits = match[0].translate(_SUPERSCRIPTS)
    return f"^{{{digits}}}"


def _root_in_latex(match: re.Match[str]) -> str:
    radicand = match[1].strip("()")
    return rf"\sqrt{{{radicand}}}"


def _character_in_ascii(character: str) -> str:
    if character.isascii():
        return character
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    # The normal form of a fraction in one character has two numbers and the slash of fractions.
    normal_form = unicodedata.normalize("NFKC", character)
    numerator, slash, denominator = normal_form.partition("\u2044")
    if slash and numerator.isdigit() and denominator.isdigit():
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return character


def _digits_only(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _as_fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction of integers: ``0.1\\overline{6}`` is (16 - 1) / 90."""
    integer = match[1] or "0"
    start = match[2]
    period = next(group for group in match.groups()[2:] if group)
    numerator = int(integer + start + period) - int(integer + start)
    denominator = (10 ** len(period) - 1) * 10 ** len(start)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def noun_of(text: str) -> str | None:
    """The words after a number, ``apple`` of ``5 apples``; None if there are none, or if they are inside ``\\text``."""
    match = _NUMBER_AND_NOUN.fullmatch(text)
    if match is None:
        return None
    return match[2].casefold().removesuffix("s")


# "inche" is "inches" without its s.
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
    """The unit after a number and its power, such as ``("cm", "2")``; None for no unit, or an unknown one."""
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
    """The letter of a choice and the text after it: B and 12 for ``(B) 12``. None for no choice, or several."""
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
    """An answer that consists of words alone, in lower case with single spaces; None for any other answer."""
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
    """Whether the whole answer is inside ``\\text`` or a similar command."""
    match = _TEXT.search(text)
    return match is not None and words_of(text[match.start() :].rstrip(" $.*")) is not None


_DENIAL = re.compile(
    r"(?i)\b(?:not|isn't|cannot|can't|wrong|incorrect|neither|nor|false)\b|\\(?:ne|neq|not|lnot|neg)(?![a-zA-Z])"
    r"|\b(?:or|and)\s+(?:more|less|fewer|greater|above|below)\b|\b(?:at\s+least|at\s+most|more\s+than|less\s+than)\b|≠"
)


def is_denied(text: str) -> bool:
    """Whether words negate the value, or make it a bound: ``not 5``, ``5 or more``."""
    return _DENIAL.search(text) is not None
