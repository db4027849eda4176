"""The tasks of reasoning-gym: problems from its generators, and the reward that its own checks compute.

A problem's metadata has the task, its configuration and the generator's own metadata. The task's check needs all three,
because many tasks accept any valid answer, not only the generated answer. This module needs the extra
``reasoning-gym``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.data.gold_answers import boxes
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards.json_values import from_json, to_json
from megatron_dppo.rewards.result import RewardResult
from megatron_dppo.system.text import cut

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError(
        f"{error}; tasks of reasoning-gym need: pip install 'megatron-dppo[reasoning-gym]'"
    ) from error

_MAX_EXCERPT = 80
"""Largest number of characters of an answer, or of an error, in a reason."""
COMPOSITE = "composite"
"""Entry of ``DATASETS`` that mixes problems of other tasks. It is not a task itself."""


def tasks() -> list[str]:
    """The names of all tasks."""
    return sorted(DATASETS.keys() - {COMPOSITE})


def problems(
    task: str, count: int, seed: int, config: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Generate ``count`` problems of a task as data rows: problem, answer (if the generator has one), metadata.

    ``config`` has the task's own options. Raises ValueError for an unknown task or an invalid configuration.
    """
    if task not in tasks():
        raise ValueError(f"reasoning-gym has no task {task!r}; it has {', '.join(tasks())}")
    options = dict(config or {})
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=count, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {task}, configuration {options}: {error}") from error
    for index in range(count):
        entry = dataset[index]
        row = {"problem": entry["question"]}
        if entry["answer"] is not None:
            row["answer"] = str(entry["answer"])
        row["metadata"] = {"task": task, "config": options, "entry": to_json(entry["metadata"])}
        yield row


def score(record: RewardInput, *, answer_in: str = "tag") -> RewardResult:
    """Score the response's answer, from 0 to 1, with the task's own check.

    ``answer_in`` is the place of the answer: ``tag``, the last ``<answer>``; ``box``, the last ``\\boxed``; or
    ``whole``, the whole response. A response scores 0 if it has no answer, or if the check raises an exception. Raises
    ValueError if the problem's metadata does not have the keys that ``problems`` writes.
    """
    if answer_in not in _FINDERS:
        raise ValueError(f"answer_in: got {answer_in!r}, expected {', '.join(_FINDERS)}")
    metadata = record.metadata
    if not {"task", "entry"} <= metadata.keys():
        raise ValueError(
            f"the problem's metadata has the keys {sorted(metadata)}, expected 'task' and 'entry', which the command "
            "'megatron-dppo data generate' writes"
        )
    answer = _FINDERS[answer_in](record.response)
    if answer is None:
        return RewardResult(0.0, reason=f"no answer in a {answer_in}")
    entry = {
        "question": record.prompt,
        "answer": record.answer or None,
        "metadata": from_json(metadata["entry"]),
    }
    config_json = json.dumps(metadata.get("config") or {}, sort_keys=True)
    dataset = _dataset(metadata["task"], config_json)
    try:
        value = float(dataset.score_answer(answer, entry))
    # Do not score 0 when the process is out of memory: rewards/verifier.py handles this error.
    except MemoryError:
        raise
    # A check may raise any exception for an answer that it cannot parse.
    except Exception as error:
        message = str(error)[:_MAX_EXCERPT]
        reason = (
            f"the task's check raised an error for the answer: {type(error).__name__}: {message}"
        )
        return RewardResult(0.0, reason=reason)
    excerpt = cut(answer, _MAX_EXCERPT)
    return RewardResult(value, reason=f"answer {excerpt!r}, checked by task {metadata['task']}")


def _boxed(response: str) -> str | None:
    contents = [content for _, content in boxes(response)]
    return contents[-1].strip() if contents else None


_FINDERS = {"tag": extract_answer, "box": _boxed, "whole": str}


@functools.cache
def _dataset(task: str, config_json: str) -> Any:
    """The object that scores a task's answers. It is cached, because its construction takes seconds for some tasks.

    ``config_json`` is the task's configuration as JSON text, because arguments of a cached function must be hashable.
    """
    return reasoning_gym.create_dataset(task, **json.loads(config_json))
