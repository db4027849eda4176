"""Families that only tests have: rows that no supported family has yet, over models that transformers can build."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.families import qwen3_moe
from megatron_dppo.families.shared import decoder, reading, sigmoid_router
from megatron_dppo.model import families, mapping, resharding, rows
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import FAMILIES, Family
from megatron_dppo.model.shape import ModelShape


def read_mixed(facts: ConfigFacts) -> ModelShape:
    """Qwen3-MoE with dense layers. transformers reads them from config.json, SGLang's model does not."""
    shape = qwen3_moe.read(facts)
    return replace(shape, dense_layers=reading.read_dense_layers(facts))


def mixed_family() -> Family:
    """The table of Qwen3-MoE with dense layers."""
    layer = (
        *decoder.ATTENTION,
        *decoder.QK_NORM,
        *rows.in_layers(rows.dense_layers, *decoder.DENSE_MLP),
        *rows.in_layers(rows.routed_layers, *decoder.moe_router()),
    )
    return replace(FAMILIES["qwen3_moe"], read=read_mixed, layer=layer)


@contextmanager
def planted(family: Family) -> Iterator[None]:
    """Let ``family`` replace the family with its ``model_type`` inside this context."""
    with patch.dict(FAMILIES.loaded, {family.model_type: family}):
        _forget()
        yield
    _forget()


def planted_in_each_test(family: Callable[[], Family]) -> Callable[[], Iterator[None]]:
    """Return an autouse fixture that plants the family that ``family`` makes."""

    @pytest.fixture(autouse=True)
    def plant() -> Iterator[None]:
        with planted(family()):
            yield

    return plant


def _forget() -> None:
    """Clear the caches by a model's shape: two tables of a family have equal shapes."""
    families.layers_are_alike.cache_clear()
    mapping.own_dtypes.cache_clear()
    mapping.file_dtypes.cache_clear()
    mapping.packed_names.cache_clear()
    mapping.parameter_count.cache_clear()
    resharding._engine_segments.cache_clear()


def biased_family() -> Family:
    """Qwen3-MoE's table with a router's bias in float32. Its models in transformers have no such bias."""
    layer = (
        *decoder.ATTENTION,
        *decoder.QK_NORM,
        *decoder.moe_router(),
        sigmoid_router.router_bias(),
    )
    return replace(FAMILIES["qwen3_moe"], layer=layer)


def add_router_bias(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Add the biases of ``biased_family`` to the tiny model in ``folder``, and return its tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    gates = [name for name in tensors if name.endswith(".mlp.gate.weight")]
    for number, gate in enumerate(gates):
        values = torch.linspace(-1, 1, len(tensors[gate])).mul(0.1003 * (number + 1))
        tensors[gate.replace("weight", "e_score_correction_bias")] = values.to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def carrying_family() -> Family:
    """Qwen3-MoE's table whose checkpoints carry layers that predict further tokens, and a vision tower."""
    vision = rows.with_prefix("model.visual.")

    def is_carried(shape: ModelShape, name: str) -> bool:
        return rows.later_layers(shape, name) or vision(shape, name)

    return replace(FAMILIES["qwen3_moe"], carries=is_carried)


def add_carried_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Add tensors that ``carrying_family`` carries to the tiny model in ``folder``, and return them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    carried = {
        f"model.layers.{layers}.eh_proj.weight": torch.randn(64, 128).bfloat16(),
        f"model.layers.{layers}.shared_head.norm.weight": torch.randn(64),
        "model.visual.patch_embed.proj.weight": torch.randn(16, 3, 2, 4, 4).bfloat16(),
    }
    save_file({**tensors, **carried}, path, metadata={"format": "pt"})
    return carried


def packing_family() -> Family:
    """Qwen3-MoE's table whose files have all experts of a layer in one tensor."""
    packed = rows.packed_experts_of(decoder.expert_mlp(), "gate_up_proj", "down_proj")
    return replace(FAMILIES["qwen3_moe"], packed=packed, carries=rows.with_prefix("mtp."))
