"""A random model of a recipe's family, as small as the recipe's layout allows, as a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dppo import EXAMPLES
from megatron_dppo.cluster.rehearsal.tokenizer import SPECIAL, byte_vocabulary_size
from megatron_dppo.model.families import family_of, language_model_values, load_model_shape
from megatron_dppo.model.layout import LayoutSizes
from megatron_dppo.model.quantization import BLOCK
from megatron_dppo.model.shape import DeltaNet, LatentAttention, ModelShape

KNOWN_MODELS = EXAMPLES / "model_configs"
_GUESSED = {True: "qwen3-30b-a3b-base", False: "qwen3-1.7b-base"}
"""Models of ``KNOWN_MODELS`` that stand in for an unknown one: a mixture of experts, a dense model."""
HEAD_DIM = 16
HIDDEN = 64
_ROW = 32
"""Rows of an MLP on each tensor-parallel rank."""
_LEAST_LAYERS = 2
_MOST_CHOICES = 4
"""Experts of a token, at most."""
_LEAST_POSITIONS = 512
_SPARE_POSITIONS = 64
_INITIAL = 0.05
"""Standard deviation of the random weights; larger than usual, so that a wrong block shows in the outputs."""


@dataclass(frozen=True)
class TinySizes:
    """Sizes of the tiny model.

    ``experts``: 0 for a dense model. ``choices``: experts of a token. ``positions``: largest number of positions.
    """

    layers: int
    heads: int
    groups: int
    hidden: int
    ffn: int
    experts: int
    choices: int
    moe_ffn: int
    positions: int
    head_dim: int = HEAD_DIM

    def describe(self) -> str:
        """Describe the sizes in words."""
        experts = ""
        if self.experts:
            experts = f", {self.experts} experts of which a token takes {self.choices}"
        return f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, {self.groups} key-value heads{experts}"


@dataclass(frozen=True)
class KnownModel:
    """The config.json of the recipe's model.

    ``missing``: the reason why another model's config.json was read; empty if the file is the recipe's own.
    """

    values: Mapping[str, Any]
    shape: ModelShape
    missing: str = ""


def read_model(checkpoint: str, *, is_moe: bool) -> KnownModel:
    """Read the config.json of ``checkpoint``, or of a known model of the same name.

    ``is_moe``: whether an unknown model is taken for a mixture of experts. Raises ModelError for a config.json that is
    damaged or outside the families.
    """
    folder = Path(checkpoint)
    named = KNOWN_MODELS / folder.name.lower()
    for candidate in (folder, named):
        if (candidate / "config.json").is_file():
            return _read(candidate)
    guess = KNOWN_MODELS / _GUESSED[is_moe]
    found = _read(guess)
    missing = (
        f"no config.json in {folder} and no model {folder.name!r} among the known ones, so the model is taken for "
        f"{found.shape.family}, as {guess.name}"
    )
    return KnownModel(found.values, found.shape, missing)


def _read(folder: Path) -> KnownModel:
    shape = load_model_shape(folder)
    return KnownModel(json.loads((folder / "config.json").read_text(encoding="utf-8")), shape)


def tiny_sizes(
    layout: LayoutSizes,
    shape: ModelShape,
    longest: int,
    *,
    all_to_all: bool = False,
) -> TinySizes:
    """Return the smallest sizes of a model of ``shape``'s kind that ``layout`` divides.

    Args:
        layout: layout of the trainer.
        shape: the recipe's own model.
        longest: tokens of the longest sequence.
        all_to_all: whether on GPUs too the context-parallel ranks exchange heads for tokens, so that they divide a
            rank's key-value heads. On CPUs they divide its query heads in any case.
    """
    tensor = layout.tensor
    share = tensor * (layout.context if all_to_all else 1)
    if shape.num_query_groups % tensor == 0:
        groups = max(share, min(2, shape.num_query_groups))
        groups = math.lcm(share, groups)
    else:
        # With fewer key-value heads than ranks, each rank holds a part of a head, as in the recipe's model.
        groups = shape.num_query_groups
    is_grouped = shape.num_attention_heads > shape.num_query_groups
    heads = math.lcm(groups * (2 if is_grouped else 1), tensor * layout.context)
    if not is_grouped:
        groups = heads
    # Families without a key for it take head_dim = hidden / heads.
    hidden = HIDDEN if _has_own_head_dim(shape) else heads * HEAD_DIM
    experts = choices = moe_ffn = 0
    if shape.is_moe:
        experts = max(4, 2 * layout.expert)
        choices = min(shape.experts_per_token, _MOST_CHOICES, experts // 2)
        moe_ffn = _ROW * layout.expert_tensor_size
        if shape.router.has_bias:
            # The shared expert of such a model is as wide as some experts, and tensor parallelism divides it.
            moe_ffn = _ROW * math.lcm(layout.expert_tensor_size, tensor)
    layers = layout.pipeline * (layout.virtual_pipeline or 1)
    if layout.given_stages:
        # ``small_stages`` gives these stages one layer a chunk; two for the others keep the stages uneven.
        layers += (layout.pipeline - len(layout.given_stages)) * (layout.virtual_pipeline or 1)
    positions = -(-(longest + _SPARE_POSITIONS) // 256) * 256
    return TinySizes(
        layers=max(layers, _LEAST_LAYERS),
        heads=heads,
        groups=groups,
        hidden=hidden,
        ffn=_ROW * 2 * tensor,
        experts=experts,
        choices=choices,
        moe_ffn=moe_ffn,
        positions=max(_LEAST_POSITIONS, positions),
    )


_WINDOW = 16
"""Largest window of attention: responses of a rehearsal are longer."""
_KERNEL_ROWS = 128
"""Rows of an MLP on each rank that GPU kernels support."""


def sizes_for_kernels(
    sizes: TinySizes,
    layout: LayoutSizes,
    shape: ModelShape,
    engine: int,
) -> TinySizes:
    """Return ``sizes`` with widths that GPU kernels support, and heads that servers of ``engine`` ranks divide.

    A head is as wide as in the recipe's model, because attention kernels support only few widths. Not yet run on a GPU.
    """
    ranks = math.lcm(layout.tensor, engine)
    groups = sizes.groups
    heads = math.lcm(sizes.heads, engine)
    if groups % engine and engine % groups:
        groups = math.lcm(groups, engine)
        heads = math.lcm(heads, groups)
    head_dim = shape.head_dim
    has_width = _has_own_head_dim(shape)
    return replace(
        sizes,
        heads=heads,
        groups=groups,
        hidden=4 * _KERNEL_ROWS if has_width else heads * head_dim,
        ffn=2 * _KERNEL_ROWS * ranks,
        moe_ffn=_KERNEL_ROWS * math.lcm(layout.expert_tensor_size, engine) if sizes.experts else 0,
        head_dim=head_dim,
    )


def sizes_for_blocks(
    sizes: TinySizes,
    layout: LayoutSizes,
    shape: ModelShape,
    engine: int,
) -> TinySizes:
    """Return ``sizes`` whose shares on servers of ``engine`` ranks are whole blocks of 128 x 128, for FP8 weights."""
    wide = sizes_for_kernels(sizes, layout, shape, engine)
    hidden = wide.hidden if _has_own_head_dim(shape) else wide.heads * BLOCK
    return replace(wide, head_dim=BLOCK, hidden=hidden)


def _has_own_head_dim(shape: ModelShape) -> bool:
    return shape.family.startswith("qwen3")


def tiny_config(known: KnownModel, sizes: TinySizes, *, own_tokenizer: bool) -> dict[str, Any]:
    """Return the recipe's config.json with the tiny sizes and, unless ``own_tokenizer``, the byte tokenizer's ids."""
    values = dict(language_model_values(known.values))
    for key in ("layer_types", "max_window_layers", "torch_dtype", "dtype", "transformers_version"):
        values.pop(key, None)
    values |= {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "max_position_embeddings": sizes.positions,
        "initializer_range": _INITIAL,
    }
    if _has_own_head_dim(known.shape) or "head_dim" in values:
        values["head_dim"] = sizes.head_dim
    if sizes.experts:
        values |= _expert_values(values, sizes)
    if known.shape.latent is not None:
        values |= _latent_sizes(known.shape.latent)
    if known.shape.delta is not None:
        values |= _delta_sizes(known.shape.delta, sizes)
    if known.shape.window is not None:
        values["sliding_window"] = min(_WINDOW, known.shape.window.tokens)
    for key in ("rope_scaling", "rope_parameters"):
        table = values.get(key)
        if isinstance(table, Mapping) and "original_max_position_embeddings" in table:
            original = min(table["original_max_position_embeddings"], sizes.positions // 2)
            values[key] = {**table, "original_max_position_embeddings": original}
    if not own_tokenizer:
        end = SPECIAL.index("<|im_end|>")
        values |= {"vocab_size": byte_vocabulary_size(), "eos_token_id": end, "pad_token_id": 0}
        values["bos_token_id"] = None
    return _with_further_parts(known, values)


def _expert_values(values: Mapping[str, Any], sizes: TinySizes) -> dict[str, Any]:
    """Return the sizes of experts by the keys of the recipe's config.json."""
    names = [key for key in ("num_experts", "n_routed_experts") if key in values]
    name = names[0] if names else "num_local_experts"
    # A family without a key for the width of an expert takes the MLP's.
    width = "intermediate_size"
    if "moe_intermediate_size" in values:
        width = "moe_intermediate_size"
    found = {name: sizes.experts, "num_experts_per_tok": sizes.choices, width: sizes.moe_ffn}
    if "experts_per_token" in values:
        found["experts_per_token"] = sizes.choices
    if "expert_hidden_dim" in values:
        found["expert_hidden_dim"] = sizes.moe_ffn
    if "shared_expert_intermediate_size" in values:
        found["shared_expert_intermediate_size"] = sizes.ffn
    if "first_k_dense_replace" in values:
        found["first_k_dense_replace"] = min(1, values["first_k_dense_replace"])
    if "n_group" in values:
        found |= {"n_group": 1, "topk_group": 1}
    return found


def _with_further_parts(known: KnownModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the language model ``values`` in the place where the recipe's file has them."""
    table = family_of(known.shape).text_table
    if table is None:
        return dict(values)
    outer = {key: values[key] for key in known.values if key in values}
    inner = {key: value for key, value in values.items() if key not in outer}
    inner["model_type"] = known.values[table]["model_type"]
    if "vision_config" in outer:
        width = {"out_hidden_size": values["hidden_size"]}
        outer["vision_config"] = {**outer["vision_config"], **_VISION_TOWER, **width}
    return {**outer, table: inner}


_VISION_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
"""Sizes of a vision tower, which a rehearsal writes and does not run."""


def _latent_sizes(latent: LatentAttention) -> dict[str, Any]:
    return {
        "q_lora_rank": None if latent.query_rank is None else 3 * HEAD_DIM,
        "kv_lora_rank": 2 * HEAD_DIM,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
    }


def _delta_sizes(delta: DeltaNet, sizes: TinySizes) -> dict[str, Any]:
    """Sizes of delta nets, of which a model of two layers has one."""
    return {
        "full_attention_interval": min(delta.attention_interval, sizes.layers),
        # Trainer and servers divide them as they divide the heads of attention.
        "linear_num_key_heads": sizes.heads,
        "linear_num_value_heads": sizes.heads * delta.value_heads // delta.key_heads,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
    }
