"""A config.json without one of its keys: the model is the one that transformers builds, or the key is required."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megatron_dppo.model.config_keys import HARMLESS
from megatron_dppo.model.errors import UnsupportedModelError
from megatron_dppo.model.families import FAMILIES, load_model_shape
from megatron_dppo.model.shape import ModelShape
from tests.unit.published_configs import published_family, written

REQUIRED = {
    "architectures", "model_type", "text_config", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    # The entries of a table of rotary parameters, which has no default.
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
}  # fmt: skip
"""Keys without which a file is refused, although transformers has a default for most of them."""

TABLES = {"text_config", "rope_scaling", "rope_parameters"}

KeyPath = tuple[str, ...]


def _in_transformers(values: dict[str, Any]) -> dict[str, Any]:
    """Return all keys of transformers' own configuration of ``values``, with its defaults."""
    config = CONFIG_MAPPING[values["model_type"]](**copy.deepcopy(values))
    return json.loads(json.dumps(config.to_dict()))


def _key_paths(values: dict[str, Any], outer: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys, without required keys and keys that change nothing with any value."""
    for key, value in values.items():
        if key in TABLES and isinstance(value, dict):
            yield from _key_paths(value, (*outer, key))
        if key not in REQUIRED | HARMLESS:
            yield (*outer, key)


def _without(values: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    table = changed
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]
    return changed


def _outcome(folder: Path, values: dict[str, Any]) -> ModelShape | str:
    """Return the shape, or the refused key, with "is missing" if that is the reason."""
    try:
        return load_model_shape(written(folder, values))
    except UnsupportedModelError as error:
        reasons = [fault.split(": ", 1)[1] for fault in error.faults]
    for reason in reasons:
        if " is missing" in reason:
            return f"{reason.split()[0]} is missing"
    return reasons[0].split()[0]


@pytest.mark.parametrize("form", ["published", "saved by transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_means_what_it_means_in_transformers(
    tmp_path: Path, family: str, form: str
) -> None:
    values = published_family(family)
    if form != "published":
        values = _in_transformers(values)
    assert isinstance(_outcome(tmp_path, values), ModelShape)
    different = {}
    for path in _key_paths(values):
        changed = _without(values, path)
        ours, theirs = _outcome(tmp_path, changed), _outcome(tmp_path, _in_transformers(changed))
        if ours != theirs:
            different[path] = (ours, theirs)
    assert different == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_key_is_named_when_it_is_missing(tmp_path: Path, family: str) -> None:
    values = published_family(family)
    table = values.get("text_config", values)
    for key in sorted((REQUIRED & table.keys()) - {"architectures", "model_type"}):
        changed = {name: value for name, value in table.items() if name != key}
        if table is not values:
            changed = values | {"text_config": changed}
        outcome = _outcome(tmp_path, changed)
        # A key that no layer of the model uses is not read.
        assert outcome in (_outcome(tmp_path, values), f"{key} is missing"), key
