"""Conversion of an answer to the notation that math-verify parses: other digits, thousands, mixed numbers, repeating
decimals, currencies. This module does not import the rewards' libraries.
"""

from __future__ import annotations

import re
import unicodedata

from megatron_dppo.rewards.answers import in_ascii_punctuation
from megatron_dppo.rewards.units import units_named

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
_DOTTED_THOUSANDS = re.compile(r"\d{1,3}(?:\.\d{3}){2,}")
"""A number whose groups of three digits are separated by points. With one point it would be a decimal number."""
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
NUMBER_AND_NOUN = re.compile(
    r"([+-]?[\d.,/]*\d)\s+([A-Za-z][a-z]{3,}(?:[ -][A-Za-z]+)*|(?!abc)(?=[a-z]*[aeiou])[a-z]{3}|[A-Z]{3})"
)
"""A number and the words after it, or a currency's code of three letters: ``5 apples``, ``5 USD``."""
_COMMANDS = str.maketrans(
    {"∞": r"\infty ", "∅": r"\emptyset ", "⟨": r"\langle ", "⟩": r"\rangle ", "÷": "/"}
)
_BARE_COMMAND = re.compile(
    r"(?<![\\a-zA-Z])(?:(pi|log|ln|sin|cos|tan|exp)|(infinity|inf|oo))(?![a-zA-Z])"
)
"""The name of a constant or function as programs write it, without a backslash."""
_PLAIN_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2}")
_POWER = re.compile(r"(?:\*\*|\^)\(([^()]*)\)")
_TIMES = re.compile(r"(?<=\d) ?[xX] ?(?=\d)")
_VECTOR = re.compile(
    r"(?:\\left\s*)?(?:\\langle|<)(.*,.*?)(?:\\right\s*)?(?:\\rangle|>)", re.DOTALL
)
_DEGREES = re.compile(
    r"(\d)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?:([CF])(?![a-zA-Z]))?\}?"
)
_NUMBER = r"[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_NUMBER_AND_SIGN = re.compile(
    rf"(?:共|约|一共|总共)?\s*({_NUMBER})\s*(?:[€£¥₹₩]|\\?\$|[\u4e00-\u9fff]+)"
)
"""A number and the sign of a currency, or words in Chinese, after it."""
_CHINESE_FACTOR = re.compile("[十百千万亿半倍]")
"""A character that changes the number before it."""
_NUMBER_AND_RATE = re.compile(
    rf"({_NUMBER})\s*((?:[a-zA-Z]+(?:\^\{{?\d\}}?)?\s*)?(?:/|\bper\b)\s*[a-zA-Z]+(?:\^\{{?\d\}}?)?|[a-zA-Z]+\^\{{?\d\}}?)"
)
"""A number with units that have a slash or a power: ``5 m/s``, ``12/day``, ``5 cm^2``."""
_NUMBER_NAMES = (
    *(
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBER_AND_VARIABLE = re.compile(r"(.*\d)\s*(t|c|d|ab|bc)")
"""A number times a variable that math-verify would parse as a unit."""


def plain_notation(text: str) -> str:
    """Convert ``text``, an answer without markup around it, to ASCII digits and to numbers that math-verify parses."""
    text = _in_ascii(text).translate(_COMMANDS).replace("{:}", ":")
    named_number = _number_in_words(text)
    if named_number is not None:
        return str(named_number)
    text = _as_latex(text)
    text = _FONT_COMMAND.sub("", text)
    text = _REPEATING.sub(_as_fraction, text)
    text = _LATEX_THOUSANDS.sub(_digits_only, text)
    text = _LAYOUT_SPACE.sub(" ", text).strip()
    if _CURRENCY.match(text):
        text = _CURRENCY.sub(r"\1", text, count=1)
    if match := _PLAIN_THOUSANDS.fullmatch(text):
        number, rest = match.groups()
        text = re.sub("[ '_]", "", number) + rest
    for form, converted in _FORMS:
        match = form.fullmatch(text)
        if match is not None:
            return converted(match)
    return _LATEX_MIXED_NUMBER.sub(r"\1\2", text)


def _digits_only(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _mixed_number(match: re.Match[str]) -> str:
    sign, integer, numerator, denominator = match.groups()
    return rf"{sign}({integer}+\frac{{{numerator}}}{{{denominator}}})"


def _with_exponent(match: re.Match[str]) -> str:
    return rf"{match[1]} \times 10^{{{int(match[2])}}}"


def _number_alone(match: re.Match[str]) -> str:
    return match[0] if _CHINESE_FACTOR.search(match[0]) else match[1]


def _with_rate(match: re.Match[str]) -> str:
    units = match[2]
    names = re.findall("[a-zA-Z]{3,}", units)
    # Single letters may be variables: ``5 x/y``.
    is_rate = bool(names) or units_named(units) is not None
    return _with_text(match) if is_rate else match[0]


def _with_variable(match: re.Match[str]) -> str:
    return rf"{match[1]} \cdot {match[2]}"


def _with_text(match: re.Match[str]) -> str:
    return rf"{match[1]} \text{{ {match[2]}}}"


_FORMS = (
    (_DOTTED_THOUSANDS, _digits_only),
    (_MIXED_NUMBER, _mixed_number),
    (_EXPONENT, _with_exponent),
    (_NUMBER_AND_SIGN, _number_alone),
    (_NUMBER_AND_RATE, _with_rate),
    (_NUMBER_AND_VARIABLE, _with_variable),
    (NUMBER_AND_NOUN, _with_text),
)
"""Forms of a whole answer, in the order in which they are tried, and their conversions to LaTeX."""


def _number_in_words(text: str) -> int | None:
    """The number that ``seven``, ``twenty-one`` or ``seven (7)`` names; None for other texts."""
    words = re.sub(r"\(\d+\)$", "", text).casefold().replace("-", " ").split()
    if len(words) == 1 and words[0] in _NUMBER_NAMES:
        return _NUMBER_NAMES.index(words[0])
    if not words or words[0] not in _TENS:
        return None
    tens = 10 * _TENS.index(words[0])
    if len(words) == 1:
        return tens
    has_digit = len(words) == 2 and words[1] in _NUMBER_NAMES[1:10]
    return tens + _NUMBER_NAMES.index(words[1]) if has_digit else None


def _as_latex(text: str) -> str:
    """Convert a formula as programs write it, ``2*pi`` or ``x**2``, and vectors and degrees, to LaTeX."""
    if match := _VECTOR.fullmatch(text):
        text = f"({match[1]})"
    text = _DEGREES.sub(_degrees_in_latex, text)
    text = _POWER.sub(r"^{\1}", text).replace("**", "^").replace("*", r"\cdot ")
    text = _TIMES.sub(r" \\times ", text)
    in_latex = _BARE_COMMAND.sub(_command_in_latex, text)
    # In a text of words, the names are words too.
    return text if _PLAIN_WORD.search(in_latex) else in_latex


def _degrees_in_latex(match: re.Match[str]) -> str:
    digit, scale = match.groups()
    return rf"{digit} \text{{ deg{scale}}}" if scale else rf"{digit}^\circ"


def _command_in_latex(match: re.Match[str]) -> str:
    return rf"\{match[1]}" if match[1] else r"\infty"


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


def _as_fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction of integers: ``0.1\\overline{6}`` is (16 - 1) / 90."""
    integer = match[1] or "0"
    start = match[2]
    period = next(group for group in match.groups()[2:] if group)
    numerator = int(integer + start + period) - int(integer + start)
    denominator = (10 ** len(period) - 1) * 10 ** len(start)
    return rf"\frac{{{numerator}}}{{{denominator}}}"
