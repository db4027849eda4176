"""Reward for mathematics: the response's final answer, compared by the math-verify library."""

from __future__ import annotations

import re

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from megatron_dppo.rewards.gold import LONGEST_ANSWER, boxes, braced

_STATED = re.compile(r"(?i)\banswer\b\W{0,4}?(?:\s+is\b\s*:?|:)\s*([^\n]+)")
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_STYLE = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|bm|boldsymbol)\s*\{")
_PARENTHESISED_NUMBER = re.compile(r"\(\s*([+-]?\d+(?:\.\d+)?)\s*\)")
_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_BEFORE = " \t\n\r$*~"
_AFTER = _BEFORE + ".,;:"


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
    expected = _strip_markup(answer)
    given = _strip_markup(final_answer(response))
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
    expected = _strip_markup(answer)
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


def final_answer(response: str) -> str:
    """The final answer as written in ``response``; empty if there is none."""
    stated = [(m.start(1), _first_answer_of(m[1])) for m in _STATED.finditer(response)]
    found = [*boxes(response), *stated]
    if found:
        return max(found)[1]
    last_line = response.strip().rpartition("\n")[2]
    formulas = _formulas(last_line)
    return formulas[-1] if formulas else last_line


def _first_answer_of(line: str) -> str:
    """The answer in the text after ``Answer:``: its first formula, else its first sentence."""
    formulas = _formulas(line)
    return formulas[0] if formulas else _SENTENCE_END.split(line, maxsplit=1)[0]


def _formulas(line: str) -> list[str]:
    return [next(group for group in m.groups() if group) for m in _FORMULA.finditer(line)]


def _strip_markup(text: str) -> str:
    """``text`` without fonts, dollar signs and punctuation around the whole of it."""
    text = text.lstrip(_BEFORE).rstrip(_AFTER)
    while (match := _STYLE.match(text)) and (inner := braced(text, match.end())) is not None:
        if match.end() + len(inner) + 1 != len(text):
            break
        text = inner.lstrip(_BEFORE).rstrip(_AFTER)
    number = _PARENTHESISED_NUMBER.fullmatch(text)
    return number[1] if number else text


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
