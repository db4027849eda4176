"""Configurations for jobs of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

SMALL_ROLLOUTS = {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 12}


def write_config(folder: Path, **sections: Any) -> Path:
    """Write a configuration on CPUs whose run directory is ``folder / "run"``, and return the file's path.

    The checkpoint and the data that it names need not exist for tests that only read the configuration.
    """
    config: dict[str, Any] = {
        "run": {"directory": str(folder / "run"), "steps": 2},
        "model": {"hf_checkpoint": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        "rollout": SMALL_ROLLOUTS,
        "training": {"prompts_per_mini_batch": 4, "micro_batch_tokens": 512},
        "optimizer": {"lr": 1e-3},
        "engine": {"device": "cpu"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return path
