"""Messages through a tokenizer's chat template: its arguments, and text that stays text whatever it holds."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
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


# --- text that may hold the text of a control token
#
# A tokenizer reads the characters <|im_end|> as the token that ends a turn, whoever wrote them. So the control tokens
# of a message are replaced by marks of letters and digits before the template renders it. A rendering with marks is
# encoded by a copy of the tokenizer that knows each control token under a secret name: the template's own ones get that
# name, and the marks are replaced by the characters that they stand for, which the copy reads as any other text. All
# other rules of the tokenizer hold for the whole text, at the joints too.

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ControlTokens:
    """Encodes the renderings of a chat template, and keeps the text of messages from being read as control tokens.

    ``special``: the tokenizer's special tokens. ``further``: its other added tokens that the chat template writes, such
    as ``</tool_response>``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        # Tokens of single bytes are content: they are no control tokens.
        words = [token for token in added if not _BYTE.fullmatch(str(token)) and str(token).strip()]
        self.special = frozenset(str(token) for token in words if token.special)
        template = str(tokenizer.chat_template)
        written = frozenset(str(token) for token in words if str(token) in template)
        self.further = written - self.special
        self._nonce = secrets.token_hex(8)
        names = sorted(self.special | self.further)
        self._marks = {name: f"Held{self._nonce}x{i}z" for i, name in enumerate(names)}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._mark = re.compile(f"Held{self._nonce}x[0-9]+z")

    def written_in(self, text: str) -> frozenset[str]:
        """The control tokens, ``special`` or ``further``, that ``text`` has."""
        pattern = _alternation(self._marks)
        return frozenset() if pattern is None else frozenset(pattern.findall(text))

    def hold(self, value: Any, names: Collection[str]) -> Any:
        """A copy of ``value``, text or JSON with text in it, that has marks in place of the tokens ``names``."""
        pattern = _alternation(names)
        return value if pattern is None else self._held(value, pattern)

    def _held(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, Mapping):
            return {self._held(k, pattern): self._held(v, pattern) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._held(inner, pattern) for inner in value]
        return value

    def has_marks(self, text: str) -> bool:
        """Whether ``hold`` replaced something in it."""
        return self._mark.search(text) is not None

    def release(self, text: str) -> str:
        """``text`` with the tokens' characters in place of their marks."""
        return self._mark.sub(lambda match: self._names[match[0]], text)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendering; what is held in it becomes the tokens of its characters.

        Raises ChatTemplateError where the tokenizer can't be made to read a control token as plain text.
        """
        if not self.has_marks(text):
            return self._usual(text)
        copy = self._copy
        without = self._mark.sub("", text)
        if copy.encode(without) != self._usual(without):
            raise ChatTemplateError(
                "the tokenizer reads control tokens otherwise under other names"
            )
        named = copy.named(text)
        return copy.encoded(self.release(named))

    def _usual(self, text: str) -> list[int]:
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)

    @cached_property
    def _copy(self) -> _RenamedTokenizer:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatTemplateError(
                f"a {type(self._tokenizer).__name__} can't read control tokens as plain text, expected a tokenizer.json"
            )
        return _RenamedTokenizer(backend.to_str(), self._marks, self._nonce)


class _RenamedTokenizer:
    """A tokenizer whose added tokens ``names`` have secret names; the ids are those of the original.

    Args:
        state: the original as its tokenizer.json.
        names: of the tokens.
        nonce: part of the secret names.
    """

    def __init__(self, state: str, names: Collection[str], nonce: str) -> None:
        # Importing tokenizers takes a part of a second, and most runs never need this copy.
        from tokenizers import Tokenizer

        self._secret = {name: f"<|{nonce}n{i}|>" for i, name in enumerate(sorted(names))}
        self._pattern = _alternation(names)
        tree = json.loads(state) | {"post_processor": None, "truncation": None, "padding": None}
        for token in tree["added_tokens"]:
            token["content"] = self._renamed(token["content"])
        model = tree["model"]
        # Some models look whole words up in their vocabulary, where an added token may be listed too.
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._renamed(word): i for word, i in model["vocab"].items()}
        else:
            model["vocab"] = [[self._renamed(word), score] for word, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._renamed(model["unk_token"])
        self._tokenizer = Tokenizer.from_str(json.dumps(tree))
        self._ids = {
            self._tokenizer.token_to_id(token["content"]): token["id"]
            for token in tree["added_tokens"]
        }

    def _renamed(self, word: str) -> str:
        return self._secret.get(word, word)

    def named(self, text: str) -> str:
        """``text`` with the secret name of every token in it."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._secret[match[0]], text)

    def encoded(self, text: str) -> list[int]:
        """The ids of a text that has the secret names where it means control tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._ids.get(i, i) for i in ids]

    def encode(self, text: str) -> list[int]:
        """The ids of a text as the original reads it."""
        return self.encoded(self.named(text))


def _alternation(names: Collection[str]) -> re.Pattern[str] | None:
    """Compile a pattern that finds each of ``names``, the longest first; None without names."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
