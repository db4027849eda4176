"""Data sets in JSON Lines: problems with answers, and prompt-response pairs; tokenised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_dppo.data.json_lines import DataError, keys, read_records, shorten
from megatron_dppo.types import Problem

PROMPT_KEYS = ("prompt", "problem", "question")
"""Keys of the prompt; the first one that a line has is used."""
Prompt = str | list[dict[str, str]]
"""Text, or chat messages."""
Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its response, which ends with the end-of-sequence token."""


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one file, in the file's order.

    Attributes:
        problems: with prompts within the length limit.
        dropped: number of problems with longer prompts, which are left out.
        sha256: of the file's bytes; a resumed run compares it.
        bad_answers: number of problems left out because no response could match their answer.
    """

    problems: tuple[Problem, ...]
    dropped: int
    sha256: str
    bad_answers: int = 0

    def __len__(self) -> int:
        return len(self.problems)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``folder`` (local files only). Raises DataError if there is none."""
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise DataError(f"{folder}: no tokenizer here, expected a tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    # Whatever a damaged file makes of the libraries: tokenizers raises bare Exceptions.
    except Exception as error:
        raise DataError(f"{folder}: its tokenizer can't be loaded: {_named(error)}") from error


def load_problems(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    apply_chat_template: bool,
) -> ProblemSet:
    """Read and tokenise problems: one JSON object for each line, with a prompt and an answer.

    The prompt is text or a list of chat messages (``{"role": ..., "content": ...}``) under
    ``prompt``, ``problem`` or ``question``. The answer is text or a number under ``answer``, or
    under ``reward_model.ground_truth`` as in DAPO-Math, or a ``solution`` with ``####`` or
    ``\\boxed``. ``problem_id`` counts all problems of the file from 0, dropped ones included, so the
    line is one more. A byte-order mark and blank lines at the end are ignored.

    Args:
        path: of the file.
        tokenizer: for the prompts.
        max_prompt_tokens: problems with longer prompts are dropped.
        apply_chat_template: send text prompts through the chat template, as one user message;
            chat messages always go through it.

    Raises:
        DataError: a line is not a problem, or no problem is within the limit.
    """
    records, places, sha256 = read_records(Path(path))
    prompts = [_prompt(record, where) for record, where in zip(records, places, strict=True)]
    answers = [_answer(record, where) for record, where in zip(records, places, strict=True)]
    short = _short_enough(tokenizer, prompts, max_prompt_tokens)
    prompt_ids = _tokenise(
        tokenizer,
        [prompts[i] for i in short],
        apply_chat_template,
        [places[i] for i in short],
    )
    kept = tuple(
        Problem(i, _text_of(prompts[i]), answers[i], ids)
        for i, ids in zip(short, prompt_ids, strict=True)
        if len(ids) <= max_prompt_tokens
    )
    if not kept:
        raise DataError(
            f"{path}: all {len(prompts)} prompts are longer than "
            f"max_prompt_tokens={max_prompt_tokens}"
        )
    return ProblemSet(kept, len(prompts) - len(kept), sha256)


def load_pairs(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool
) -> list[Pair]:
    """Read and tokenise prompt-response pairs for supervised learning: one JSON object per line.

    Prompts as in ``load_problems``. The response is text under ``response``; the end-of-sequence
    token is appended to its ids. Raises DataError for a line that is not such a pair.
    """
    records, places, _ = read_records(Path(path))
    prompts = [_prompt(record, where) for record, where in zip(records, places, strict=True)]
    responses = [_response(record, where) for record, where in zip(records, places, strict=True)]
    if tokenizer.eos_token_id is None:
        raise DataError(f"{path}: the tokenizer has no end-of-sequence token to end responses with")
    prompt_ids = _tokenise(tokenizer, prompts, apply_chat_template, places)
    response_ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
    return [
        (prompt, (*response, tokenizer.eos_token_id))
        for prompt, response in zip(prompt_ids, response_ids, strict=True)
    ]


def _prompt(record: Mapping[str, Any], where: str) -> Prompt:
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


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) and message[key] for key in ("role", "content")
    )


def _answer(record: Mapping[str, Any], where: str) -> str:
    if "answer" in record:
        key, answer = "answer", record["answer"]
    elif isinstance(record.get("reward_model"), dict):
        key, answer = "reward_model.ground_truth", record["reward_model"].get("ground_truth")
    elif _holds_answer(record.get("solution")):
        key, answer = "solution", record["solution"]
    else:
        raise DataError(
            f"{where}: no answer; expected 'answer', 'reward_model.ground_truth', or a 'solution' "
            f"with #### or \\boxed, found {keys(record)}"
        )
    if _is_number(answer):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{where}: {key!r} is {shorten(answer)}, expected text or a number")
    return answer


def _response(record: Mapping[str, Any], where: str) -> str:
    if "response" not in record:
        raise DataError(f"{where}: no response; expected 'response', found {keys(record)}")
    response = record["response"]
    if not isinstance(response, str) or not response.strip():
        raise DataError(f"{where}: 'response' is {shorten(response)}, expected text")
    return response


def _tokenise(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    apply_chat_template: bool,
    places: Sequence[str],
) -> list[tuple[int, ...]]:
    """Token ids of every prompt. Special tokens: the chat template's, or for plain text the
    tokenizer's.
    """
    templated = [apply_chat_template or not isinstance(prompt, str) for prompt in prompts]
    if tokenizer.chat_template is None and True in templated:
        raise DataError(
            f"{places[templated.index(True)]}: the prompt needs a chat template and the tokenizer "
            "has none; set data.apply_chat_template to false for plain-text prompts"
        )
    prompt_ids: list[tuple[int, ...]] = [()] * len(prompts)
    for with_template in (False, True):
        chosen = [i for i, flag in enumerate(templated) if flag == with_template]
        texts = [
            _render(tokenizer, prompts[i], places[i]) if with_template else prompts[i]
            for i in chosen
        ]
        encoded = tokenizer(texts, add_special_tokens=not with_template) if texts else {}
        for i, ids in zip(chosen, encoded.get("input_ids", ()), strict=True):
            prompt_ids[i] = tuple(ids)
    if () in prompt_ids:
        raise DataError(f"{places[prompt_ids.index(())]}: the prompt has no tokens")
    return prompt_ids


def _text_of(prompt: Prompt) -> str:
    """The text itself, or the last message's."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _short_enough(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> list[int]:
    """Positions of the prompts that may be short enough: as characters, not as tokens.

    Tokenising megabytes takes gigabytes, and no token stands for more than the vocabulary's longest.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return [i for i, p in enumerate(prompts) if len(_text_of(p)) <= longest * max_prompt_tokens]


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _holds_answer(solution: object) -> bool:
    return isinstance(solution, str) and ("####" in solution or "\\boxed" in solution)


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, where: str) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # A template is a program: it may raise anything.
    except Exception as error:
        raise DataError(f"{where}: the chat template fails on it: {_named(error)}") from error
    return str(text)


def _named(error: Exception) -> str:
    """An error of a library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
