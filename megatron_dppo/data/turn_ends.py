"""The end of the assistant's turn: the token that the chat template writes, and the tokens that end a response."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_dppo.data.chat import ChatTemplateError, render
from megatron_dppo.data.records import DataError
from megatron_dppo.model.families import language_model_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SOURCES = ("config.json", "generation_config.json")
_SGLANG_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens that end a response in every server of SGLang 0.5.23."""
_TURN = "zqTURNzq"
"""The text of a turn. No template contains it."""
_QUESTION = {"role": "user", "content": "3+5"}
_ANSWER = {"role": "assistant", "content": _TURN}
_MAX_SHOWN = 40


@dataclass(frozen=True)
class ResponseEnds:
    """The tokens and texts that end a response in a server.

    Attributes:
        tokens: each token's id, with the places that name it.
        texts: stop texts (``rollout.stop``).
    """

    tokens: Mapping[int, Sequence[str]]
    texts: Sequence[str] = field(default=())

    @classmethod
    def of(
        cls,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Collection[int] = (),
        stop: Sequence[str] = (),
    ) -> Self:
        """Return the ends for the model in ``folder``, and for the run's own stop tokens and stop texts.

        A server reads ``eos_token_id``, a number or a list, of config.json and generation_config.json, and the
        tokenizer's token. Raises DataError for another value in a file.
        """
        places: dict[int, list[str]] = {}

        def add(ids: Any, place: str) -> None:
            for token in _listed(ids):
                places.setdefault(token, []).append(place)

        for name in _SOURCES:
            ids = model_values(folder, name).get("eos_token_id")
            if not all(map(_is_token_id, _listed(ids))):
                raise DataError(
                    f"{Path(folder) / name}: eos_token_id is {ids!r}, expected a token's id or a list of ids"
                )
            add(ids, name)
        add(tokenizer.eos_token_id, "the tokenizer")
        added_tokens = tokenizer.get_added_vocab()
        add([added_tokens[text] for text in _SGLANG_ENDS if text in added_tokens], "SGLang")
        add(list(stop_token_ids), "rollout.stop_token_ids")
        return cls(places, tuple(stop))

    def described(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Describe the ends in words."""
        parts: list[str] = []
        for token, places in self.tokens.items():
            parts.append(f"{_name(tokenizer, token)} ({', '.join(places)})")
        parts += [f"the text {text!r} (rollout.stop)" for text in self.texts]
        return " or ".join(parts) or "no token"


def _listed(ids: Any) -> Sequence[Any]:
    """Return one id, a list of ids, or None as a list."""
    if ids is None:
        return []
    return ids if isinstance(ids, list | tuple) else [ids]


def _is_token_id(value: Any) -> bool:
    """Whether ``value`` can be the id of a token: a whole number of 31 bits."""
    return type(value) is int and 0 <= value < 1 << 31


def turn_end_warnings(
    tokenizer: PreTrainedTokenizerBase,
    ends: ResponseEnds,
    arguments: Mapping[str, Any],
    embedding_rows: int | None = None,
) -> Iterator[str]:
    """Yield warnings if the text that the template writes after the assistant's turn does not end a response once.

    The policy learned to end its turns as the template does. Args: ``arguments``: variables of the template;
    ``embedding_rows``: rows of the model's embedding; None if unknown.
    """
    try:
        end_text = _text_after(tokenizer, [_QUESTION, _ANSWER], arguments)
        if not end_text.strip():
            # The first token of the next turn ends the turn, as in GLM's templates.
            end_text = _text_after(tokenizer, [_QUESTION, _ANSWER, _QUESTION], arguments)
            end_text = end_text.partition(_QUESTION["content"])[0]
    except ChatTemplateError:
        # Other checks report a template that fails for a conversation.
        return
    end_text = end_text.strip()
    ids: list[int] = tokenizer(end_text, add_special_tokens=False)["input_ids"]
    if not ids or any(text in end_text for text in ends.texts):
        return
    token = ids[0]
    added_tokens = tokenizer.added_tokens_decoder
    responses_end = f"a response ends at {ends.described(tokenizer)}"
    if embedding_rows is not None and token >= embedding_rows:
        yield (
            f"the chat template ends the assistant's turn with {_name(tokenizer, token)}, which has no row in the "
            f"model's embedding of {embedding_rows} rows, so the policy can't sample it; {responses_end}"
        )
    elif token not in ends.tokens and token in added_tokens:
        yield (
            f"the chat template ends the assistant's turn with {_name(tokenizer, token)}, which stops nothing: "
            f"{responses_end}, and is cut off at the length limit without it. Add {token} to rollout.stop_token_ids, "
            "or to eos_token_id in the model's generation_config.json"
        )
    elif token not in ends.tokens and _is_mark(end_text):
        yield (
            f"the chat template ends the assistant's turn with the text {end_text[:_MAX_SHOWN]!r}, which is "
            f"{len(ids)} tokens and stops nothing: {responses_end}. Add the text to rollout.stop, or give the model "
            "the tokenizer that has it as one token"
        )
    if len(ids) > 1 and token in ends.tokens and ids[1] in ends.tokens:
        yield (
            f"the chat template ends the assistant's turn twice, with {_name(tokenizer, token)} and then "
            f"{_name(tokenizer, ids[1])}; the policy's own turns end once"
        )


def prompt_end_warnings(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Yield warnings if prompts begin with two tokens of the beginning, or end with the end of the text."""
    begin = tokenizer.bos_token_id
    end = tokenizer.eos_token_id
    doubled = sum(1 for ids in prompt_ids if begin is not None and list(ids[:2]) == [begin, begin])
    ended = sum(1 for ids in prompt_ids if end is not None and ids[-1] == end)
    if doubled:
        yield (
            f"{doubled:,} of {len(prompt_ids):,} prompts begin with {_name(tokenizer, begin)} twice: the text has it, "
            "and the tokenizer or the chat template adds it; take it out of the text"
        )
    if ended:
        yield (
            f"{ended:,} of {len(prompt_ids):,} prompts end with {_name(tokenizer, end)}, the end of a text, so the "
            "model answers a text that has ended; expected prompts without it, from text, template and tokenizer"
        )


def _text_after(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
) -> str:
    """Return the text that the template writes after the assistant's turn; empty if it alters the turn."""
    text = render(tokenizer, messages, arguments=arguments, add_generation_prompt=False)
    return text.partition(_TURN)[2]


def _is_mark(text: str) -> bool:
    """Whether the text looks like a mark, and not like words of a template for base models."""
    return text.startswith(("<", "[")) or text.endswith((">", "]"))


def _name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})"


def model_values(folder: str | Path, name: str = "config.json") -> Mapping[str, Any]:
    """Return the values of a model's JSON file, those of the language model among them; empty if it can't be read."""
    try:
        values = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {**values, **language_model_values(values)}
