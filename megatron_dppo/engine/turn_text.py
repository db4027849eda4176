"""The text of a response in the forms that rewards and environments read: whole, with special tokens, the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megatron_dppo.data.chat import generation_prompt
from megatron_dppo.data.thoughts import DEFAULT_MARKS, Marks, TurnText, answer_part, open_thought
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.server.continuation import Decode, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPT_END = 64
"""Number of tokens at the end of a prompt that are searched for the mark of an open thought."""


@dataclass(frozen=True)
class ResponseReader:
    """Reads the text of sampled turns.

    Attributes:
        decode: the tokenizer's decoder.
        special_tokens: the tokenizer's special tokens, by id.
        generation_prompt: as in ``open_thought``.
        marks: the marks of thoughts.
    """

    decode: Decode
    special_tokens: Mapping[int, str]
    generation_prompt: str = ""
    marks: Marks = DEFAULT_MARKS

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        decode: Decode,
        *,
        is_chat: bool,
        arguments: Mapping[str, Any],
        marks: Marks,
    ) -> Self:
        """Build the reader of a tokenizer. ``is_chat``: whether prompts are rendered by its chat template."""
        special_tokens: dict[int, str] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                special_tokens[token_id] = str(token)
        prompt_end = generation_prompt(tokenizer, arguments) if is_chat else ""
        return cls(decode, special_tokens, prompt_end, marks)

    def text_of(self, response: Trajectory, stop: Sequence[str] = ()) -> TurnText:
        """Return the text of a response that the rewards score. ``stop``: as for ``read``."""
        return response.scored_text or self.read(response, stop)

    def read(self, turn: Trajectory, stop: Sequence[str] = ()) -> TurnText:
        """Return the text of the one turn of a trajectory. ``stop``: the texts that end a turn."""
        text = turn.text or text_of(turn, stop, self.decode)
        special_text = text
        sampled_ids = turn.response_ids
        if not turn.truncated:
            # The last token ended the turn.
            sampled_ids = sampled_ids[:-1]
        # Most turns have no special token. Do not decode them again, because that takes time.
        if np.isin(sampled_ids, list(self.special_tokens)).any():
            special_text = text_of(turn, stop, self.decode, special=True)
        thought = self.open_thought(turn.prompt_ids)
        return TurnText(text, special_text, thought, self._answer(thought + special_text))

    def open_thought(self, prompt_ids: Sequence[int] | np.ndarray) -> str:
        """Return the end of a prompt, from the mark of a thought that the prompt leaves open; empty without one."""
        prompt_end = self.decode(prompt_ids[-_PROMPT_END:], special=True)
        return open_thought(prompt_end, self.generation_prompt, self.marks)

    def plain(self, text: str) -> TurnText:
        """Return the forms of a text that is not a sampled turn, for example the result of an agent."""
        return TurnText.plain(text, self.marks)

    def _answer(self, turn_text: str) -> str:
        answer = answer_part(turn_text, self.marks)
        for token in self.special_tokens.values():
            answer = answer.replace(token, "")
        return answer
