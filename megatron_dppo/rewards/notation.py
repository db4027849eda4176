"""Conversion of an answer to the notation that math-verify parses: other digits, thousands, mixed numbers, repeating
decimals, currencies. This module does not import the rewards' libraries.
"""

from __future__ import annotations

import re
import unicodedata

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
r"""A repeating decimal: ``0.1\overline{6}``, ``0.1\bar{6}``, ``0.1\dot{6}`` or ``0.1(6)``. Each of these forms has its
own group for the period."""
_MIXED_NUMBER = re.compile(r"([+-]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_LATEX_MIXED_NUMBER = re.compile(r"([+-]?\d+)\s+(\\[dtc]?frac)")
_EXPONENT = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)[eE]([+-]?\d+)")
_CURRENCY = re.compile(
    r"([+-]?)\s*(?:(?:US|CA|AU|NZ|HK|A|C)?\\?\$|[€£¥₹₩]|\\(?:pounds|euro)(?![a-zA-Z])|(?:USD|EUR|GBP|CNY|RMB|INR|Rs)\b\.?)"
    r"\s*(?=[+-]?[\d.])"
)
NUMBER_AND_NOUN = re.compile(r"([+-]?[\d.,/]*\d)\s+([A-Za-z][a-z]{3,}(?:[ -][A-Za-z]+)*|[A-Z]{3})")
"""A number and the words after it, or a currency's code of three letters: ``5 apples``, ``5 USD``."""
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
    if match := NUMBER_AND_NOUN.fullmatch(text):
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
