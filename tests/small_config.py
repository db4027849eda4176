"""The smallest configuration of a run: a value for each key that has no default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dppo.config.loading import merged
from megatron_dppo.config.schema import TrainConfig


def small_config(folder: Path, model: Path, /, **sections: Any) -> TrainConfig:
    """Return a run of ``model`` in ``folder``, in float32. Keys of ``sections`` replace or add to its keys."""
    return TrainConfig.model_validate(small_tree(folder, model, **sections))


def small_tree(folder: Path, model: Path, /, **sections: Any) -> dict[str, dict[str, Any]]:
    """Return the content of the file of ``small_config``."""
    tree = {
        "run": {"directory": str(folder), "steps": 1},
        "model": {"hf_checkpoint": str(model), "dtype": "float32"},
        "data": {"train": "unused.jsonl"},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 64},
        "training": {"prompts_per_mini_batch": 4, "micro_batch_tokens": 512},
        "optimizer": {"lr": 1e-5},
    }
    return merged(tree, sections)
