"""The tool calls in a turn of the policy, read by SGLang's parsers; the choice of the parser for a chat template."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_dppo.data.chat import ChatTemplateError, render
from megatron_dppo.data.records import DataError
from megatron_dppo.engine.tool_parsers import parser_names, sglang_parsers
from megatron_dppo.system.time_limit import interrupting_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

GPT_OSS = "gpt-oss"
DEFAULT_FORMAT = "hermes"
_PARSING_S = 2.0
"""Seconds of processor time for one turn. The parsers' patterns take cubic time for turns that repeat themselves."""
_FIRST_FORMATS = (
    *("hermes", "qwen3_coder", "glm45", "glm47", "minimax-m2", "deepseekv3", "deepseekv31"),
    *(GPT_OSS, "hunyuan", "kimi_k2", "mistral", "llama3"),
)
"""Formats that are tried before SGLang's other formats, because several formats may read the same call."""
_UNKNOWN_TOOLS = "SGLANG_FORWARD_UNKNOWN_TOOLS"
"""SGLang's variable for parsers that return calls of tools that the request does not define."""
_MOST_SHOWN = 200


@dataclass(frozen=True)
class ToolCall:
    """A call of the function ``name``."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ReadTurn:
    """A turn in the form of a message.

    Attributes:
        content: the text outside of the calls; empty if there are no calls.
        calls: the calls; empty if a call can't be read.
        is_unread: whether the turn has the beginning of a call, and not every call can be read.
    """

    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_unread: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """The format of a policy's tool calls.

    Attributes:
        name: SGLang's name of the parser.
        tokens: the added tokens of the policy's tokenizer. Some families have another suffix in their marks than the
            parser expects.
    """

    name: str
    tokens: tuple[str, ...] = field(default=(), repr=False)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ReadTurn:
        """Read the calls in the text of a turn, with its special tokens, after the turn's thoughts.

        ``tools``: the definitions of the functions, as in OpenAI's requests.
        """
        text = text.strip()
        if self.name == GPT_OSS:
            text = _in_sglang_order(text)
        definitions = [_as_object(tool) for tool in tools]
        parsers = sglang_parsers()
        earlier_value = os.environ.get(_UNKNOWN_TOOLS)
        os.environ[_UNKNOWN_TOOLS] = "true"
        try:
            with interrupting_limit(_PARSING_S):
                parser = parsers.FunctionCallParser(
                    definitions, self.name, tokenizer=_Vocabulary(self.tokens)
                )
                has_mark = parser.has_tool_call(text)
                content, items = parser.parse_non_stream(text)
            calls = tuple(ToolCall(_name_of(item), _object_of(item.parameters)) for item in items)
        # A parser may raise anything for the text of a policy.
        except Exception as error:
            log.debug("a tool call can't be read: %s", str(error)[:_MOST_SHOWN])
            return ReadTurn(is_unread=True)
        finally:
            os.environ.pop(_UNKNOWN_TOOLS)
            if earlier_value is not None:
                os.environ[_UNKNOWN_TOOLS] = earlier_value
        marks = text.count(_begin_mark(parser.detector)) if calls else int(has_mark)
        if marks > len(calls):
            return ReadTurn(is_unread=True)
        if not calls:
            return ReadTurn()
        return ReadTurn(content.strip(), calls)


def _begin_mark(detector: Any) -> str:
    """Return the text that begins one call, or the section of all calls."""
    mark = detector.bot_token or getattr(detector, "tool_call_start_token", "")
    # ``str.count`` counts the empty text at every position.
    return str(mark) or "\0"


class _Vocabulary:
    """The part of a tokenizer that SGLang's parsers read."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self._tokens)}


def _as_object(tool: Mapping[str, Any]) -> SimpleNamespace:
    """Return the definition of a tool with attributes in place of the keys, as SGLang's parsers read it."""
    function = tool["function"]
    return SimpleNamespace(
        type="function",
        function=SimpleNamespace(
            name=function["name"],
            description=function.get("description"),
            parameters=function.get("parameters"),
            strict=False,
        ),
    )


def _name_of(item: Any) -> str:
    if not isinstance(item.name, str) or not item.name:
        raise ValueError("a call without the name of a tool")
    return item.name


def _object_of(arguments: str) -> Mapping[str, Any]:
    """Decode the arguments of a call. Raises ValueError unless they are an object, JSON text of an object, or null."""
    value = json.loads(arguments) if arguments else {}
    if isinstance(value, str):
        value = json.loads(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"arguments: got {arguments[:_MOST_SHOWN]}, expected an object")
    return value


# gpt-oss may write the receiver of a call before or after the channel, and leave out the type. SGLang's parser reads
# only this order: <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{...}<|call|>
_ASSISTANT = "<|start|>assistant"
_RECEIVER_FIRST = re.compile(r"<\|start\|>assistant\s*to=([\w.-]+)<\|channel\|>commentary")
_RECEIVER = re.compile(
    r"<\|channel\|>commentary to=([\w.-]+)\s*(?:<\|constrain\|>)?(?:json|code)?<\|message\|>"
)
_CALL_END = "<|call|>"


def _in_sglang_order(text: str) -> str:
    if not text.startswith(_ASSISTANT):
        # The prompt ends with these tokens.
        text = _ASSISTANT + text
    text = _RECEIVER_FIRST.sub(r"<|start|>assistant<|channel|>commentary to=\1 ", text)
    text, calls = _RECEIVER.subn(r"<|channel|>commentary to=\1 <|constrain|>json<|message|>", text)
    # The token that ended the turn is no part of its text.
    if calls and not text.endswith(_CALL_END):
        text += _CALL_END
    return text


_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_sum",
        "description": "Add one.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
_PROBE_CALL = ToolCall("probe_sum", {"a": 3})
_PROBE_TEXT = "zqPROBEzq"
_QUESTION = {"role": "user", "content": "1"}


def written_call(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> str | None:
    """Return the text that the chat template writes for a turn with a call; None if it writes no calls."""
    call = {
        "id": "probe0001",
        "type": "function",
        "function": {"name": _PROBE_CALL.name, "arguments": dict(_PROBE_CALL.arguments)},
    }

    def rendered(turn: Mapping[str, Any]) -> str:
        return render(
            tokenizer,
            [_QUESTION, {"role": "assistant", **turn}],
            tools=[_PROBE_TOOL],
            arguments=arguments,
            add_generation_prompt=False,
        )

    # Some templates write a call only if the message has no content, others only if the content is text.
    for content in ("", None):
        try:
            with_call = rendered({"content": content, "tool_calls": [call]})
            with_text = rendered({"content": _PROBE_TEXT})
        except ChatTemplateError:
            continue
        start = 0
        for own, other in zip(with_call, with_text, strict=False):
            if own != other:
                break
            start += 1
        _, _, tail = with_text.partition(_PROBE_TEXT)
        text = with_call[start:].removesuffix(tail)
        if _PROBE_CALL.name in text:
            return text
    return None


def formats_that_read(text: str, tokens: Sequence[str] = ()) -> Iterator[str]:
    """Yield the names of the formats that read the probe's call in ``text``, the result of ``written_call``."""
    names = parser_names()
    for name in dict.fromkeys((*_FIRST_FORMATS, *names)):
        if name not in names:
            continue
        tool_format = ToolFormat(name, tuple(tokens))
        if tool_format.read(text, [_PROBE_TOOL]).calls == (_PROBE_CALL,):
            yield name


class ToolFormatError(DataError):
    """The configured tool format can't read the calls that the chat template writes."""


def tool_format_of(
    tokenizer: PreTrainedTokenizerBase,
    configured_format: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    key: str = "environment.options",
) -> str | None:
    """Return the format of the policy's calls: the first that reads the calls that the chat template writes.

    If the template writes no calls, for example because a history keeps the text of turns, the format can't be compared
    with the template: it is the configured one, or else ``DEFAULT_FORMAT``. None: no format reads the template's calls.

    Args:
        tokenizer: tokenizer with the chat template.
        configured_format: a format to use instead (``tool_format`` of the environment's options).
        arguments: variables of the template.
        key: key of the environment's options, for the error.

    Raises:
        ToolFormatError: the configured format does not read the template's calls.
    """
    text = written_call(tokenizer, arguments)
    if text is None:
        return configured_format or DEFAULT_FORMAT
    tokens = tuple(map(str, tokenizer.added_tokens_decoder.values()))
    fitting_formats = formats_that_read(text, tokens)
    if configured_format is not None:
        fitting_names = list(fitting_formats)
        if configured_format in fitting_names:
            return configured_format
        raise ToolFormatError(
            f"{key}.tool_format: got {configured_format!r}, which does not read the calls of the chat "
            f"template, {text[:_MOST_SHOWN]!r}; expected {' or '.join(fitting_names) or 'no environment with tools'}"
        )
    tool_format = next(fitting_formats, None)
    if tool_format is None:
        log.warning(
            "no tool format reads the calls of the chat template, %r: calls stay text",
            text[:_MOST_SHOWN],
        )
    return tool_format
