"""Reward for mathematics: the response's final answer, compared by the math-verify library."""

from __future__ import annotations

import math
import re

from latex2sympy2_extended.logic import And
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Eq, Integer, Mul, Number, Pow

from megatron_dppo.rewards import notation
from megatron_dppo.rewards.answers import LONGEST_ANSWER, without_markup, written_answer

_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_VERDICTS = {"yes", "no", "true", "false", "none"}
_ROUNDING = 6
"""Digits behind the point that decimals are compared by; of a smaller answer its first six digits."""
_SMALL = 1e-3
_STATEMENT_TOLERANCE = 0.01


def math_verify(response: str, answer: str) -> float:
    r"""Score 1 if the response's final answer is mathematically equal to ``answer``, else 0.

    Which part of the response is its final answer: ``answers.final_answer``. Both are brought to one notation
    (``notation.plain_notation``: ``1\,234``, ``3 1/2``, ``0.\overline{3}``, full-width digits). Integers are compared
    without leading zeros, words as words, choices by their letter or by the value behind it, numbers with a base
    digit by digit; others are parsed by math-verify on both sides: 1/2 equals 0.5, {1,2} equals {2,1}, ``x = 5``
    equals 5. An answer scores 0 that has another unit, is denied (``not 5``) or made a bound (``5 or more``), or
    stands in a wrong equation of numbers (``2 + 2 = 5``).

    No time limit of its own: nested powers can take unlimited time. Raises ValueError if ``answer``
    cannot be parsed.
    """
    written = written_answer(response)
    given = without_markup(written)
    if not given or len(given) > LONGEST_ANSWER:
        return 0.0
    expected = without_markup(answer)
    if _same_text(given, expected):
        return 1.0
    written_as_text = notation.is_set_as_text(written) or notation.is_set_as_text(answer)
    return float(_equal(given, expected, written_as_text) or _same_choice(given, expected))


def check_gold(response: str, answer: str) -> float:
    """1 where ``answer`` can be parsed and equals itself, so that a response can earn something.

    ``response`` is ignored: this has a reward's form so that a verifier can bound its time. Raises
    ValueError where ``answer`` cannot be parsed, or is longer than the longest that is compared.
    """
    expected = without_markup(answer)
    if not expected or len(expected) > LONGEST_ANSWER:
        raise ValueError(
            f"the answer has {len(expected)} characters, expected 1 to {LONGEST_ANSWER}"
        )
    if _INTEGER.fullmatch(expected):
        return 1.0
    gold = _required(expected)
    return float(verify(gold, gold, timeout_seconds=None))


def _same_choice(given: str, expected: str) -> bool:
    """Whether a choice with its text, ``(B) 12``, is the expected letter or the expected value."""
    choice = notation.choice_of(given)
    if choice is None:
        return False
    letter, rest = choice
    if expected_letter := _CHOICE.fullmatch(expected):
        return letter == expected_letter[1]
    value = without_markup(rest)
    return bool(value) and (_same_text(value, expected) or _equal(value, expected, False))


def _equal(given: str, expected: str, written_as_text: bool) -> bool:
    """Whether two answers without markup are equal. ``written_as_text``: one of them is text, and no formula."""
    words, expected_words = notation.words_of(given), notation.words_of(expected)
    are_words = words is not None and expected_words is not None
    # As formulas they are products of letters: "on" would equal "no".
    if are_words and (written_as_text or words == expected_words or expected_words in _VERDICTS):
        return words == expected_words
    gold = _required(expected)
    plain, expected_plain = notation.plain_notation(given), notation.plain_notation(expected)
    if _same_text(plain, expected_plain):
        return True
    if (
        (notation.is_denied(given) and not notation.is_denied(expected))
        or _differ(notation.noun_of(given), notation.noun_of(expected))
        or _differ(notation.unit_of(plain), notation.unit_of(expected_plain))
        or _differ(notation.digits_and_base(plain), notation.digits_and_base(expected_plain))
    ):
        return False
    parsed = [value for value in _parse(plain) if not _is_wrong_statement(value)]
    return bool(verify(gold, parsed, float_rounding=_rounding(gold), timeout_seconds=None))


def _differ(part: object, expected_part: object) -> bool:
    """Whether both answers have such a part, and not the same."""
    return part is not None and expected_part is not None and part != expected_part


def _is_wrong_statement(value: object) -> bool:
    """Whether ``value`` is an equation of numbers whose sides differ by more than was rounded."""
    for equation in _equations(value):
        if equation.free_symbols:
            return False
        left, right = (complex(side.doit().evalf()) for side in (equation.lhs, equation.rhs))
        if abs(left - right) > _STATEMENT_TOLERANCE * abs(right):
            return True
    return False


def _equations(value: object) -> list[Eq]:
    if isinstance(value, Eq):
        return [value]
    if isinstance(value, And):
        return [equation for part in value.args for equation in _equations(part)]
    return []


def _rounding(gold: list) -> int:
    """Digits behind the point, so that of a small number six digits are compared."""
    value = gold[0]
    factors = value.args if isinstance(value, Mul) else (value,)
    if not all(map(_is_plain_number, factors)):
        return _ROUNDING
    size = abs(float(value.doit()))
    return _ROUNDING - math.ceil(math.log10(size)) if 0 < size < _SMALL else _ROUNDING


def _is_plain_number(factor: object) -> bool:
    """Whether ``factor`` is a number, or a power of numbers that takes no time."""
    if isinstance(factor, Pow):
        base, exponent = factor.args
        return isinstance(base, Number) and isinstance(exponent, Integer) and abs(exponent) < 100
    return isinstance(factor, Number) and bool(abs(factor) < 1e300)


def _same_text(given: str, expected: str) -> bool:
    if given == expected:
        return True
    a, b = _INTEGER.fullmatch(given), _INTEGER.fullmatch(expected)
    return bool(a and b) and _signed(a) == _signed(b)


def _signed(integer: re.Match[str] | None) -> tuple[bool, str]:
    assert integer
    return integer[1] == "-" and integer[2] != "0", integer[2]


def _required(answer: str) -> list:
    """The values of an expected answer. Raises ValueError where it has none."""
    gold = _parse(notation.plain_notation(answer))
    if not gold:
        raise ValueError(f"math-verify cannot parse the answer {answer!r}")
    return gold


def _parse(text: str) -> list:
    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
