r"""The part of a gold answer that responses are compared with. This module does not import the rewards' libraries."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_dppo.data.gold_answers import LONGEST_ANSWER, gold_answer
from megatron_dppo.rewards import answer_parts
from megatron_dppo.rewards.answers import without_markup, written_answer

_ANSWER_KEYS = ("answer", "final_answer", "ground_truth", "target", "value", "result", "solution")
"""Keys of a JSON object that may hold its answer, in order of preference."""
_ENVIRONMENT = re.compile(r"\\begin\s*\{")
_LONE_LETTER = re.compile(r"[A-Za-z]")
_COMMAND_OR_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_PLAIN_WORD = re.compile(r"[A-Za-z]{2,}")
_MOST_WORDS = 3
"""Largest number of words beside digits in an answer that is no sentence: "2 hours 20 minutes"."""


def expected_answer(answer: str) -> str:
    r"""The final answer in a gold answer, with the markup around it.

    A gold answer is read as a response is: ``#### 42``, ``\boxed{42}``, ``<answer>42</answer>``, "The answer is 42.",
    "She has 42 apples." JSON with one value stands for the value. In other texts the whole text is the answer.
    """
    value = _json_value(answer.strip())
    if value is not None:
        return expected_answer(value)
    solution_answer = gold_answer(answer)
    if _ENVIRONMENT.search(solution_answer):
        # A matrix may have several lines.
        return solution_answer
    written = written_answer(solution_answer)
    if not without_markup(written) or _LONE_LETTER.fullmatch(without_markup(written)):
        # A variable in a sentence is no answer; a letter alone is an option.
        return solution_answer if answer_parts.option_of(written) is None else written
    return written


def readable_answer(answer: str) -> str:
    """The final answer in a gold answer, without the markup around it.

    Raises ValueError if no response can equal it: it is empty, too long, or a sentence without one clear value.
    """
    gold_text = without_markup(expected_answer(answer))
    if not gold_text or len(gold_text) > LONGEST_ANSWER:
        raise ValueError(
            f"the answer has {len(gold_text)} characters, expected 1 to {LONGEST_ANSWER}"
        )
    if _is_sentence(gold_text):
        raise ValueError(
            f"the answer is {gold_text!r}, a text with several values; expected one number, formula, option or phrase, "
            r"or \boxed{...} around it"
        )
    return gold_text


def _is_sentence(gold_text: str) -> bool:
    """Whether an answer has digits among words, and is no number with words after it and no option."""
    has_digit = any(character.isdigit() for character in gold_text)
    if not has_digit or answer_parts.choice_of(gold_text) or answer_parts.noun_of(gold_text):
        return False
    words = _PLAIN_WORD.findall(_COMMAND_OR_TEXT.sub(" ", gold_text))
    return len(words) > _MOST_WORDS


def _json_value(text: str) -> str | None:
    """The text of the only value in JSON, or of the answer; None for other texts and for lists of values."""
    if not text.startswith(("{", "[", '"')):
        return None
    try:
        # A number stays as it is written, so that no digit is lost.
        value = json.loads(text, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return None
    while isinstance(value, list | dict):
        inner_value = _value_inside(value)
        if inner_value is None:
            return None
        value = inner_value
    return str(value)


def _value_inside(value: list[Any] | Mapping[str, Any]) -> Any:
    """The only entry of a list; the only value of an object, or that of its answer key. None if there is none."""
    if isinstance(value, list):
        return value[0] if len(value) == 1 else None
    if len(value) == 1:
        return next(iter(value.values()))
    return next((value[key] for key in _ANSWER_KEYS if key in value), None)
