"""Data sets: problems with answers, and prompt-response pairs; tokenised.

From JSON Lines, Parquet or Arrow files, one record a problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dppo.data.json_lines import DataError, keys, shorten, value_at
from megatron_dppo.data.prompts import (
    Prompt,
    PromptForm,
    short_enough,
    text_of,
    tokenise,
)
from megatron_dppo.data.records import is_columnar, read_records
from megatron_dppo.rewards.gold import holds_answer
from megatron_dppo.types import Problem

PROMPT_KEYS = ("prompt", "problem", "question")
"""Keys of the prompt; the first one that a record has is used."""
Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its response, which ends with the end-of-sequence token."""


@dataclass(frozen=True)
class DataKeys:
    """Keys of a record's prompt and answer, ``a.b`` for a field of a structure.

    None: the usual ones (``load_problems``).
    """

    prompt: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one file, or of several in a row, in the files' order.

    Attributes:
        problems: with prompts within the length limit.
        dropped: number of problems with longer prompts, which are left out.
        sha256: of the file's bytes; a resumed run compares it.
        records: number of records in the file, with those left out.
        bad_answers: number of problems left out because no response could match their answer.
        unit: what a record is called in messages, ``line`` or ``row``.
    """

    problems: tuple[Problem, ...]
    dropped: int
    sha256: str
    records: int
    bad_answers: int = 0
    unit: str = "line"

    def place(self, problem_id: int) -> str:
        """Where the problem stands in its file, in words."""
        return f"{self.unit} {problem_id + 1}"

    def __len__(self) -> int:
        return len(self.problems)


def read_problems(
    path: str | Path, keys_of: DataKeys = DataKeys()
) -> tuple[list[Prompt], list[str], list[str], str]:
    """The prompts of a file, its answers, the place of each in words, and the file's SHA-256.

    What is accepted: ``load_problems``. Raises DataError for a record that is not a problem.
    """
    records, places, sha256 = read_records(Path(path))
    located = list(zip(records, places, strict=True))
    prompts = [_prompt(record, where, keys_of.prompt) for record, where in located]
    answers = [_answer(record, where, keys_of.answer) for record, where in located]
    return prompts, answers, places, sha256


def load_problems(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    form: PromptForm,
    keys_of: DataKeys = DataKeys(),
) -> ProblemSet:
    """Read and tokenise problems: one record for each, with a prompt and an answer.

    The prompt is text or a list of chat messages (``{"role": ..., "content": ...}``) under
    ``prompt``, ``problem`` or ``question``. The answer is text or a number under ``answer``, or
    under ``reward_model.ground_truth`` as in DAPO-Math, or a ``solution`` with ``####`` or
    ``\\boxed``. ``problem_id`` counts all problems of the file from 0, dropped ones included, so the
    line is one more. In JSON Lines a byte-order mark and blank lines at the end are ignored.

    Args:
        path: of the file.
        tokenizer: for the prompts.
        max_prompt_tokens: problems with longer prompts are dropped.
        form: how the problems are put to the model.
        keys_of: where the prompt and the answer are, instead of the keys above.

    Raises:
        DataError: a record is not a problem, or no problem is within the limit.
    """
    prompts, answers, places, sha256 = read_problems(path, keys_of)
    short = short_enough(tokenizer, prompts, max_prompt_tokens)
    prompt_ids = tokenise(tokenizer, [prompts[i] for i in short], form, [places[i] for i in short])
    kept = tuple(
        Problem(i, text_of(prompts[i]), answers[i], ids)
        for i, ids in zip(short, prompt_ids, strict=True)
        if len(ids) <= max_prompt_tokens
    )
    if not kept:
        raise DataError(
            f"{path}: all {len(prompts)} prompts are longer than "
            f"max_prompt_tokens={max_prompt_tokens}"
        )
    unit = "row" if is_columnar(Path(path)) else "line"
    return ProblemSet(kept, len(prompts) - len(kept), sha256, len(prompts), unit=unit)


def load_pairs(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool
) -> list[Pair]:
    """Read and tokenise prompt-response pairs for supervised learning: one record for each.

    Prompts as in ``load_problems``. The response is text under ``response``; the end-of-sequence
    token is appended to its ids. Raises DataError for a record that is not such a pair.
    """
    records, places, _ = read_records(Path(path))
    prompts = [_prompt(record, where) for record, where in zip(records, places, strict=True)]
    responses = [_response(record, where) for record, where in zip(records, places, strict=True)]
    if tokenizer.eos_token_id is None:
        raise DataError(f"{path}: the tokenizer has no end-of-sequence token to end responses with")
    prompt_ids = tokenise(tokenizer, prompts, PromptForm(apply_chat_template), places)
    response_ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
    return [
        (prompt, (*response, tokenizer.eos_token_id))
        for prompt, response in zip(prompt_ids, response_ids, strict=True)
    ]


def _prompt(record: Mapping[str, Any], where: str, key: str | None = None) -> Prompt:
    if key is not None:
        prompt = _mapped(record, key, where)
    else:
        key = next((key for key in PROMPT_KEYS if key in record), None)
        if key is None:
            expected = ", ".join(PROMPT_KEYS)
            raise DataError(f"{where}: no prompt; expected one of {expected}, found {keys(record)}")
        prompt = record[key]
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(m) for m in prompt):
        return prompt
    raise DataError(
        f"{where}: {key!r} is {shorten(prompt)}, expected text or a list of chat messages "
        "with a role and a content"
    )


def _mapped(record: Mapping[str, Any], key: str, where: str) -> Any:
    """The value under a key that the recipe names. Raises DataError where there is none."""
    value = value_at(record, key)
    if value is None:
        raise DataError(f"{where}: no {key!r}, found {keys(record)}")
    return value


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) and message[key] for key in ("role", "content")
    )


def _answer(record: Mapping[str, Any], where: str, key: str | None = None) -> str:
    if key is not None:
        answer = _mapped(record, key, where)
    else:
        key = _answer_key(record, where)
        answer = value_at(record, key)
    if _is_number(answer):
        answer = str(int(answer) if answer == int(answer) else answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{where}: {key!r} is {shorten(answer)}, expected text or a number")
    return answer


def _answer_key(record: Mapping[str, Any], where: str) -> str:
    if "answer" in record:
        return "answer"
    if isinstance(record.get("reward_model"), dict):
        return "reward_model.ground_truth"
    solution = record.get("solution")
    if isinstance(solution, str) and holds_answer(solution):
        return "solution"
    raise DataError(
        f"{where}: no answer; expected 'answer', 'reward_model.ground_truth', or a 'solution' "
        f"with #### or \\boxed, found {keys(record)}"
    )


def _response(record: Mapping[str, Any], where: str) -> str:
    if "response" not in record:
        raise DataError(f"{where}: no response; expected 'response', found {keys(record)}")
    response = record["response"]
    if not isinstance(response, str) or not response.strip():
        raise DataError(f"{where}: 'response' is {shorten(response)}, expected text")
    return response


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
