"""Rendering of messages by a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_dppo.system.time_limit import rendering_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
_LONGEST_REASON = 300


class ChatTemplateError(ValueError):
    """A chat template fails on messages, or its text can't be encoded."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] = (),
    arguments: Mapping[str, Any] | None = None,
    asks: bool = True,
) -> str:
    """The text that the chat template makes of ``messages``.

    Args:
        tokenizer: with the chat template.
        messages: with a role and content.
        tools: their definitions.
        arguments: further variables of the template (``data.chat_template_arguments``).
        asks: with the generation prompt, which asks for an answer.

    Arguments of a call of a tool are objects. A template that takes them only as text gets them as JSON text.

    Raises:
        ChatTemplateError: the template fails, or takes too long.
    """

    def rendering(chosen: Sequence[Message]) -> str:
        return _rendering(tokenizer, chosen, tools, arguments, asks)

    objects = _argument_objects(messages)
    if not objects:
        return rendering(messages)
    try:
        text = rendering(messages)
    except ChatTemplateError:
        return rendering(_with_argument_text(messages))
    # Python's own notation of an object is no JSON: the template writes its arguments as they are.
    if any(str(value) in text for value in objects):
        return rendering(_with_argument_text(messages))
    return text


def _rendering(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Message],
    arguments: Mapping[str, Any] | None,
    asks: bool,
) -> str:
    try:
        with rendering_limit():
            text: Any = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=asks,
                tokenize=False,
                **(arguments or {}),
            )
    # A template is a program: it may raise anything, or never end.
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise ChatTemplateError(f"{type(error).__name__}: {reason}") from error
    return str(text)


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The functions that a message calls, each with its name and arguments."""
    functions = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            functions.append(dict(function))
    return functions


def _argument_objects(messages: Sequence[Message]) -> list[Message]:
    """The arguments of calls that are objects and not empty."""
    found = [call.get("arguments") for message in messages for call in calls_of(message)]
    return [value for value in found if isinstance(value, Mapping) and value]


def _with_argument_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON text."""
    changed = []
    for message in messages:
        copy = dict(message)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_call_with_text(call) for call in copy["tool_calls"]]
        changed.append(copy)
    return changed


def _call_with_text(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_with_text(call["function"])}
    if isinstance(call.get("arguments"), Mapping):
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return call


# --- properties of a template that change prompts without a word

_PROBE = "zqPROBEzq"
_USER: Message = {"role": "user", "content": "3+5"}
_SYSTEM: Message = {"role": "system", "content": "4"}


def has_date(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> bool:
    """Whether the template writes the date of the day into prompts."""
    probed = {"strftime_now": lambda _: _PROBE, **(arguments or {})}
    for messages in ([_USER], [_SYSTEM, _USER]):
        try:
            if _PROBE in render(tokenizer, messages, arguments=probed):
                return True
        except ChatTemplateError:
            return False
    return False


def lacks_generation_prompt(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> bool:
    """Whether prompts end without the text that stands before what the assistant says.

    Some templates have no such text, as Mixtral's: a prompt of these lacks nothing.
    """
    answer = {"role": "assistant", "content": _PROBE}
    try:
        prompt = render(tokenizer, [_USER], arguments=arguments)
        unasked = render(tokenizer, [_USER], arguments=arguments, asks=False)
        answered = render(tokenizer, [_USER, answer], arguments=arguments, asks=False)
    except ChatTemplateError:
        return False
    before, mark, _ = answered.partition(_PROBE)
    if not mark or prompt != unasked or not before.startswith(prompt):
        return False
    return bool(before.removeprefix(prompt).strip())
