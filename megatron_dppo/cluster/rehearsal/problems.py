"""Problems of a rehearsal: a few rows of the recipe's own files, and toy problems in place of missing files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.cluster.rehearsal.shrinking import Omission
from megatron_dppo.config.data_files import data_files
from megatron_dppo.config.data_schema import (
    DataConfig,
    EnvironmentConfig,
    ProblemFile,
    RewardConfig,
)
from megatron_dppo.data.problems import DataKeys, PromptForm, load_problems, read_problems
from megatron_dppo.data.records import EVERY_COLUMN, DataError, prompt_of, read_all_records, text_of
from megatron_dppo.environments import example_metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 2
"""Problems of each evaluation set."""
FIRST_ROWS = 512
"""Number of rows at a file's beginning. The shortest rows are selected among these rows."""
_ANY_LENGTH = 1 << 20
"""Limit of a prompt's tokens that no prompt reaches."""
_TERMS = 100
"""The terms of toy sums are below this number."""


@dataclass(frozen=True)
class Problems:
    """Files that a rehearsal trains and evaluates on.

    Attributes:
        train: paths, in the order of the recipe's ``data.train``.
        evaluation: paths by the name of the set.
        longest: tokens of the longest prompt; of the longest sequence in a supervised recipe.
        absent: the files that toy problems replace.
    """

    train: tuple[str, ...]
    evaluation: Mapping[str, str]
    longest: int
    absent: tuple[Omission, ...]

    @property
    def has_toys(self) -> bool:
        """Whether toy problems replace the training problems."""
        return any(omission.key == "data.train" for omission in self.absent)


def make_problems(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    count: int,
    toy_metadata: Mapping[str, Any] | None = None,
) -> Problems:
    """Write ``count`` training problems of each file, and a few of each evaluation set, into ``folder``.

    ``toy_metadata``: result of ``metadata_of_toys``.

    Every row of a recipe's file is read and checked. Raises DataError for a row that is no problem, and for a prompt
    that the template or the tokenizer does not accept. The error's message begins with the recipe's key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    form = PromptForm(
        data.apply_chat_template,
        data.system_prompt,
        data.prompt_template,
        data.chat_template_arguments,
    )
    files: list[tuple[str, ProblemFile, int]] = []
    for train_file in data.train_files:
        files.append(("data.train", train_file, count))
    for name, evaluation_file in data.evaluation_files.items():
        files.append((f"data.evaluation.{name}", evaluation_file, HELD_OUT))
    paths = []
    absent: list[Omission] = []
    longest = 1
    for number, (key, file, row_count) in enumerate(files):
        path = folder / f"{number}.jsonl"
        toys = [_under_keys(row, file, toy_metadata or {}) for row in toy_rows(row_count, number)]
        own_rows = partial(_shortest_rows, key, file, row_count)
        absent += write_rows(path, key, file.path, own_rows, toys)
        longest = max(longest, _longest_prompt(key, path, file, tokenizer, form))
        paths.append(str(path))
    train_count = len(data.train_files)
    names = list(data.evaluation_files)
    evaluation = dict(zip(names, paths[train_count:], strict=True))
    return Problems(tuple(paths[:train_count]), evaluation, longest, tuple(absent))


def write_rows(
    path: Path,
    key: str,
    source: str,
    own_rows: Callable[[], Sequence[Mapping[str, Any]]],
    toys: Sequence[Mapping[str, Any]],
) -> list[Omission]:
    """Write rows of the recipe's files at ``source`` to the JSONL file ``path``, or toys if the files are not here.

    Returns the omission of the files if toys replace them. Raises DataError for a fault of ``own_rows``, after ``key``.
    """
    omissions: list[Omission] = []
    if fault := data_files(source).fault:
        reason = f"{source} is not here (expected {fault}); toy sums replace it"
        omissions.append(Omission(key, reason))
        rows = toys
    else:
        try:
            rows = own_rows()
        except DataError as error:
            raise DataError(f"{key}: {error}") from error
    text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return omissions


def toy_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Return ``count`` different sums with their answers."""
    rows = []
    for number in random.Random(seed).sample(range(_TERMS * _TERMS), count):
        first, second = divmod(number, _TERMS)
        rows.append({"prompt": f"{first}+{second}=", "answer": str(first + second)})
    return rows


def _shortest_rows(key: str, file: ProblemFile, count: int) -> list[Mapping[str, Any]]:
    """Select the rows with the shortest prompts at the beginning of the file, in the file's order."""
    # Check every row of the file. The rehearsal needs rows, not these problems.
    read_problems(file.path, DataKeys.of(file))
    records = read_all_records(file.path).records[:FIRST_ROWS]
    if len(records) < count and key == "data.train":
        raise DataError(f"{file.path} has {len(records)} problems, expected at least {count}")
    lengths = [len(text_of(prompt_of(row, file.path, file.prompt_key))) for row in records]
    shortest_first = sorted(range(len(records)), key=lengths.__getitem__)
    return [records[position] for position in sorted(shortest_first[:count])]


def _longest_prompt(
    key: str, path: Path, file: ProblemFile, tokenizer: PreTrainedTokenizerBase, form: PromptForm
) -> int:
    """Return the tokens of the longest prompt in the written file. Raises DataError that begins with ``key``."""
    try:
        problems = load_problems(
            path, tokenizer, max_prompt_tokens=_ANY_LENGTH, form=form, keys_of=DataKeys.of(file)
        ).problems
    except DataError as error:
        raise DataError(f"{key}: {error}; {path} holds rows of {file.path}") from error
    return max(len(problem.prompt_ids) for problem in problems)


def metadata_of_toys(reward: RewardConfig, environment: EnvironmentConfig) -> dict[str, Any]:
    """Return metadata of toy problems, so that a recipe finds its reward and its environment in them."""
    metadata = example_metadata(environment.name, environment.options)
    if reward.column is not None:
        metadata[reward.column] = reward.first
    return metadata


def _under_keys(
    row: Mapping[str, str], file: ProblemFile, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a toy row with its values, and ``metadata``, under the file's keys.

    Entries that the recipe itself adds to the metadata of the file's problems are left out.
    """
    values: dict[str, Any] = {
        file.prompt_key or "prompt": row["prompt"],
        file.answer_key or "answer": row["answer"],
    }
    missing_metadata = {key: value for key, value in metadata.items() if key not in file.metadata}
    if file.metadata_key == EVERY_COLUMN:
        values |= missing_metadata
    elif missing_metadata or file.metadata_key is not None:
        values[file.metadata_key or "metadata"] = missing_metadata
    return values
