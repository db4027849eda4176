"""The proof of a resharding: each element arrives exactly once, in hundreds of layouts; planted faults are found."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.model import resharding
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError, ProofError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import Segment, engine_parameters, hf_tensors
from megatron_dppo.model.resharding import (
    check_filled,
    check_sources,
    check_tiling,
    prove_rank_filled,
    prove_resharding,
)
from megatron_dppo.model.shape import ModelShape
from tests.small_shapes import MOE

pytestmark = pytest.mark.second

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "model_configs"
PARAMETERS = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-30b-a3b-base": 30_532_122_624,
    "qwen3-30b-a3b-thinking-2507": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-8b-base": 8_190_735_360,
    "qwen3-4b-base": 4_022_468_096,
    "qwen3-1.7b-base": 1_720_574_976,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "octothinker-3b-hybrid-base": 3_212_749_824,
    "olmoe-1b-7b-0924-instruct": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "glm-4.5-air": 106_852_251_264,
    "glm-4.7-flash": 29_943_393_920,
    "moonlight-16b-a3b-instruct": 15_960_110_208,
    "deepseek-v3": 671_026_419_200,
    "hy3": 295_033_543_488,
    "minimax-m2": 228_689_764_864,
    "qwen3-next-80b-a3b-instruct": 79_674_391_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def real_shape(name: str) -> ModelShape:
    return load_model_shape(CONFIGS / name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_tables_hold_exactly_the_published_number_of_parameters(name):
    tensors = hf_tensors(real_shape(name))
    assert sum(math.prod(dims) for dims in tensors.values()) == PARAMETERS[name]


def prove_produced_once(shape: ModelShape, layout: Layout) -> None:
    """Check that the primary shards of all ranks hold every Hugging Face element exactly once."""
    for tensor in gather_plan(shape, layout):
        check_sources(tensor)


def dense_layouts(shape: ModelShape) -> list[Layout]:
    """Return the layouts of a grid of TP, PP, VPP and DP that divide the model."""
    layouts = []
    for tp, pp, vpp, dp in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 7, 9, 14), (None, 2, 3), (1, 2)
    ):
        try:
            layout = Layout(tp, pp, vpp, data=dp, expert_tensor=tp)
            prove_rank_filled(shape, layout, layout.world_size - 1)
        except LayoutError:
            continue
        layouts.append(layout)
    return layouts


@pytest.mark.parametrize("name", ["qwen3-8b-base", "deepseek-r1-distill-qwen-1.5b"])
def test_dense_models_on_every_layout_of_a_grid(name):
    shape = real_shape(name)
    layouts = dense_layouts(shape)
    assert len(layouts) >= 40
    # What an engine needs does not depend on the trainer's layout, so one engine for each layout is enough.
    engines = [e for e in map(EngineLayout, (1, 2, 4)) if shape.num_attention_heads % e.tensor == 0]
    for layout, engine in zip(layouts, itertools.cycle(engines), strict=False):
        report = prove_resharding(shape, layout, engine)
        assert report.model_bytes == 2 * PARAMETERS[name]
        assert sum(report.holds) == report.model_bytes
        assert max(report.engine) < report.model_bytes / engine.tensor * 1.02


MOE_LAYOUTS = [
    Layout.smallest(tp, pp, vpp, ep, etp)
    for tp, pp, vpp in (
        (1, 1, None),
        (2, 1, None),
        (4, 2, None),
        (8, 1, None),
        (2, 4, 3),
        (1, 16, None),
    )
    for ep, etp in ((1, 1), (4, 1), (8, 2))
]


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=Layout.describe)
def test_qwen3_30b_a3b(layout):
    shape = real_shape("qwen3-30b-a3b")
    engine = EngineLayout(8, 4)
    report = prove_resharding(shape, layout, engine)
    assert report.model_bytes == sum(report.holds) == 2 * PARAMETERS["qwen3-30b-a3b"]
    assert sum(report.direct) == sum(report.engine)
    prove_rank_filled(shape, layout, layout.world_size - 1)


@pytest.mark.parametrize("tp", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 8])
def test_all_of_qwen3_30b_a3b_on_every_layout_of_a_grid(tp):
    """All 18,867 tensors, without the engine's half of the proof: the trainer's layout does not change that half."""
    shape = real_shape("qwen3-30b-a3b")
    layouts = [
        Layout.smallest(tp, pp, vpp, ep, etp)
        for pp, vpp in ((1, None), (2, 3), (8, 2), (16, None))
        for ep, etp in ((1, 1), (4, 1), (8, 2), (32, 4))
    ]
    for layout in layouts:
        prove_produced_once(shape, layout)
        prove_rank_filled(shape, layout, layout.world_size - 1)
    assert len(set(layouts)) == 16


def test_every_layout_of_a_grid_with_the_widths_of_qwen3_30b_a3b():
    """Each pipeline chunk has two layers, each layer 16 experts of the real width: hundreds of layouts take seconds."""
    checked = 0
    for tp, pp, vpp, ep, etp, data_factor in itertools.product(
        (1, 2, 4, 8), (1, 2, 3), (None, 2), (1, 2, 8), (1, 2, 4), (1, 2)
    ):
        if vpp and pp == 1:
            continue
        shape = replace(real_shape("qwen3-30b-a3b"), num_layers=2 * pp * (vpp or 1), num_experts=16)
        layout = replace(
            Layout.smallest(tp, pp, vpp, ep, etp),
            data=Layout.smallest(tp, pp, vpp, ep, etp).data * data_factor,
        )
        prove_produced_once(shape, layout)
        for rank in {0, layout.world_size // 2, layout.world_size - 1}:
            prove_rank_filled(shape, layout, rank)
        checked += 1
    assert checked == 360


@pytest.mark.parametrize(
    ("tensor", "expert"), [(1, 1), (2, 2), (4, 1), (4, 4), (8, 2), (8, 8), (16, 4), (32, 32)]
)
def test_engine_layouts_of_a_moe(tensor, expert):
    shape = replace(real_shape("qwen3-30b-a3b"), num_layers=2)
    report = prove_resharding(shape, Layout(tensor=2), EngineLayout(tensor, expert), item_bytes=2)
    assert sum(report.direct) == sum(report.engine) >= report.model_bytes


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (EngineLayout(4, 4, 2), 2),
        (EngineLayout(4, 1, 4, output_per_replica=True), 4),
        (EngineLayout(8, 2, 2, output_per_replica=True), 2),
        (EngineLayout(8, 8, 8), 8),
    ],
    ids=str,
)
def test_engine_layouts_with_attention_replicas(layout, copies):
    """Each replica holds attention and the embedding, and with ``output_per_replica`` also the output matrix."""
    shape = replace(real_shape("qwen3-30b-a3b"), num_layers=2)
    report = prove_resharding(shape, Layout(tensor=2), layout, item_bytes=2)
    assert sum(report.direct) == sum(report.engine)
    vocabulary = shape.vocab_size * shape.hidden_size
    queries = 32 * 128 * shape.hidden_size
    keys = 4 * 128 * shape.hidden_size
    # A key-value head is on each rank that has query heads of its group.
    key_copies = copies * max(1, layout.attention_tensor // 4)
    attention = 2 * (2 * queries * copies + 2 * keys * key_copies)
    experts = 2 * 128 * 3 * 768 * shape.hidden_size
    outputs = vocabulary * (copies if layout.output_per_replica else 1)
    replicated = 2 * (2 * 128 + 2 * shape.hidden_size + 128 * shape.hidden_size) + shape.hidden_size
    elements = vocabulary * copies + attention + experts + outputs + layout.tensor * replicated
    assert sum(report.engine) == 2 * elements


def test_an_attention_replica_of_a_family_that_has_none_is_refused():
    shape = replace(real_shape("qwen3-8b-base"), family="llama")
    with pytest.raises(LayoutError, match="llama"):
        engine_parameters(shape, EngineLayout(2, 1, 2), 0)
    with pytest.raises(LayoutError, match="attn_dp_size: got 3"):
        EngineLayout(4, 1, 3)


def test_engine_bytes_worked_by_hand():
    """One layer at TP4 with 2 K/V heads: two ranks hold each K and V head, and all four hold norms and router."""
    shape = replace(
        MOE,
        num_layers=1,
        hidden_size=8,
        head_dim=2,
        vocab_size=64,
        num_experts=4,
        moe_ffn_hidden_size=2,
    )
    report = prove_resharding(shape, Layout(), EngineLayout(4, 2), item_bytes=1)
    vocabulary = 2 * 64 * 8 // 4
    attention = 2 * 8 + 2 * (2 * 8) + 8 * 2
    replicated = 8 * 3 + 2 * 2 + 4 * 8
    experts = 2 * (2 * 1 * 8 + 8 * 1)
    assert report.engine == (vocabulary + attention + replicated + experts,) * 4
    assert report.model_bytes == 2 * 64 * 8 + (64 + 32 + 32 + 64) + replicated + 4 * (3 * 2 * 8)
    parameters = {p.name: p for p in engine_parameters(shape, EngineLayout(4, 2), 3)}
    layer = "model.layers.0."
    qkv = [
        (s.hf_name[-13:], s.hf_start, s.length)
        for s in parameters[layer + "self_attn.qkv_proj.weight"].segments
    ]
    assert qkv == [("q_proj.weight", 6, 2), ("k_proj.weight", 2, 2), ("v_proj.weight", 2, 2)]
    w13 = parameters[layer + "mlp.experts.w13_weight[1]"].segments
    assert [(s.hf_name, s.hf_start, s.length) for s in w13] == [
        (layer + "mlp.experts.3.gate_proj.weight", 1, 1), (layer + "mlp.experts.3.up_proj.weight", 1, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "expert", "message"), [(3, 1, "32 attention heads"), (64, 64, "32 attention heads")]
)
def test_engine_layouts_that_do_not_divide_are_refused(tensor, expert, message):
    with pytest.raises(LayoutError, match=message):
        engine_parameters(real_shape("qwen3-30b-a3b"), EngineLayout(tensor, expert), 0)
    with pytest.raises(LayoutError, match="ep_size: got 3"):
        EngineLayout(4, 3)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 3), (4, 4)], "index 3"),
        ([(0, 5), (4, 4)], "index 4"),
        ([(0, 7)], "7 of 8"),
        ([], "expected one"),
    ],
)
def test_gaps_and_overlaps_are_found(segments, message):
    with pytest.raises(ProofError, match=message):
        check_tiling("w", (8, 2), [Segment("w", 0, start, 0, length) for start, length in segments])


def test_a_shard_that_is_not_filled_is_found():
    shape = replace(real_shape("qwen3-1.7b-base"), num_layers=1)
    parameters = {p.name: p for p in engine_parameters(shape, EngineLayout(2), 0)}
    qkv = parameters["model.layers.0.self_attn.qkv_proj.weight"]
    with pytest.raises(ProofError, match="1536 of 2048"):
        check_filled("here", replace(qkv, segments=qkv.segments[:2]), hf_tensors(shape), ())
    wrong_segment = replace(qkv.segments[2], hf_start=qkv.segments[2].hf_start + 1024)
    with pytest.raises(ProofError, match="fit"):
        check_filled(
            "here", replace(qkv, segments=(*qkv.segments[:2], wrong_segment)), hf_tensors(shape), ()
        )


def test_an_expert_shard_that_is_not_gathered_is_found(monkeypatch):
    """The planted fault: the plan gathers only the half of each expert that the first expert-tensor rank holds."""
    shape = replace(real_shape("qwen3-30b-a3b"), num_layers=1, num_experts=2)

    def plan_first_halves(*arguments):
        plan = gather_plan(*arguments)
        return [replace(t, pieces=t.pieces[:1]) if ".experts." in t.name else t for t in plan]

    monkeypatch.setattr(resharding, "gather_plan", plan_first_halves)
    with pytest.raises(ProofError, match=r"experts.0.gate_proj.weight: .* 384 of 768"):
        prove_resharding(shape, Layout(expert_tensor=2, data=2), EngineLayout())
