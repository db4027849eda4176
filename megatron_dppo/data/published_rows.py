"""From a record of a published file to a problem's text and its final answer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_dppo.data.json_lines import shorten
from megatron_dppo.data.published import PublishedSet, Schema
from megatron_dppo.rewards.gold import gold_answer, holds_answer

_INSTRUCTIONS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\ASolve the following math problem step by step\. The last line of your response should be "
        r"of the form .{1,60}? is the answer to the problem\.\s+",
        r"\s+Remember to put your answer on its own line (?:after|as) \"Answer:[^\"]*\"\.\s*\Z",
        r"\s+Let's think step by step and output the final answer (?:within|after) "
        r"(?:\\boxed\{\}|\"####\")\.\s*\Z",
        r"\s+Please reason step by step, and put your final answer within \\boxed\{\}\.\s*\Z",
    )
)
"""What publishers put around a problem to say how it is to be answered."""
_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_NUMBER = re.compile(r"[+-]?[\d.,/]+")
_CONTEST_INTEGER = re.compile(r"\$?\s*(\d{1,3})\s*(?:\^\{?\\circ\}?|°)?\s*\$?")
_EAST_ASIAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff5e\u3001\u3002]")


class RowError(ValueError):
    """A record holds no problem or no answer that can be used."""


def prompt_text(value: object) -> str:
    """The text of a problem: itself, or the one message of the user. Raises RowError."""
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        asked = [message.get("content") for message in value if message.get("role") == "user"]
        others = {message.get("role") for message in value} - {"user", "system"}
        value = asked[0] if len(asked) == 1 and not others else value
    if isinstance(value, str) and value.strip():
        return value
    raise RowError(f"its problem is {shorten(value)}, expected text or one message of a user")


def bare_problem(text: str) -> str:
    """``text`` without the instructions that publishers are known to put around problems."""
    for instruction in _INSTRUCTIONS:
        text = instruction.sub("", text)
    return text.strip()


def is_english(text: str) -> bool:
    """Whether ``text`` holds no Chinese, Japanese or Korean characters."""
    return not _EAST_ASIAN.search(text)


def answer_text(value: object) -> str:
    """The answer as text: text, a number, or a list that holds one of these. Raises RowError."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise RowError(f"its answer is {shorten(value)}, expected text or a number")


def final_answer(text: str, schema: Schema, published: PublishedSet) -> str:
    """The final answer in what ``answer_text`` returned: ``27.0`` is written 27.

    Raises RowError where a worked solution has none, or a competition of integers another one.
    """
    if schema.worked and not holds_answer(text) and not _NUMBER.fullmatch(text):
        raise RowError("its solution has neither #### nor a box")
    answer = gold_answer(text)
    if whole := _WHOLE.fullmatch(answer):
        answer = whole[1]
    if not answer:
        raise RowError("its answer is empty")
    if published.integer_answers:
        integer = _CONTEST_INTEGER.fullmatch(answer)
        if not integer:
            raise RowError(f"its answer is {shorten(answer)}, expected an integer from 0 to 999")
        answer = str(int(integer[1]))
    return answer
