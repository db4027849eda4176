"""Models with dense layers among layers with experts: tensors, conversion, layouts and adapters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.checkpoint_conversion.dist_reading import StoredBlocks
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.adapters import (
    Adapters,
    adapter_faults,
    adapter_tensors,
    module_groups,
    trained_elements,
)
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError, UnsupportedModelError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import engine_parameters, hf_tensors, local_parameters
from megatron_dppo.model.resharding import prove_rank_filled, prove_resharding
from megatron_dppo.model.shape import ModelShape, active_parameters
from tests.planted_families import mixed_family, planted_in_each_test
from tests.tiny_models import save_tiny_model

DENSE = (0, 2)
LAYERS = 4


family = planted_in_each_test(mixed_family)


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    return save_tiny_model(folder, "qwen3_moe", layers=LAYERS, mlp_only_layers=list(DENSE))


@pytest.fixture
def shape(hf: Path) -> ModelShape:
    return load_model_shape(hf)


def test_each_layer_has_the_tensors_that_transformers_saves(hf: Path, shape: ModelShape) -> None:
    saved = {n: tuple(t.shape) for n, t in load_file(hf / "model.safetensors").items()}
    assert hf_tensors(shape) == saved
    assert shape.moe_layers == (1, 3)
    assert "model.layers.2.mlp.gate_proj.weight" in saved
    assert "model.layers.3.mlp.experts.7.up_proj.weight" in saved


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({"first_k_dense_replace": 3}, (0, 1, 2)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"mlp_only_layers": [3, 1]}, (1, 3)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (0, 1, 2)),
        ({}, ()),
    ],
)
def test_dense_layers_are_read_from_each_of_their_keys(tmp_path, hf, keys, dense) -> None:
    values = json.loads((hf / "config.json").read_text())
    del values["mlp_only_layers"]
    values.pop("decoder_sparse_step", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, **keys}))
    assert load_model_shape(path).dense_layers == dense


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("first_k_dense_replace", -1, "first_k_dense_replace"),
        ("first_k_dense_replace", True, "first_k_dense_replace"),
        # No layer would be routed.
        ("first_k_dense_replace", LAYERS, "4 layers"),
        ("mlp_only_layers", 1, "mlp_only_layers"),
        ("mlp_only_layers", ["1"], "mlp_only_layers"),
        ("decoder_sparse_step", 0, "decoder_sparse_step"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, hf, key, value, message) -> None:
    values = json.loads((hf / "config.json").read_text()) | {key: value}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match=message):
        load_model_shape(path)


def test_it_converts_there_and_back_with_a_tensor_for_each_layer(hf, tmp_path) -> None:
    certificate = hf_to_megatron(hf, tmp_path / "megatron")
    assert certificate.shape.dense_layers == DENSE
    with StoredBlocks(tmp_path / "megatron" / "release") as stored:
        # These are Megatron-Core's names if ``moe_layer_freq`` is a list.
        assert stored.tensors["decoder.layers.0.mlp.linear_fc1.weight"].dims == (256, 64)
        experts = stored.tensors["decoder.layers.3.mlp.experts.experts.linear_fc1.weight"]
        assert experts.dims == (8, 64, 64)
        assert not [key for key in stored.tensors if key.startswith("decoder.layers.mlp")]
    assert len(verify(hf, tmp_path / "megatron")) == len(certificate.tensors)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    first, second = (load_file(f / "model.safetensors") for f in (hf, tmp_path / "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


LAYOUTS = [
    Layout(),
    Layout(tensor=2, expert_tensor=2),
    Layout(pipeline=2, virtual_pipeline=2, expert=4, data=4),
    Layout(tensor=2, pipeline=2, expert=2, first_stage_layers=3, last_stage_layers=1),
    Layout(pipeline=4, expert=2, data=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_every_element_moves_once(shape, layout) -> None:
    report = prove_resharding(shape, layout, EngineLayout(4, 2))
    assert report.model_bytes == 2 * sum(math.prod(dims) for dims in hf_tensors(shape).values())
    for rank in range(layout.world_size):
        prove_rank_filled(shape, layout, rank)


def test_weights_that_multiply_a_token_are_counted_by_layer(shape) -> None:
    attention = 2 * 64 * 64 + 2 * 64 * 32
    dense = 3 * 64 * 128
    routed = 3 * 64 * 32 * 2 + 64 * 8
    assert active_parameters(shape) == 4 * attention + 2 * dense + 2 * routed + 64 * 512


def test_the_width_of_dense_layers_must_be_divisible_too(shape) -> None:
    odd = replace(shape, ffn_hidden_size=130)
    with pytest.raises(LayoutError, match="130"):
        local_parameters(odd, Layout(tensor=4, expert=4), 0)
    with pytest.raises(LayoutError, match="130"):
        engine_parameters(odd, EngineLayout(4, 4), 0)


def test_adapters_are_those_of_matrices_that_the_layers_have(shape) -> None:
    modules = ("q_proj", "gate_proj", "up_proj", "down_proj")
    adapters = Adapters(rank=2, alpha=4.0, modules=modules)
    matrices = {name.removesuffix(".weight") for name in hf_tensors(shape)}
    adapted = {name.rpartition(".")[0] for name in adapter_tensors(adapters, shape)}
    assert adapted == {name for name in matrices if name.rpartition(".")[2] in modules}
    elements = sum(map(math.prod, adapter_tensors(adapters, shape).values()))
    assert trained_elements(shape, adapters, routers=True) == elements + 2 * 8 * 64


def test_groups_of_adapters_are_those_of_rows_that_a_layer_has(shape) -> None:
    assert module_groups(shape)["mlp"] == ("gate_proj", "up_proj", "down_proj")
    routed = replace(shape, dense_layers=())
    assert "mlp" not in module_groups(routed)
    wide = Adapters(rank=40, alpha=4.0, modules=("q_proj", "gate_proj"))
    faults = list(adapter_faults(wide, replace(routed, ffn_hidden_size=8), Layout()))
    # The experts' width is 32. The dense rows' width of 8 belongs to no matrix of this model.
    assert faults
    assert not [fault for fault in faults if " 8 " in fault]
