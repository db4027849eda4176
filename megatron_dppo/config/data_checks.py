"""Checks of the section ``data``: files that are there, weights, and how prompts are put."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig

PLACEHOLDER = "{prompt}"
"""What a prompt template holds where the problem goes."""

MOST_STOPS = 32
"""Stop texts that SGLang takes."""


def data_file_problems(config: TrainConfig) -> Iterator[str]:
    """Files that are not there, weights of some files alone, names that can't name metrics."""
    data = config.data
    listed = not isinstance(data.train, str)
    files = {
        f"data.train[{i}].path" if listed else "data.train": file.path
        for i, file in enumerate(data.train_files)
    }
    files |= {f"data.evaluation.{name}": file.path for name, file in data.evaluation_files.items()}
    for key, path in files.items():
        if not Path(path).is_file():
            yield (
                f"{key}: got {path!r}, expected a JSONL or Parquet file, relative to {Path.cwd()}; "
                "docs/data.md tells how published sets are prepared"
            )
    if not data.train_files:
        yield "data.train: got an empty list, expected at least one file"
    paths = [file.path for file in data.train_files]
    if repeated := sorted({path for path in paths if paths.count(path) > 1}):
        yield f"data.train: {repeated[0]!r} is there twice, expected each file once; see weight"
    weighted = [file.weight is not None for file in data.train_files]
    if any(weighted) and not all(weighted):
        lacking = weighted.index(False)
        yield f"data.train[{lacking}].weight: missing, expected one for each file, or for none"
    for name in data.evaluation:
        if not re.fullmatch(r"[\w.-]+", name):
            yield (
                f"data.evaluation: got the name {name!r}, expected letters, digits, '_', '-' and "
                "'.' (it names metrics)"
            )


def prompt_form_problems(config: TrainConfig) -> Iterator[str]:
    """Templates without a place for the problem, and prompts that nothing would carry."""
    data = config.data
    if data.prompt_template is not None and data.prompt_template.count(PLACEHOLDER) != 1:
        yield (
            f"data.prompt_template: got {data.prompt_template!r}, expected {PLACEHOLDER} in it once, "
            "where the problem goes"
        )
    if data.system_prompt is not None and not data.apply_chat_template:
        yield (
            "data.system_prompt: got one with data.apply_chat_template false, expected null: only a "
            "chat template carries a system message"
        )
    if len(config.rollout.stop) > MOST_STOPS:
        yield f"rollout.stop: got {len(config.rollout.stop)} texts, expected at most {MOST_STOPS}"
    if "" in config.rollout.stop:
        yield "rollout.stop: got an empty text, expected texts that end a response"
