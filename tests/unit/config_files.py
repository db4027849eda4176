"""A valid configuration and the files that it names, small enough to write in every test: no
weights, no torch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from megatron_dppo.config import ConfigError, check_config, load_config
from megatron_dppo.config.loading import merged
from megatron_dppo.config.schema import TrainConfig

MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 511, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 2048,
}  # fmt: skip
DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 2048,
}  # fmt: skip


def write_checkpoint(folder: Path, config: dict[str, Any] = MOE) -> Path:
    """Write a folder that looks like a checkpoint: config.json, an empty safetensors file, a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text("{}")
    return folder


def minimal(folder: Path, model: dict[str, Any] = MOE) -> dict[str, dict[str, Any]]:
    """Return a configuration of only the keys that have no default, and write the files that it names to ``folder``."""
    (folder / "train.jsonl").touch()
    return {
        "run": {"directory": str(folder / "run"), "steps": 10},
        "model": {"hf_checkpoint": str(write_checkpoint(folder / "model", model))},
        "data": {"train": str(folder / "train.jsonl")},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 64},
        "training": {"prompts_per_mini_batch": 4, "micro_batch_tokens": 512},
        "optimizer": {"lr": 1e-5},
    }


def minimal_config(folder: Path, **sections: Any) -> TrainConfig:
    """Return the minimal configuration with the keys of ``sections``."""
    return TrainConfig.model_validate(merged(minimal(folder), sections))


def faults_of(folder: Path, *overrides: str, model: dict[str, Any] = MOE) -> list[str]:
    """The faults that the checks find in the minimal configuration with ``overrides``, written to ``folder``."""
    config = load_config(str(write_config(folder, minimal(folder, model))), overrides)
    try:
        check_config(config)
    except ConfigError as error:
        return list(error.faults)
    return []


def write_config(folder: Path, tree: Any) -> Path:
    """Write ``tree`` as YAML, or a text as it is, and return the file's path."""
    path = folder / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def refusals(text: str) -> list[tuple[list[str], str]]:
    """Return the cases of ``text``: overrides as words of a shell, and the fault that they cause, indented below them.

    A fault may have several lines. A line that begins with # is a comment.
    """
    cases: list[tuple[list[str], str]] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            overrides, fault = cases[-1]
            cases[-1] = (overrides, f"{fault} {line.strip()}".strip())
        elif not line.startswith("#"):
            cases.append((shlex.split(line), ""))
    return cases
