"""Recipes of both kinds as the planner reads them: a supervised run is planned as a run that replays its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.config import ConfigError, SupervisedConfig, TrainConfig, load_as, load_config
from megatron_dppo.config.loading import read_with_bases
from megatron_dppo.config.schema import PolicyConfig

_SEQUENCES = "sequences_per_step"
"""Key of ``training`` that only a supervised recipe has."""
_GROUP = 2


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load a recipe of either kind for the planner. Raises ConfigError."""
    if is_supervised(Path(path)):
        return as_replayed(load_as(SupervisedConfig, path, overrides))
    return load_config(path, overrides)


def is_supervised(path: Path) -> bool:
    """Whether the recipe is of a supervised run. False for a file that can't be read."""
    try:
        training = read_with_bases(path, SupervisedConfig).get("training")
    except ConfigError:
        # ``load_config`` says why.
        return False
    return isinstance(training, dict) and _SEQUENCES in training


def as_replayed(config: SupervisedConfig) -> TrainConfig:
    """Return the run that trains as the supervised run does: on saved batches, without servers, one mini-batch a step.

    The longest sequence has ``training.micro_batch_tokens`` tokens, and all its tokens count as a response's. A group
    has two sequences, the smallest group that there is, so that an odd number of sequences counts as one more.
    """
    shared = config.model_dump(include=set(PolicyConfig.model_fields))
    training = config.training
    groups = -(-training.sequences_per_step // _GROUP)
    longest = training.micro_batch_tokens
    replayed_sections: dict[str, Any] = {
        "training": {
            "prompts_per_mini_batch": groups,
            "micro_batch_tokens": longest,
            "recompute": training.recompute,
        },
        "data": {"train": config.data.train, "max_prompt_tokens": 1},
        "rollout": {
            "prompts_per_step": groups,
            "group_size": _GROUP,
            "max_response_tokens": max(1, longest - 1),
            "replay_from": config.data.train,
        },
        # Without a recomputed policy, a step has one forward pass.
        "algorithm": {"name": "pg-is"},
        "checkpoint": {"every": config.checkpoint.every},
    }
    return TrainConfig.model_validate(shared | replayed_sections)
