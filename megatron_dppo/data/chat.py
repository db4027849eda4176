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
    """A chat template fails for messages, or its text cannot be encoded."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] = (),
    arguments: Mapping[str, Any] | None = None,
    asks: bool = True,
) -> str:
    """Render ``messages`` with the chat template.

    Arguments of a tool call are objects. A template that takes them only as text gets them as JSON text.

    Args:
        tokenizer: The tokenizer with the chat template.
        messages: Messages with a role and content.
        tools: Definitions of tools.
        arguments: Further variables of the template (``data.chat_template_arguments``).
        asks: Whether to add the generation prompt.

    Raises:
        ChatTemplateError: The template fails, or takes too long.
    """

    def rendered(variant: Sequence[Message]) -> str:
        return _apply_template(tokenizer, variant, tools, arguments, asks)

    objects = _argument_objects(messages)
    if not objects:
        return rendered(messages)
    try:
        text = rendered(messages)
    except ChatTemplateError:
        return rendered(_with_argument_text(messages))
    # If the text has Python's own notation of an object, the template writes arguments unchanged and needs JSON text.
    if any(str(value) in text for value in objects):
        return rendered(_with_argument_text(messages))
    return text


def _apply_template(
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
    # A template is a program: it may raise any exception, or never end.
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise ChatTemplateError(f"{type(error).__name__}: {reason}") from error
    return str(text)


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The functions that a message calls, with name and arguments."""
    functions = []
    for call in message.get("tool_calls") or ():
        function = None
        if isinstance(call, Mapping):
            function = call.get("function", call)
        if isinstance(function, Mapping):
            functions.append(dict(function))
    return functions


def _argument_objects(messages: Sequence[Message]) -> list[Message]:
    """The arguments of tool calls that are objects and not empty."""
    objects: list[Message] = []
    for message in messages:
        for call in calls_of(message):
            arguments = call.get("arguments")
            if isinstance(arguments, Mapping) and arguments:
                objects.append(arguments)
    return objects


def _with_argument_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copy the messages, with the arguments of tool calls as JSON text."""
    copies = []
    for message in messages:
        copy = dict(message)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_call_with_text(call) for call in copy["tool_calls"]]
        copies.append(copy)
    return copies


def _call_with_text(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_with_text(call["function"])}
    if isinstance(call.get("arguments"), Mapping):
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return call


_PROBE = "zqPROBEzq"
_USER: Message = {"role": "user", "content": "3+5"}
_SYSTEM: Message = {"role": "system", "content": "4"}


def has_date(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> bool:
    """Whether the template writes the current date into prompts."""
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
    """Whether prompts end without the text that the template writes before a message of the assistant.

    Some templates, such as Mixtral's, have no such text, and their prompts lack nothing.
    """
    answer = {"role": "assistant", "content": _PROBE}
    try:
        prompt = render(tokenizer, [_USER], arguments=arguments)
        unasked = render(tokenizer, [_USER], arguments=arguments, asks=False)
        answered = render(tokenizer, [_USER, answer], arguments=arguments, asks=False)
    except ChatTemplateError:
        return False
    prefix, probe, _ = answered.partition(_PROBE)
    if not probe or prompt != unasked or not prefix.startswith(prompt):
        return False
    return bool(prefix.removeprefix(prompt).strip())
