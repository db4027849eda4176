"""Layouts of ranks by the names that the tests list: ``TP2 EP2 recompute full, distributed optimizer``."""

from __future__ import annotations

import re
from typing import Any

SIZES = {
    "TP": "tensor",
    "PP": "pipeline",
    "VPP": "virtual_pipeline",
    "EP": "expert",
    "ETP": "expert_tensor",
    "CP": "context",
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "recompute moe": {"recompute": "selective", "megatron": {"recompute_modules": ["moe"]}},
    "distributed optimizer": {"distributed": True},
    "overlap": {"ddp": OVERLAP},
    "overlap of gradients": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 4000}},
    "one sequence a micro-batch": {"budget": 1},
    "packed otherwise": {"budget": 64},
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
    "LoRA": {"lora": {"rank": 4}},
    "LoRA shared router": {"lora": {"rank": 4, "experts": "shared", "train_router": True}},
}

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""A model, the ``parallel:`` section, and other settings that differ from those of one process."""


def sizes_of(name: str) -> dict[str, Any]:
    """Return the ``parallel:`` section of the layout ``name``. The rest of the world size (DP) needs no entry."""
    sizes: dict[str, Any] = {key: int(size) for key, size in _sizes(name)}
    if re.search(r"\bSP\b", name):
        sizes["sequence"] = True
    if found := re.search(r"(\d+) layers first", name):
        sizes["first_stage_layers"] = int(found[1])
    return sizes


def _sizes(name: str) -> list[tuple[str, str]]:
    found = re.findall(r"\b([A-Z]+P)(\d+)", name)
    return [(SIZES[kind], size) for kind, size in found if kind != "DP"]


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings that ``name`` mentions."""
    settings: dict[str, Any] = {}
    for words, entry in SETTINGS.items():
        if words in name:
            settings |= entry
    return settings


def cases_of(names_by_model: dict[str, list[str]]) -> dict[str, Case]:
    """Return the cases of each model under names that begin with the model's."""
    return {
        f"{model} {name}": (model, sizes_of(name), settings_of(name))
        for model, names in names_by_model.items()
        for name in names
    }
