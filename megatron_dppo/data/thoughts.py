"""Thoughts of the policy: the marks around them, and the part of a response that is the answer.

A response may think before it answers: ``<think>...</think>42``. Many chat templates open the thought at the end of the
prompt, so that the response has only the closing mark, or no mark if it was cut off or ended in its thought.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Marks = Sequence[Sequence[str]]
"""Pairs of texts: the beginning and the end of a thought."""

DEFAULT_MARKS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Default of ``data.thought_marks``."""

# The channels of gpt-oss: <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>42
_CHANNEL = "<|channel|>"
_FINAL_CHANNEL = re.compile(r"<\|channel\|>final(?:(?!<\|channel\|>).)*?<\|message\|>", re.DOTALL)
_CHANNEL_END = re.compile(r"<\|(?:end|return|call|start)\|>")
# The same text without its special tokens: analysis...assistantfinal42
_BARE_FINAL = "assistantfinal"
_BARE_CHANNEL = re.compile(r"\s*(?:analysis|commentary)[\w\\$*\"(]")

# The prompt may open the first channel.
_CHANNELS = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")


@dataclass(frozen=True)
class TurnText:
    """The text of a turn of the policy, in the forms that rewards and environments read.

    Attributes:
        text: the whole text, without special tokens.
        special_text: the whole text with its special tokens, without the token that ended the turn.
        open_thought: the end of the prompt, from the mark of a thought that the prompt leaves open; empty without one.
        answer: the text after the thoughts, without special tokens.
    """

    text: str
    special_text: str
    open_thought: str
    answer: str

    @classmethod
    def plain(cls, text: str, marks: Marks = DEFAULT_MARKS) -> TurnText:
        """Return the forms of a text without special tokens that no prompt precedes, for example an agent's result."""
        return cls(text, text, "", answer_part(text, marks))


def answer_part(response: str, marks: Marks = DEFAULT_MARKS) -> str:
    """Return the text after the last thought; empty if the response consists of an unfinished thought.

    A thought that is never closed reaches to the end of the response. If the response has channels (gpt-oss, with or
    without its special tokens), the answer is the final channel; empty if there is none.

    Args:
        response: a whole turn, from the text that opens its first thought.
        marks: the marks of thoughts.
    """
    text = _final_channel(response)
    start, end = answer_bounds(text, marks)
    return text[start:end]


def answer_bounds(text: str, marks: Marks = DEFAULT_MARKS) -> tuple[int, int]:
    """Return the positions where the answer begins and ends: after the last thought, and before an unfinished one."""
    end = len(text)
    for begin_mark, end_mark in marks:
        last_end = text.rfind(end_mark)
        unclosed = text.find(begin_mark, max(last_end, 0))
        if unclosed >= 0:
            end = min(end, unclosed)
    start = 0
    for _, end_mark in marks:
        position = text.rfind(end_mark, 0, end)
        if position >= 0:
            start = max(start, position + len(end_mark))
    return start, end


def _final_channel(text: str) -> str:
    """Return the content of the last final channel; ``text`` if it has no channels."""
    if _CHANNEL in text:
        finals = list(_FINAL_CHANNEL.finditer(text))
        if not finals:
            return ""
        return _CHANNEL_END.split(text[finals[-1].end() :], maxsplit=1)[0]
    if _BARE_FINAL in text:
        return text.rpartition(_BARE_FINAL)[2]
    if _BARE_CHANNEL.match(text):
        return ""
    return text


def open_thought(prompt_end: str, generation_prompt: str, marks: Marks = DEFAULT_MARKS) -> str:
    r"""Return the beginning of the thought that a prompt leaves open, from its mark to the prompt's end; else "".

    A message may mention a mark. So the mark must end the prompt, or be in the text that the template adds.

    Args:
        prompt_end: the end of the prompt, with special tokens.
        generation_prompt: the text that the chat template adds after the last message, for example
            ``<|im_start|>assistant\n<think>\n``; empty without a template.
        marks: the marks of thoughts.
    """
    if generation_prompt and prompt_end.endswith(generation_prompt):
        prompt_end = generation_prompt
        is_open = _leaves_open
    else:
        is_open = _ends_with
    for begin_mark, end_mark in (*marks, _CHANNELS):
        start = prompt_end.rfind(begin_mark)
        if start >= 0 and is_open(prompt_end[start:], begin_mark, end_mark):
            return prompt_end[start:]
    return ""


def _leaves_open(text: str, begin_mark: str, end_mark: str) -> bool:
    return end_mark not in text


def _ends_with(text: str, begin_mark: str, end_mark: str) -> bool:
    return text.rstrip() == begin_mark
