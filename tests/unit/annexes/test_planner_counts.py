"""The planner's counts of weights, caches and parked bytes, compared with the tensors that the core moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.cluster.planner.activations import layer_bytes
from megatron_dppo.cluster.planner.facts import Trained, rank_parameters, trainer_facts
from megatron_dppo.cluster.planner.server_memory import (
    kv_bytes_per_token,
    state_bytes,
    weight_bytes,
)
from megatron_dppo.cluster.planner.trainer_state import ParkedBytes, StateBytes, parked_bytes
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.families.shared.decoder import ATTENTION, QK_NORM, moe_router
from megatron_dppo.model.adapters import adapter_parameters
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.families import FAMILIES, load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import engine_parameters, local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.spec import ServersSpec, TrainerSpec
from tests.distributed.test_trainer_parity import run_config
from tests.planted_families import mixed_family, planted
from tests.tiny_models import save_tiny_model
from tests.unit.families.test_qwen3_5_moe import PUBLISHED
from tests.unit.families.test_qwen3_next import NEXT
from tests.unit.test_engine_checksums import model_shape
from tests.unit.test_engine_rows import table_of_each_kind
from tests.unit.test_mixed_layers import DENSE, LAYERS, LAYOUTS


def test_types_and_derived_tensors_of_an_engine_are_counted() -> None:
    shape = replace(model_shape(), num_layers=2, dtype="bfloat16")
    plain = FAMILIES["qwen3_moe"]
    with planted(replace(plain, layer=(*ATTENTION, *QK_NORM, *moe_router()), engine=())):
        before = weight_bytes.__wrapped__(shape, EngineLayout(1))
    gates, norms = 2 * 3 * 8, 2 * 8
    with planted(table_of_each_kind()):
        counted_bytes = weight_bytes.__wrapped__(shape, EngineLayout(1))
    assert counted_bytes == before + 2 * gates + 2 * norms


@pytest.fixture(scope="module")
def mixed_layers(tmp_path_factory) -> Iterator[ModelShape]:
    """A model with dense layers among layers with experts."""
    folder = tmp_path_factory.mktemp("mixed")
    with planted(mixed_family()):
        save_tiny_model(folder, "qwen3_moe", layers=LAYERS, mlp_only_layers=list(DENSE))
        yield load_model_shape(folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_the_parameters_of_each_rank_are_counted_by_layer(
    mixed_layers: ModelShape, layout: Layout
) -> None:
    for rank in range(layout.world_size):
        held = sum(math.prod(p.shape) for p in local_parameters(mixed_layers, layout, rank))
        stage = layout.coordinates(rank).pp
        assert rank_parameters(mixed_layers, layout, stage).elements == held


def test_the_weights_of_an_engine_s_rank_are_counted_by_layer(mixed_layers: ModelShape) -> None:
    layout = EngineLayout(2, 2)
    held = sum(math.prod(p.shape) for p in engine_parameters(mixed_layers, layout, 0))
    assert weight_bytes(mixed_layers, layout) == 2 * held


def test_the_cache_of_attention_and_the_states_of_delta_nets_are_counted() -> None:
    """12 layers have 2 heads of 256 in the cache. 36 have 32 matrices of 128 x 128 in fp32, and 3 tokens of 8192."""
    shape = load_model_shape(NEXT)
    engine = ServersSpec(1, (), "cuda", EngineLayout(4, 4), {}, 1, (), True, False)
    assert kv_bytes_per_token(shape, engine) == 12 * 2 * 1 * 256 * 2
    state = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert state_bytes(shape, engine) == state // 4


@pytest.mark.parametrize("folder", [NEXT, PUBLISHED], ids=["qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2, expert=4, data=2), Layout(pipeline=4, expert=8, data=8)],
    ids=Layout.describe,
)
def test_the_adapters_of_each_rank_are_counted(folder: Path, layout: Layout) -> None:
    shape = load_model_shape(folder)
    trained = Trained.of(LoraConfig(rank=8), shape)
    assert trained is not None
    for rank in range(0, layout.world_size, layout.stage_ranks):
        parts = adapter_parameters(trained.adapters, shape, layout, rank)
        held = sum(math.prod(part.shape) for part in parts)
        stage = layout.coordinates(rank).pp
        assert trained.parameters(shape, layout, stage).elements == held


def test_a_delta_net_with_adapters_keeps_more_than_without() -> None:
    def kept_bytes(lora: dict[str, int]) -> float:
        config = run_config(str(NEXT), {}, {"lora": lora})
        shape = load_model_shape(NEXT)
        spec = TrainerSpec.of(config, shape)
        trainer = trainer_facts(config, spec, shape, 1, 256, gpu=False)
        return layer_bytes(trainer, number=0).projections

    assert kept_bytes({"rank": 8}) > kept_bytes({})


def test_parked_bytes_by_hand() -> None:
    state = StateBytes(weights=100, reference=0, gradients=200, optimizer=600)
    assert parked_bytes(state) == ParkedBytes(device=900, host=128 + 1024)
    assert parked_bytes(state, ["gradients", "optimizer"]) == ParkedBytes(800, 1024)
