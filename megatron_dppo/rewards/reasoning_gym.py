"""The tasks of reasoning-gym: problems that its generators make, and the reward that its own checks give.

A problem's metadata has the task, its configuration and the generator's own metadata, by which the task's check reads
an answer: many tasks take any valid answer, not the one that was generated. Needs the extra ``reasoning-gym``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo.rewards import RewardInput, RewardResult
from megatron_dppo.rewards.answers import boxes

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError(
        f"{error}; tasks of reasoning-gym need: pip install 'megatron-dppo[reasoning-gym]'"
    ) from error

_LONGEST_WHY = 80
COMPOSITE = "composite"
"""Not a task but a mixture of others."""


def tasks() -> list[str]:
    """The names of all tasks."""
    return sorted(DATASETS.keys() - {COMPOSITE})


def problems(
    task: str, count: int, seed: int, config: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """``count`` problems of a task as records of a data set: problem, answer (where the generator gives one), metadata.

    ``config``: of the task, by its own names. Raises ValueError for a task or a configuration that there is none of.
    """
    if task not in tasks():
        raise ValueError(f"reasoning-gym has no task {task!r}; it has {', '.join(tasks())}")
    chosen = dict(config or {})
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=count, **chosen)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {task}, configuration {chosen}: {error}") from error
    for index in range(count):
        entry = dataset[index]
        answer = {} if entry["answer"] is None else {"answer": str(entry["answer"])}
        metadata = {"task": task, "config": chosen, "entry": encode(entry["metadata"])}
        yield {"problem": entry["question"], **answer, "metadata": metadata}


def score(record: RewardInput, *, answer_in: str = "tag") -> RewardResult:
    """The task's own score of the response's answer, from 0 to 1.

    ``answer_in``: where that stands: the last ``<answer>`` ``tag``, the last ``boxed`` formula of a ``box``, or the
    ``whole`` response. A response without one scores 0, and so does one that the check fails on. Raises ValueError
    where the metadata is not that of a task.
    """
    if answer_in not in _FINDERS:
        raise ValueError(f"answer_in: got {answer_in!r}, expected {', '.join(_FINDERS)}")
    metadata = record.metadata
    if not {"task", "entry"} <= metadata.keys():
        raise ValueError(
            f"its metadata has {sorted(metadata)}, expected those of megatron-dppo data generate: task, entry"
        )
    given = _FINDERS[answer_in](record.response)
    if given is None:
        return RewardResult(0.0, reason=f"no answer in a {answer_in}")
    entry = {
        "question": record.prompt,
        "answer": record.answer or None,
        "metadata": decode(metadata["entry"]),
    }
    dataset = _dataset(metadata["task"], json.dumps(metadata.get("config") or {}, sort_keys=True))
    try:
        value = float(dataset.score_answer(given, entry))
    # Its process has none left, and the verifier sees to that.
    except MemoryError:
        raise
    # What a response says may be anything but what a check reads.
    except Exception as error:
        why = f"the task's check failed on it: {type(error).__name__}: {str(error)[:_LONGEST_WHY]}"
        return RewardResult(0.0, reason=why)
    shown = given if len(given) <= 80 else f"{given[:80]}..."
    return RewardResult(value, reason=f"{shown!r} by {metadata['task']}")


def _boxed(response: str) -> str | None:
    contents = [content for _, content in boxes(response)]
    return contents[-1].strip() if contents else None


_FINDERS = {"tag": extract_answer, "box": _boxed, "whole": str}


@functools.cache
def _dataset(task: str, config: str) -> Any:
    """What scores a task's answers; some take seconds to make."""
    return reasoning_gym.create_dataset(task, **json.loads(config))


# --- metadata as JSON, and back as it was: checks compare tuples, and look numbers up

_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def encode(value: Any) -> Any:
    """Tuples, dictionaries with any keys and what JSON has, as JSON. Raises ValueError for anything else."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode(inner) for key, inner in value.items()}
        return {_PAIRS: [[encode(key), encode(inner)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [encode(inner) for inner in value]}
    if isinstance(value, list):
        return [encode(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"metadata holds a {type(value).__name__}, which is no JSON")


def decode(value: Any) -> Any:
    """What ``encode`` was given."""
    if isinstance(value, Mapping):
        if value.keys() == {_TUPLE}:
            return tuple(decode(inner) for inner in value[_TUPLE])
        if value.keys() == {_PAIRS}:
            return {decode(key): decode(inner) for key, inner in value[_PAIRS]}
        return {key: decode(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [decode(inner) for inner in value]
    return value
