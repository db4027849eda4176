"""Rendering of messages by a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.errors import closest
from megatron_dppo.system.text import single_line
from megatron_dppo.system.time_limit import cpu_time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
RENDERING_S = 10.0
"""Seconds of processor time for one rendering of a chat template; a long conversation takes milliseconds."""


class ChatTemplateError(ValueError):
    """A chat template fails for messages, or its text cannot be encoded."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] = (),
    arguments: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Render ``messages`` with the chat template.

    In ``messages``, the arguments of a tool call are objects. Some templates expect them as JSON text instead: if a
    template fails with the objects, or writes them in Python's notation, it gets JSON text.

    Args:
        tokenizer: The tokenizer with the chat template.
        messages: Messages with a role and content.
        tools: Definitions of tools.
        arguments: Further variables of the template (``data.chat_template_arguments``).
        add_generation_prompt: Whether to add the generation prompt.

    Raises:
        ChatTemplateError: The template fails, or takes too long.
    """

    def rendered(variant: Sequence[Message]) -> str:
        return _apply_template(tokenizer, variant, tools, arguments, add_generation_prompt)

    argument_objects = _argument_objects(messages)
    if not argument_objects:
        return rendered(messages)
    try:
        text = rendered(messages)
    except ChatTemplateError:
        return rendered(_with_argument_text(messages))
    # ``str`` writes an object in Python's notation.
    if any(str(argument_object) in text for argument_object in argument_objects):
        return rendered(_with_argument_text(messages))
    return text


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Message],
    arguments: Mapping[str, Any] | None,
    add_generation_prompt: bool,
) -> str:
    try:
        with cpu_time_limit(RENDERING_S):
            text: Any = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(arguments or {}),
            )
    # A template is a program: it may raise any exception, or never end.
    except Exception as error:
        reason = single_line(error)
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
"""A text that no template contains."""
_USER: Message = {"role": "user", "content": "3+5"}
_SYSTEM: Message = {"role": "system", "content": "4"}


def has_date(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> bool:
    """Whether the template writes the current date into prompts."""
    # Templates get the date from the function strftime_now. ``_probe_date`` replaces it.
    probe_arguments = {"strftime_now": _probe_date, **(arguments or {})}
    for messages in ([_USER], [_SYSTEM, _USER]):
        try:
            if _PROBE in render(tokenizer, messages, arguments=probe_arguments):
                return True
        except ChatTemplateError:
            return False
    return False


def _probe_date(_format: str) -> str:
    return _PROBE


def generation_prompt(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> str:
    r"""Return the text that the template adds after the last message, for example ``<|im_start|>assistant\n<think>\n``.

    Empty if the template adds no text, or can't render a message of the user.
    """
    try:
        prompt = render(tokenizer, [_USER], arguments=arguments)
        bare_prompt = render(tokenizer, [_USER], arguments=arguments, add_generation_prompt=False)
    except ChatTemplateError:
        return ""
    if not prompt.startswith(bare_prompt):
        return ""
    return prompt.removeprefix(bare_prompt)


def lacks_generation_prompt(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> bool:
    """Whether prompts lack, at their end, the text that the template writes before a message of the assistant.

    Some templates, for instance Mixtral's, write no text before an answer, so their prompts lack nothing.
    """
    answer = {"role": "assistant", "content": _PROBE}
    try:
        prompt = render(tokenizer, [_USER], arguments=arguments)
        bare_prompt = render(tokenizer, [_USER], arguments=arguments, add_generation_prompt=False)
        conversation = render(
            tokenizer, [_USER, answer], arguments=arguments, add_generation_prompt=False
        )
    except ChatTemplateError:
        return False
    text_before_answer, probe, _ = conversation.partition(_PROBE)
    has_generation_prompt = prompt != bare_prompt
    if has_generation_prompt or not probe or not text_before_answer.startswith(prompt):
        return False
    missing_text = text_before_answer.removeprefix(prompt)
    return bool(missing_text.strip())


def unread_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the arguments that the template does not mention, each with similar names in the template.

    Templates ignore variables that they do not read.
    """
    # Import lazily: only a template needs the library.
    from jinja2 import Environment

    templates = tokenizer.chat_template or ""
    if isinstance(templates, Mapping):
        templates = "\n".join(map(str, templates.values()))
    names: set[str] = set()
    # The lexer also reads templates with tags that only transformers knows.
    for _, kind, word in Environment().lex(str(templates)):
        if kind == "name":
            names.add(word)
    unread = sorted(arguments.keys() - names)
    return {name: closest(name, sorted(names), 3) for name in unread}
