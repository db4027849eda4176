"""The supported model families, by their config.json's ``model_type``. A new one is a file here and a row below."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dppo.model.errors import CheckpointError, UnsupportedModelError
from megatron_dppo.model.families import llama, qwen2, qwen3, qwen3_moe
from megatron_dppo.model.rules import Family
from megatron_dppo.model.shape import ConfigFacts, ModelShape

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (qwen3_moe.FAMILY, qwen3.FAMILY, qwen2.FAMILY, llama.FAMILY)
}


def load_model_shape(hf_dir: str | Path) -> ModelShape:
    """Read ``hf_dir/config.json`` (or a config file itself).

    Raises CheckpointError where there is none, UnsupportedModelError for a family or feature outside the tables.
    """
    path = Path(hf_dir)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; expected a Hugging Face config.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file ({error})") from error
    model_type = values.get("model_type") if isinstance(values, dict) else None
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(
            f"{path}: model_type {model_type!r}; supported families: {sorted(FAMILIES)}"
        )
    return family.read(ConfigFacts(values, str(path)))


def family_of(shape: ModelShape) -> Family:
    """The table that describes ``shape``."""
    return FAMILIES[shape.family]


def has_layer_parameter(shape: ModelShape, name: str) -> bool:
    """Whether a layer of ``shape`` has Megatron's parameter ``name``, as ``self_attention.linear_qkv.bias``."""
    return any(
        rule.megatron == f"decoder.layers.{{layer}}.{name}" for rule in family_of(shape).layer
    )
