"""The config.json of a model of the recipe's family that is as small as the recipe's layout allows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dppo import EXAMPLES
from megatron_dppo.cluster.rehearsal.tokenizer import SPECIAL_TOKENS, byte_vocabulary_size
from megatron_dppo.model.families import family_of, language_model_values, load_model_shape
from megatron_dppo.model.layout import LayoutSizes
from megatron_dppo.model.quantization import BLOCK
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import ceil_to
from megatron_dppo.model.tiny_sizes import HEAD_DIM, TinySizes

KNOWN_MODELS = EXAMPLES / "model_configs"
_GUESSED_MOE, _GUESSED_DENSE = "qwen3-30b-a3b-base", "qwen3-1.7b-base"
"""Models of ``KNOWN_MODELS`` that replace an unknown model."""
HIDDEN = 64
_EXPERT_ROWS = 32
"""Rows of an expert on one rank, after the ranks have divided the expert. A dense MLP has twice as many rows."""
_LEAST_LAYERS = 2
_MOST_CHOICES = 4
"""Largest number of experts of a token."""
_LEAST_POSITIONS = 512
_SPARE_POSITIONS = 64
_DEVIATION = 0.05
"""Standard deviation of the random weights: larger than usual, so that an error in a block shows in the outputs."""


@dataclass(frozen=True)
class KnownModel:
    """The config.json of the recipe's model, or of a known model in its place.

    Attributes:
        values: the content of config.json.
        shape: the model that config.json describes.
        missing: the reason why the model was guessed; empty if the model was not guessed.
    """

    values: Mapping[str, Any]
    shape: ModelShape
    missing: str = ""


def read_model(checkpoint: str, *, is_moe: bool) -> KnownModel:
    """Read the config.json of ``checkpoint``, of a known model with the checkpoint's name, or else of a guessed model.

    ``is_moe``: whether an unknown model is taken for a mixture of experts. Raises ModelError for a config.json that is
    damaged or outside the families.
    """
    folder = Path(checkpoint)
    known_folder = KNOWN_MODELS / folder.name.lower()
    for candidate in (folder, known_folder):
        if (candidate / "config.json").is_file():
            return _read(candidate)
    guessed_name = _GUESSED_MOE if is_moe else _GUESSED_DENSE
    guessed_model = _read(KNOWN_MODELS / guessed_name)
    missing = (
        f"no config.json in {folder} and no model {folder.name!r} among the known ones, so the model is taken for "
        f"{guessed_model.shape.family}, as {guessed_name}"
    )
    return replace(guessed_model, missing=missing)


def _read(folder: Path) -> KnownModel:
    shape = load_model_shape(folder)
    return KnownModel(json.loads((folder / "config.json").read_text(encoding="utf-8")), shape)


def tiny_sizes(
    layout: LayoutSizes, shape: ModelShape, longest: int, *, all_to_all: bool = False
) -> TinySizes:
    """Return the smallest sizes that the ranks of ``layout`` divide evenly.

    The model has the same kinds of parts as the recipe's model.

    Args:
        layout: layout of the trainer.
        shape: the recipe's own model.
        longest: tokens of the longest sequence.
        all_to_all: whether the recipe sets ``cp_comm_type: a2a``. On GPUs, context-parallel ranks then divide the
            query heads and the key-value heads of a tensor-parallel rank. On CPUs, context-parallel ranks always
            divide the query heads, and repeat key-value heads whose number they do not divide.
    """
    tensor = layout.tensor
    group_ranks = tensor
    if all_to_all:
        group_ranks *= layout.context
    if shape.num_query_groups % tensor == 0:
        # The ranks divide the key-value heads. A recipe's model with several such heads gets at least two.
        groups = max(group_ranks, min(2, shape.num_query_groups))
    else:
        # There are fewer key-value heads than ranks, as in the recipe's model, and each rank holds a part of a head.
        groups = shape.num_query_groups
    if shape.num_attention_heads > shape.num_query_groups:
        # Several query heads share a key-value head, as in the recipe's model.
        heads = math.lcm(2 * groups, tensor * layout.context)
    else:
        heads = groups = math.lcm(groups, tensor * layout.context)
    hidden = HIDDEN if family_of(shape).has_head_dim else heads * HEAD_DIM
    experts = choices = moe_ffn = 0
    if shape.is_moe:
        experts = max(4, 2 * layout.expert)
        choices = min(shape.experts_per_token, _MOST_CHOICES, experts // 2)
        moe_ffn = _EXPERT_ROWS * layout.expert_tensor_size
        if shape.router.has_bias:
            # In models whose router has a bias, the shared expert is as wide as one or several experts. Tensor-parallel
            # ranks divide the shared expert.
            moe_ffn = _EXPERT_ROWS * math.lcm(layout.expert_tensor_size, tensor)
    chunks = layout.virtual_pipeline or 1
    layers = layout.pipeline * chunks
    if layout.given_stages:
        # The recipe sets the layers of some stages. In these stages, each chunk gets one layer (``small_stages``). In
        # all other stages, each chunk gets two layers, so that the stages stay uneven.
        layers += (layout.pipeline - len(layout.given_stages)) * chunks
    positions = ceil_to(longest + _SPARE_POSITIONS, 256)
    return TinySizes(
        layers=max(layers, _LEAST_LAYERS),
        heads=heads,
        groups=groups,
        hidden=hidden,
        ffn=_EXPERT_ROWS * 2 * tensor,
        experts=experts,
        choices=choices,
        moe_ffn=moe_ffn,
        positions=max(_LEAST_POSITIONS, positions),
    )


_KERNEL_ROWS = 128
"""Rows of an expert on each rank, for GPU kernels. A dense MLP has twice as many rows."""


def sizes_for_kernels(
    sizes: TinySizes, layout: LayoutSizes, shape: ModelShape, server_ranks: int
) -> TinySizes:
    """Return ``sizes`` with widths that GPU kernels support, and heads that servers of ``server_ranks`` ranks divide.

    A head is as wide as in the recipe's model, because attention kernels support only few widths. These sizes have not
    run on a GPU yet.
    """
    groups = sizes.groups
    heads = math.lcm(sizes.heads, server_ranks)
    # The ranks of a server divide the key-value heads, or several ranks hold the same head. If neither is possible with
    # ``groups`` heads, raise the numbers of heads.
    if groups % server_ranks and server_ranks % groups:
        groups = math.lcm(groups, server_ranks)
        heads = math.lcm(heads, groups)
    hidden = 4 * _KERNEL_ROWS
    if not family_of(shape).has_head_dim:
        hidden = heads * shape.head_dim
    moe_ffn = 0
    if sizes.experts:
        moe_ffn = _KERNEL_ROWS * math.lcm(layout.expert_tensor_size, server_ranks)
    return replace(
        sizes,
        heads=heads,
        groups=groups,
        hidden=hidden,
        ffn=2 * _KERNEL_ROWS * math.lcm(layout.tensor, server_ranks),
        moe_ffn=moe_ffn,
        head_dim=shape.head_dim,
    )


def sizes_for_blocks(
    sizes: TinySizes, layout: LayoutSizes, shape: ModelShape, server_ranks: int
) -> TinySizes:
    """Return ``sizes`` for FP8 weights: each of ``server_ranks`` ranks has whole blocks of 128 x 128 elements."""
    wide_sizes = sizes_for_kernels(sizes, layout, shape, server_ranks)
    hidden = wide_sizes.hidden
    if not family_of(shape).has_head_dim:
        hidden = wide_sizes.heads * BLOCK
    return replace(wide_sizes, head_dim=BLOCK, hidden=hidden)


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
