"""Encoding of chat renderings so that the text of messages is never read as control tokens.

A tokenizer reads the characters <|im_end|> as the token that ends a turn, even if a policy or an environment wrote them
into a message. The text of messages is therefore encoded in these steps:

1. ``hold`` replaces the control tokens in a message by marks of letters and digits.
2. The template renders the messages, and also writes control tokens.
3. ``encode`` makes a copy of the tokenizer with a secret name for each control token, and replaces the template's
   control tokens by these names.
4. ``encode`` replaces the marks by the characters of their tokens. The copy reads these characters as ordinary text.

In all other respects, the whole text is encoded by the tokenizer's own rules.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_dppo.data.chat import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ControlTokens:
    """Encodes renderings of a chat template, so that the text of messages is not read as control tokens.

    There are two sets of control tokens. ``special``: the tokenizer's special tokens. ``further``: added tokens of the
    tokenizer that are not special but are in the chat template, such as ``</tool_response>``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        special_names: set[str] = set()
        further_names: set[str] = set()
        for token in tokenizer.added_tokens_decoder.values():
            name = str(token)
            # Tokens such as <0x0A> stand for a byte of text, and are no control tokens.
            if _BYTE.fullmatch(name) or not name.strip():
                continue
            if token.special:
                special_names.add(name)
            elif name in template:
                further_names.add(name)
        self.special = frozenset(special_names)
        self.further = frozenset(further_names - special_names)
        self._nonce = secrets.token_hex(8)
        self._mark_of: dict[str, str] = {}
        self._name_of: dict[str, str] = {}
        for i, name in enumerate(sorted(self.special | self.further)):
            mark = f"Held{self._nonce}x{i}z"
            self._mark_of[name] = mark
            self._name_of[mark] = name
        self._mark_pattern = re.compile(f"Held{self._nonce}x[0-9]+z")

    def written_in(self, text: str) -> frozenset[str]:
        """The control tokens, ``special`` or ``further``, in ``text``."""
        pattern = _alternation(self._mark_of)
        if pattern is None:
            return frozenset()
        return frozenset(pattern.findall(text))

    def hold(self, value: Any, names: Collection[str]) -> Any:
        """Copy ``value``, text or JSON with text in it, and replace the tokens ``names`` by marks."""
        pattern = _alternation(names)
        if pattern is None:
            return value
        return self._held(value, pattern)

    def _held(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return _replaced(pattern, self._mark_of, value)
        if isinstance(value, Mapping):
            return {self._held(k, pattern): self._held(v, pattern) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._held(item, pattern) for item in value]
        return value

    def has_marks(self, text: str) -> bool:
        """Whether ``text`` has marks of ``hold``."""
        return self._mark_pattern.search(text) is not None

    def release(self, text: str) -> str:
        """Replace the marks in ``text`` by the characters of their tokens."""
        return _replaced(self._mark_pattern, self._name_of, text)

    def encode(self, text: str) -> list[int]:
        """Encode a rendering. Each mark is replaced by the characters of its token, read as plain text.

        Raises ChatTemplateError if the tokenizer cannot be made to read a control token as plain text.
        """
        if not self.has_marks(text):
            return self._original_ids(text)
        copy = self._copy
        # Check the copy with this text: tokenizer and copy must encode the rest of the text to the same ids.
        text_without_marks = self._mark_pattern.sub("", text)
        if copy.encode(text_without_marks) != self._original_ids(text_without_marks):
            raise ChatTemplateError(
                "the tokenizer encodes this text differently when its control tokens are renamed"
            )
        return copy.encode_renamed(self.release(copy.rename(text)))

    def _original_ids(self, text: str) -> list[int]:
        """Encode a text with the tokenizer itself."""
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)

    @cached_property
    def _copy(self) -> _RenamedTokenizer:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatTemplateError(
                f"a {type(self._tokenizer).__name__} can't read control tokens as plain text, expected a tokenizer.json"
            )
        return _RenamedTokenizer(backend.to_str(), self._mark_of, self._nonce)


class _RenamedTokenizer:
    """A copy of a tokenizer with secret names for the added tokens ``names``. It returns the original's ids.

    Args:
        state: The original's tokenizer.json.
        names: Names of the tokens to rename.
        nonce: Part of the secret names.
    """

    def __init__(self, state: str, names: Collection[str], nonce: str) -> None:
        # Import lazily: the import takes a fraction of a second, and most runs never need this copy.
        from tokenizers import Tokenizer

        self._secret_names = {name: f"<|{nonce}n{i}|>" for i, name in enumerate(sorted(names))}
        self._pattern = _alternation(names)
        settings = json.loads(state)
        # Remove these parts, because they may name tokens. They change whole sequences, not the encoding of text.
        settings |= {"post_processor": None, "truncation": None, "padding": None}
        for token in settings["added_tokens"]:
            token["content"] = self._new_name(token["content"])
        model = settings["model"]
        # The vocabulary may also list added tokens, and some models look up whole words in it. Rename the tokens here
        # too, so that these models don't find the old name of a control token in a message.
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._new_name(word): i for word, i in model["vocab"].items()}
        else:
            model["vocab"] = [[self._new_name(word), score] for word, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._new_name(model["unk_token"])
        self._tokenizer = Tokenizer.from_str(json.dumps(settings))
        # The library may number added tokens anew. Map their new ids to the original's ids.
        self._original_id: dict[int | None, int] = {}
        for token in settings["added_tokens"]:
            self._original_id[self._tokenizer.token_to_id(token["content"])] = token["id"]

    def _new_name(self, word: str) -> str:
        return self._secret_names.get(word, word)

    def rename(self, text: str) -> str:
        """Replace every control token in ``text`` by its secret name."""
        if self._pattern is None:
            return text
        return _replaced(self._pattern, self._secret_names, text)

    def encode_renamed(self, text: str) -> list[int]:
        """Encode a text whose control tokens have their secret names."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._original_id.get(i, i) for i in ids]

    def encode(self, text: str) -> list[int]:
        """Encode a text as the original does."""
        return self.encode_renamed(self.rename(text))


def _alternation(names: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of ``names``, the longest first; None without names."""
    longest_first = sorted(sorted(names), key=len, reverse=True)
    if longest_first:
        return re.compile("|".join(map(re.escape, longest_first)))
    return None


def _replaced(pattern: re.Pattern[str], replacements: Mapping[str, str], text: str) -> str:
    """Return ``text`` with each match of ``pattern`` replaced by its entry in ``replacements``."""

    def replacement(match: re.Match[str]) -> str:
        return replacements[match[0]]

    return pattern.sub(replacement, text)
