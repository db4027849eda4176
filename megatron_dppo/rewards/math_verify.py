"""Reward for mathematics: the response's final answer, compared by the math-verify library."""

from __future__ import annotations

import re

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from megatron_dppo.rewards.answers import LONGEST_ANSWER, final_answer, without_markup

_INTEGER = re.compile(r"([+-]?)0*(\d+)")


def math_verify(response: str, answer: str) -> float:
    r"""Score 1 if the response's final answer is mathematically equal to ``answer``, else 0.

    The final answer is the last of ``\boxed{X}`` (``\framebox``, ``\fbox``), ``Answer: X``
    (DAPO-Math's form) and ``answer is X``; in a response without these, the last formula of the
    last line, or that line. Fonts, dollar signs and a final full stop around it are removed.
    Integers are compared without leading zeros; other answers are parsed by math-verify on both
    sides: 1/2 equals 0.5, {1,2} equals {2,1}, ``x = 5`` equals 5.

    No time limit of its own: nested powers can take unlimited time. Raises ValueError if ``answer``
    cannot be parsed.
    """
    expected = without_markup(answer)
    given = final_answer(response)
    if not given or len(given) > LONGEST_ANSWER:
        return 0.0
    if _same_text(given, expected):
        return 1.0
    gold = _parse(expected)
    if not gold:
        raise ValueError(f"math-verify cannot parse the answer {answer!r}")
    return float(verify(gold, _parse(given), timeout_seconds=None))


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
    gold = _parse(expected)
    if not gold:
        raise ValueError(f"math-verify cannot parse the answer {answer!r}")
    return float(verify(gold, gold, timeout_seconds=None))


def _same_text(given: str, expected: str) -> bool:
    if given == expected:
        return True
    a, b = _INTEGER.fullmatch(given), _INTEGER.fullmatch(expected)
    return bool(a and b) and _signed(a) == _signed(b)


def _signed(integer: re.Match[str] | None) -> tuple[bool, str]:
    assert integer
    return integer[1] == "-" and integer[2] != "0", integer[2]


def _parse(text: str) -> list:
    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
