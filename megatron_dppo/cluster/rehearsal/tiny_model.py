"""The config.json of a model of the recipe's family that is as small as the recipe's layout allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.cluster.known_models import KnownModel
from megatron_dppo.cluster.rehearsal.tokenizer import SPECIAL_TOKENS, byte_vocabulary_size
from megatron_dppo.model.families import family_of, language_model_values
from megatron_dppo.model.tiny_sizes import TinySizes

_DEVIATION = 0.05
"""Standard deviation of the random weights: larger than usual, so that an error in a block shows in the outputs."""


def tiny_config(
    known_model: KnownModel, sizes: TinySizes, *, own_tokenizer: bool
) -> dict[str, Any]:
    """Return the recipe's config.json with the tiny sizes.

    ``own_tokenizer``: whether the tokenizer is the recipe's. Otherwise the file gets the ids of the byte tokenizer.
    """
    values = dict(language_model_values(known_model.values))
    family = family_of(known_model.shape)
    # Keys that depend on the number of layers, or that transformers writes itself.
    for key in ("layer_types", "max_window_layers", "torch_dtype", "dtype", "transformers_version"):
        values.pop(key, None)
    values |= {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "max_position_embeddings": sizes.positions,
        "initializer_range": _DEVIATION,
    }
    if family.has_head_dim or "head_dim" in values:
        values["head_dim"] = sizes.head_dim
    if sizes.experts:
        values |= _expert_values(values, sizes)
    values |= family.tiny_values(known_model.shape, values, sizes)
    for key in ("rope_scaling", "rope_parameters"):
        table = values.get(key)
        if isinstance(table, Mapping) and "original_max_position_embeddings" in table:
            original = min(table["original_max_position_embeddings"], sizes.positions // 2)
            values[key] = {**table, "original_max_position_embeddings": original}
    if not own_tokenizer:
        end = SPECIAL_TOKENS.index("<|im_end|>")
        values |= {"vocab_size": byte_vocabulary_size(), "eos_token_id": end, "pad_token_id": 0}
        values["bos_token_id"] = None
    return _with_outer_values(known_model, values)


def _expert_values(values: Mapping[str, Any], sizes: TinySizes) -> dict[str, Any]:
    """Return the sizes of experts by the keys of the recipe's config.json."""
    count_key = "num_local_experts"
    for key in ("num_experts", "n_routed_experts"):
        if key in values:
            count_key = key
            break
    # A family without a key for the width of an expert has this width under the key of the MLP.
    width_key = "intermediate_size"
    if "moe_intermediate_size" in values:
        width_key = "moe_intermediate_size"
    new_values = {
        count_key: sizes.experts,
        "num_experts_per_tok": sizes.choices,
        width_key: sizes.moe_ffn,
    }
    if "shared_expert_intermediate_size" in values:
        new_values["shared_expert_intermediate_size"] = sizes.ffn
    return new_values


def _with_outer_values(known_model: KnownModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the language model's ``values`` at their place in the recipe's file.

    In families with a vision tower, the language model's values are in a separate table.
    """
    table = family_of(known_model.shape).text_table
    if table is None:
        return dict(values)
    # ``values`` has the keys of both levels. Keys that the recipe's file has outside of the table stay outside.
    outer_values = {key: values[key] for key in known_model.values if key in values}
    text_values = {key: value for key, value in values.items() if key not in outer_values}
    text_values["model_type"] = known_model.values[table]["model_type"]
    return {**outer_values, table: text_values}
