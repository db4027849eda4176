"""The config.json files of published models, and altered copies of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.model.errors import UnsupportedModelError
from megatron_dppo.model.families import load_model_shape

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "model_configs"

FAMILY_FOLDERS = {
    "llama": "octothinker-3b-hybrid-base",
    "qwen2": "deepseek-r1-distill-qwen-1.5b",
    "qwen3": "qwen3-8b-base",
    "qwen3_moe": "qwen3-30b-a3b",
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "olmoe": "olmoe-1b-7b-0924-instruct",
    "glm4_moe": "glm-4.5-air",
    "deepseek_v3": "deepseek-v3",
    "glm4_moe_lite": "glm-4.7-flash",
    "minimax_m2": "minimax-m2",
    "qwen3_next": "qwen3-next-80b-a3b-instruct",
    "hy_v3": "hy3",
    "qwen3_5_moe": "qwen3.5-35b-a3b",
    "gpt_oss": "gpt-oss-20b",
}
"""A published model of each family, except Qwen3.5's language model, which is a part of ``qwen3_5_moe``."""


def published(name: str) -> dict[str, Any]:
    """Return the values in the config.json of the model in the folder ``name``."""
    values: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return values


def published_family(family: str) -> dict[str, Any]:
    """Return the values in the config.json of a published model of ``family``."""
    if family != "qwen3_5_moe_text":
        return published(FAMILY_FOLDERS[family])
    text: dict[str, Any] = published(FAMILY_FOLDERS["qwen3_5_moe"])["text_config"]
    return text | {"architectures": ["Qwen3_5MoeForCausalLM"]}


def written(folder: Path, values: dict[str, Any]) -> Path:
    """Write ``values`` as the config.json of ``folder``, and return the folder."""
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refused_keys(folder: Path, values: dict[str, Any]) -> list[str]:
    """Return the keys for which the model with ``values`` in its config.json is refused."""
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_shape(written(folder, values))
    return [fault.split(": ", 1)[1].split()[0].rstrip(":") for fault in caught.value.faults]
