"""SGLang's tensors as a table: names, sources, types and 1 + weight. Checksums find a fault in each kind of row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_dppo.families.shared.decoder import ATTENTION, QK_NORM, gemma_norm, moe_router
from megatron_dppo.model import splits
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.families import FAMILIES, Family
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.resharding import prove_resharding
from megatron_dppo.model.rows import EngineRow, dense_layers, engine_row, layer_rule
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EngineTensors
from megatron_dppo.weights.verification import compare_checksums
from tests.engine_digests import expected_digests, mismatched_tensors, random_weights
from tests.planted_families import planted, planted_in_each_test
from tests.unit.test_direct_loading import assert_places, digests, hashes, weights
from tests.unit.test_engine_checksums import model_shape
from tests.unit.test_weight_changes import ServedTensors, train_bucket

FUSED = engine_row(
    "self_attn.fused_norms.weight",
    splits.replicated,
    ("self_attn.q_norm.weight", ("head",)),
    ("self_attn.k_norm.weight", ("head",)),
)
QK = engine_row(
    "self_attn.qk_proj.weight",
    splits.column_parallel,
    ("self_attn.q_proj.weight", ("query", "hidden")),
    ("self_attn.k_proj.weight", ("kv", "hidden")),
)
V = engine_row(
    "self_attn.v_proj.weight", splits.column_parallel, ("self_attn.v_proj.weight", ("kv", "hidden"))
)
GATE = "model.layers.{}.mlp.gate.weight"
ONE_PLUS = "model.layers.{}.input_layernorm.gemma_weight"


def table_of_each_kind() -> Family:
    """A table with every kind of row: a float32 tensor, a norm that holds 1 + weight, a tensor with the sources of two
    rows (FUSED), and two tensors with the sources of one row (QK and V)."""
    _, *attention = ATTENTION
    return replace(
        FAMILIES["qwen3_moe"],
        layer=(
            gemma_norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            *attention,
            *QK_NORM,
            *moe_router(engine_dtype="float32"),
        ),
        engine=(FUSED, QK, V),
    )


family = planted_in_each_test(table_of_each_kind)


@pytest.fixture
def shape() -> ModelShape:
    return replace(model_shape(), num_layers=2, dtype="bfloat16")


def layer_in_engine(hf: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The tensors of one layer that ``table_of_each_kind`` names, as SGLang's loader builds them."""
    prefix = f"model.layers.{layer}."
    attention = f"{prefix}self_attn."
    norm = hf[f"{prefix}input_layernorm.weight"]
    return {
        f"{attention}fused_norms.weight": torch.cat(
            [hf[f"{attention}q_norm.weight"], hf[f"{attention}k_norm.weight"]]
        ),
        f"{attention}qk_proj.weight": torch.cat(
            [hf[f"{attention}q_proj.weight"], hf[f"{attention}k_proj.weight"]]
        ),
        f"{attention}v_proj.weight": hf[f"{attention}v_proj.weight"],
        f"{prefix}input_layernorm.weight": norm,
        ONE_PLUS.format(layer): norm.clone().add_(1.0),
        GATE.format(layer): hf[GATE.format(layer)].float(),
    }


def in_engine(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    return layer_in_engine(hf, 0) | layer_in_engine(hf, 1)


def test_rows_of_each_kind_have_the_bytes_that_sglang_builds(shape: ModelShape) -> None:
    hf = random_weights(shape)
    (got,) = expected_digests(shape, hf)
    engine = in_engine(hf)
    assert {name: got[name] for name in engine} == {n: tiled_hash(t) for n, t in engine.items()}
    absent = ("qkv_proj", "q_norm", "k_norm")
    assert not [name for name in got if any(part in name for part in absent)]


# Each of these faults changes one of the engine's tensors, and returns its name.
def mixed_up_halves(engine: dict[str, Tensor], hf: dict[str, Tensor]) -> str:
    name = "model.layers.1.self_attn.fused_norms.weight"
    engine[name] = engine[name].roll(len(engine[name]) // 2)
    return name


def half_of_the_update_before(engine: dict[str, Tensor], hf: dict[str, Tensor]) -> str:
    name = "model.layers.1.self_attn.qk_proj.weight"
    rows = len(hf["model.layers.1.self_attn.q_proj.weight"])
    engine[name][rows:] = torch.ones_like(engine[name][rows:])
    return name


def missing_one(engine: dict[str, Tensor], hf: dict[str, Tensor]) -> str:
    name = ONE_PLUS.format(0)
    engine[name] = hf["model.layers.0.input_layernorm.weight"]
    return name


def type_of_the_model(engine: dict[str, Tensor], hf: dict[str, Tensor]) -> str:
    name = GATE.format(0)
    engine[name] = hf[name]
    return name


def rows_of_another_layer(engine: dict[str, Tensor], hf: dict[str, Tensor]) -> str:
    name = "model.layers.1.self_attn.v_proj.weight"
    engine[name] = hf["model.layers.0.self_attn.v_proj.weight"]
    return name


FAULTS = [
    mixed_up_halves,
    half_of_the_update_before,
    missing_one,
    type_of_the_model,
    rows_of_another_layer,
]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_named(shape: ModelShape, plant) -> None:
    hf = random_weights(shape)
    engine = in_engine(hf)
    name = plant(engine, hf)
    assert mismatched_tensors(shape, hf, engine) == [name]


def test_an_update_with_the_rows_of_another_layer_is_named(shape: ModelShape) -> None:
    """The trainer computes the expected checksums from the stream that it sends. If two layers are exchanged in the
    stream, only the checksums of the two tensors that this stream fills may differ."""
    hf = random_weights(shape)
    swapped = dict(hf)
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        swapped[name] = hf[f"model.layers.{1 - layer}.self_attn.k_proj.weight"]
    mismatches = compare_checksums(expected_digests(shape, swapped), expected_digests(shape, hf))
    assert {m.tensor for m in mismatches} == {
        f"model.layers.{layer}.self_attn.qk_proj.weight" for layer in (0, 1)
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_element_lands_in_every_tensor_that_needs_it(shape: ModelShape, ranks: int) -> None:
    report = prove_resharding(shape, Layout(tensor=2, expert_tensor=2), EngineLayout(ranks))
    assert sum(report.holds) == report.model_bytes
    assert len(expected_digests(shape, random_weights(shape), ranks)) == ranks


def test_a_row_of_the_engine_holds_for_its_layers_only(shape: ModelShape) -> None:
    table = FAMILIES["qwen3_moe"]
    in_no_layer = replace(FUSED, layers=dense_layers)
    with planted(replace(table, engine=(in_no_layer, QK, V))):
        (got,) = expected_digests(shape, random_weights(shape))
    assert "model.layers.0.self_attn.q_norm.weight" in got
    assert FUSED.name.format(layer=0) not in got


def test_a_rule_can_name_the_type_of_the_engine_s_tensor() -> None:
    sources = (("mlp.gate.bias", ("experts",)),)
    rule = layer_rule("mlp.router.bias", splits.replicated, *sources, engine_dtype="float32")
    name = "model.layers.{layer}.mlp.gate.bias"
    assert rule.in_engine == (EngineRow(name, splits.replicated, rule.sources, "float32"),)


def test_changes_of_tensors_that_the_engine_also_holds_as_1_plus_them(shape: ModelShape) -> None:
    table = EngineTensors(shape)
    assert table.hold_what_is_sent
    base = weights(shape)
    new = train_bucket(base)
    served = ServedTensors(table, base)
    served.change(new)
    assert hashes(served.tensors[0]) == digests(table, new)[0]
    norm = "model.layers.1.input_layernorm.weight"
    table.parts[norm] = [part for part in table.parts[norm] if part.adds_one]
    assert not table.hold_what_is_sent


def test_rows_of_each_kind_are_placed(shape: ModelShape) -> None:
    assert_places(EngineTensors(shape), weights(shape))
