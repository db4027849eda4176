"""Reward for mathematics: the response's final answer, compared by the math-verify library."""

from __future__ import annotations

import math
import re

from latex2sympy2_extended.logic import And
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Eq, Integer, Mul, Number, Pow

from megatron_dppo.data.gold_answers import LONGEST_ANSWER
from megatron_dppo.rewards import answer_parts
from megatron_dppo.rewards.answers import without_markup, without_note, written_answer
from megatron_dppo.rewards.expected_answers import expected_answer, readable_answer
from megatron_dppo.rewards.notation import plain_notation
from megatron_dppo.rewards.sentences import without_lead
from megatron_dppo.rewards.units import quantities_of, unit_of

_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_VERDICTS = {"yes", "no", "true", "false", "none"}
_ROUNDING = 6
"""Number of digits of a decimal number that are compared. They begin after the point. For numbers below ``_SMALL``,
they begin at the first digit that is not 0."""
_SMALL = 1e-3
_STATEMENT_TOLERANCE = 0.01
"""An equation is wrong if its sides have a larger relative difference. A smaller difference may be rounding."""


def math_verify(response: str, answer: str) -> float:
    r"""Score 1 if the response's final answer is mathematically equal to ``answer``, else 0.

    ``answers.final_answer`` defines the final answer of a response, and ``expected_answers.expected_answer`` reads the
    gold answer in the same way. Both answers are converted to one notation
    (``notation.plain_notation``: ``1\,234``, ``3 1/2``, ``0.\overline{3}``, full-width digits). Integers are compared
    without leading zeros, words as words, choices by their letter or by the value after the letter, and numbers with a
    base digit by digit. math-verify parses all other answers: 1/2 equals 0.5, {1,2} equals {2,1}, ``x = 5`` equals 5.
    A response's answer scores 0 if its unit differs, if it is negated (``not 5``) or a bound (``5 or more``), or if it
    is part of a wrong equation of numbers (``2 + 2 = 5``).

    The function has no time limit: nested powers can take unlimited time. Raises ValueError if ``answer`` cannot be
    parsed.
    """
    written = written_answer(response)
    candidate = without_markup(without_lead(without_note(without_markup(written))))
    if not candidate or len(candidate) > LONGEST_ANSWER:
        return 0.0
    written_gold = expected_answer(answer)
    gold_text = without_markup(without_lead(without_note(without_markup(written_gold))))
    if _same_text(candidate, gold_text) or _same_text(
        without_markup(written), without_markup(answer)
    ):
        return 1.0
    is_same_choice = _same_choice(candidate, gold_text)
    if is_same_choice is not None:
        return float(is_same_choice)
    written_as_text = any(map(answer_parts.is_set_as_text, (written, written_gold)))
    return float(_equal(candidate, gold_text, written_as_text))


def check_gold(response: str, answer: str) -> float:
    r"""Score a response that boxes the final answer of the gold answer ``answer``: 1 if a response can match it.

    The function ignores ``response``: it has a reward's signature so that a verifier can bound its time. Raises
    ValueError if ``answer`` cannot be parsed, has more than ``LONGEST_ANSWER`` characters, or is a sentence without one
    clear value.
    """
    gold_text = readable_answer(answer)
    if _INTEGER.fullmatch(gold_text):
        return 1.0
    gold = _parse_gold(gold_text)
    is_reflexive = verify(gold, gold, timeout_seconds=None)
    return float(is_reflexive and math_verify(rf"\boxed{{{gold_text}}}", answer))


def _same_choice(candidate: str, gold_text: str) -> bool | None:
    """Whether two answers are the same choice. None if neither has a choice's letter and text, ``(B) 12``.

    An answer with a letter and a text equals the letter and the text. If both answers have both, both must be equal.
    """
    choice = answer_parts.choice_of(candidate)
    expected_choice = answer_parts.choice_of(gold_text)
    letter, value_text = choice or (answer_parts.option_of(candidate), candidate)
    expected_letter, expected_text = expected_choice or (
        answer_parts.option_of(gold_text),
        gold_text,
    )
    if letter is not None and expected_letter is not None:
        has_both_texts = choice is not None and expected_choice is not None
        return letter == expected_letter and (
            not has_both_texts or _same_value(value_text, expected_text)
        )
    if choice is None and expected_choice is None:
        return None
    return _same_value(value_text, expected_text)


def _same_value(text: str, expected_text: str) -> bool:
    """Whether the texts of two choices are equal. A missing text equals no value."""
    value, expected_value = without_markup(text), without_markup(expected_text)
    if not value or not expected_value:
        return value == expected_value
    return _same_text(value, expected_value) or _equal(value, expected_value, written_as_text=False)


def _equal(candidate: str, gold_text: str, written_as_text: bool) -> bool:
    """Whether two answers without markup are equal. ``written_as_text``: one of them is text, not a formula."""
    candidate_words = answer_parts.words_of(candidate)
    expected_words = answer_parts.words_of(gold_text)
    are_words = candidate_words is not None and expected_words is not None
    are_equal_words = are_words and candidate_words == expected_words
    # math-verify parses a word as a product of letters, so "on" would equal "no". Compare text and verdicts only as
    # words. Other letters may be a product, "ab", and are left to math-verify.
    are_no_product = are_words and (written_as_text or expected_words in _VERDICTS)
    if are_equal_words or are_no_product:
        return are_equal_words
    gold = _parse_gold(gold_text)
    plain = plain_notation(candidate)
    expected_plain = plain_notation(gold_text)
    if _same_text(plain, expected_plain):
        return True
    expected_range = answer_parts.range_of(expected_plain)
    if expected_range is not None:
        return answer_parts.range_of(plain) == expected_range
    quantities, expected_quantities = quantities_of(plain), quantities_of(expected_plain)
    if quantities is not None or expected_quantities is not None:
        return quantities == expected_quantities
    if _parts_differ(candidate, gold_text) or _parts_differ(plain, expected_plain):
        return False
    values = [value for value in _parse(plain) if not _is_wrong_statement(value)]
    return bool(
        verify(
            gold,
            values,
            float_rounding=_rounding(gold),
            # An interval equals the inequality of the same set, whichever of them is expected.
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _parts_differ(text: str, gold_text: str) -> bool:
    """Whether two answers differ in a part that math-verify does not compare: a bound, a range, units or a base."""
    if answer_parts.is_denied(text) and not answer_parts.is_denied(gold_text):
        return True
    noun = answer_parts.noun_of(text)
    gold_noun = answer_parts.noun_of(gold_text)
    if noun and gold_noun and answer_parts.are_different_nouns(noun, gold_noun):
        return True
    return _differ(unit_of(text), unit_of(gold_text)) or _differ(
        answer_parts.digits_and_base(text), answer_parts.digits_and_base(gold_text)
    )


def _differ(part: object, expected_part: object) -> bool:
    """Whether both answers have this part, and the parts differ."""
    return part is not None and expected_part is not None and part != expected_part


def _is_wrong_statement(value: object) -> bool:
    """Whether ``value`` is an equation of numbers whose sides differ by more than ``_STATEMENT_TOLERANCE``.

    A chain of equations is wrong if one of its equations is wrong. The first equation with a variable, and all
    equations after it, do not count.
    """
    for equation in _equations(value):
        if equation.free_symbols:
            return False
        left_value = complex(equation.lhs.doit().evalf())
        right_value = complex(equation.rhs.doit().evalf())
        if abs(left_value - right_value) > _STATEMENT_TOLERANCE * abs(right_value):
            return True
    return False


def _equations(value: object) -> list[Eq]:
    """The equations in a parsed answer: math-verify parses ``a = b = c`` as a conjunction."""
    if isinstance(value, Eq):
        return [value]
    equations: list[Eq] = []
    if isinstance(value, And):
        for part in value.args:
            equations += _equations(part)
    return equations


def _rounding(gold: list) -> int:
    """Number of digits after the point to compare: more for a small number, so that ``_ROUNDING`` digits count."""
    value = gold[0]
    factors = value.args if isinstance(value, Mul) else (value,)
    if not all(map(_is_plain_number, factors)):
        return _ROUNDING
    magnitude = abs(float(value.doit()))
    if 0 < magnitude < _SMALL:
        leading_zeros = -math.ceil(math.log10(magnitude))
        return _ROUNDING + leading_zeros
    return _ROUNDING


def _is_plain_number(factor: object) -> bool:
    """Whether ``factor`` is a number, or a power of numbers that is quick to compute."""
    if isinstance(factor, Pow):
        base, exponent = factor.args
        return isinstance(base, Number) and isinstance(exponent, Integer) and abs(exponent) < 100
    return isinstance(factor, Number) and bool(abs(factor) < 1e300)


def _same_text(candidate: str, gold_text: str) -> bool:
    if candidate == gold_text:
        return True
    candidate_integer = _INTEGER.fullmatch(candidate)
    gold_integer = _INTEGER.fullmatch(gold_text)
    if candidate_integer is None or gold_integer is None:
        return False
    return _sign_and_digits(candidate_integer) == _sign_and_digits(gold_integer)


def _sign_and_digits(integer: re.Match[str]) -> tuple[bool, str]:
    """Whether the integer is negative, and its digits without leading zeros."""
    sign, digits = integer.groups()
    return sign == "-" and digits != "0", digits


def _parse_gold(answer: str) -> list:
    """Parse the values of an expected answer. Raises ValueError for an answer without values."""
    plain = plain_notation(answer)
    gold = _parse(plain)
    if gold and any(not equation.free_symbols for equation in _equations(gold[0])):
        # A calculation, 6 * 4 = 24, stands for its result.
        gold = _parse(plain.rpartition("=")[2])
    if not gold:
        raise ValueError(f"math-verify cannot parse the answer {answer!r}")
    return gold


def _parse(text: str) -> list:
    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
