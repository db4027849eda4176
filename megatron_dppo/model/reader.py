"""The one reader of a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.errors import ModelConfigError, UnsupportedModelError
from megatron_dppo.model.families import FAMILIES
from megatron_dppo.model.shape import ModelShape


def load_model_shape(hf_dir: str | Path) -> ModelShape:
    """Read ``hf_dir/config.json`` (or a config file itself).

    Raises ModelConfigError where there is none or it is no JSON, UnsupportedModelError, with all
    problems, for a family or entries outside the tables.
    """
    path = Path(hf_dir)
    path = path / "config.json" if path.is_dir() else path
    values = _read_json(path)
    model_type = values.get("model_type") if isinstance(values, dict) else None
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(
            [f"{path}: model_type {model_type!r}; supported families: {sorted(FAMILIES)}"]
        )
    facts = ConfigFacts(values, str(path))
    facts.require("architectures", [family.architecture], [family.architecture])
    shape = family.read(facts)
    if not facts.problems:
        _check_relations(shape, facts)
    if facts.problems:
        raise UnsupportedModelError(facts.problems)
    return shape


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path}: no such file; expected a Hugging Face config.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelConfigError(f"{path}: not a readable JSON file ({error})") from error


def _check_relations(shape: ModelShape, facts: ConfigFacts) -> None:
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        facts.problem(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    if shape.experts_per_token > shape.num_experts:
        facts.problem(
            f"num_experts_per_tok is {shape.experts_per_token}, expected at most the "
            f"{shape.num_experts} experts"
        )
