"""The adapters of a model and the parts that each rank has: names, shapes, and that the parts tile every tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.model.adapters import (
    Adapters,
    adapted_linears,
    adapter_faults,
    adapter_parameters,
    adapter_tensors,
    module_groups,
    resolve_modules,
)
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import adapter_buckets_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import local_parameters
from megatron_dppo.trainer.lora_modules import (
    INITS,
    AdapterOptions,
    DenseAdapter,
    grouped_linear,
    initial_tensor,
)
from megatron_dppo.trainer.lora_policy import fill
from tests.unit.config_files import DENSE, MOE, write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "model_configs"
LAYOUTS = {
    "single": Layout(),
    "TP2 ETP2": Layout.smallest(tensor=2),
    "TP2 EP2": Layout.smallest(tensor=2, expert=2),
    "EP4": Layout.smallest(expert=4),
    "CP2 EP2": Layout(context=2, expert=2),
    "TP2 CP2 EP4 DP2": Layout(tensor=2, context=2, expert=4, data=2),
    "PP2 VPP2 EP2": Layout.smallest(pipeline=2, virtual_pipeline=2, expert=2),
    "TP2 EP2 ETP2 DP4": Layout(2, 1, None, 2, 2, 4),
}


DELTA_NETS = ("qwen3-next-80b-a3b-instruct", "qwen3.5-35b-a3b")


def small_model(name):
    """Return the shape of the published model ``name`` with four layers, a few experts and small widths."""
    shape = load_model_shape(EXAMPLES / name)
    delta = replace(shape.delta, key_heads=4, value_heads=8, key_size=8, value_size=16)
    return replace(
        shape, num_layers=4, hidden_size=128, num_attention_heads=4, head_dim=16, num_experts=8,
        moe_ffn_hidden_size=32, shared_ffn_hidden_size=32, vocab_size=512, delta=delta,
    )  # fmt: skip


def adapters(shape, *names, share=False, rank=4):
    return Adapters(rank, 8.0, resolve_modules(names or ["all-linear"], shape), share)


@pytest.fixture
def moe(tmp_path):
    return load_model_shape(write_checkpoint(tmp_path / "moe", MOE))


@pytest.fixture
def dense(tmp_path):
    return load_model_shape(write_checkpoint(tmp_path / "dense", DENSE))


def test_tensors_of_a_model(moe):
    tensors = adapter_tensors(adapters(moe), moe)
    assert len(tensors) == 4 * (4 + 8 * 3) * 2
    assert tensors["model.layers.3.self_attn.k_proj.lora_A"] == (4, 64)
    assert tensors["model.layers.3.self_attn.k_proj.lora_B"] == (2 * 16, 4)
    assert tensors["model.layers.0.mlp.experts.7.down_proj.lora_A"] == (4, 32)
    assert tensors["model.layers.0.mlp.experts.7.down_proj.lora_B"] == (64, 4)


def test_a_shared_expert_has_adapters_of_its_own_in_the_experts_group(tmp_path):
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}
    shape = load_model_shape(write_checkpoint(tmp_path, MOE | shared))
    groups = module_groups(shape)
    assert set(groups) == {"attention", "experts", "head"}
    assert groups["experts"] == ("gate_proj", "up_proj", "down_proj")
    tensors = adapter_tensors(Adapters(2, 4.0, groups["experts"]), shape)
    assert tensors["model.layers.0.mlp.shared_expert.down_proj.lora_B"] == (64, 2)
    assert tensors["model.layers.0.mlp.experts.7.gate_proj.lora_A"] == (2, 64)
    assert len(tensors) == 4 * 2 * 3 * (8 + 1)


def test_matrices_before_latents_have_adapters_and_routers_have_none():
    """Each rank has both factors of a matrix that tensor parallelism does not cut, and rank 0 has the primary parts."""
    folder = EXAMPLES / "deepseek-v3"
    shape = replace(load_model_shape(folder), num_layers=4, num_experts=8)
    names = adapter_tensors(adapters(shape), shape)
    first = "model.layers.3.self_attn."
    assert {n.removeprefix(first).split(".")[0] for n in names if n.startswith(first)} == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
    }  # fmt: skip
    assert names[first + "kv_a_proj_with_mqa.lora_B"] == (512 + 64, 4)
    assert not [n for n in names if ".mlp.gate." in n or "layernorm" in n]
    in_mlp = [n for n in names if ".layers.0.mlp." in n]
    assert {n.split(".mlp.")[1] for n in in_mlp} == {
        f"{m}_proj.lora_{f}" for m in ("gate", "up", "down") for f in "AB"
    }
    model_adapters = adapters(shape, "q_a_proj")
    layout = Layout.smallest(tensor=2)
    parts_by_rank = [
        list(adapter_parameters(model_adapters, shape, layout, rank)) for rank in range(2)
    ]
    for parts in parts_by_rank:
        assert [p.shape for p in parts] == 4 * [(4, 7168), (1536, 4)]
    assert [p.is_primary for parts in parts_by_rank for p in parts] == 8 * [True] + 8 * [False]
    assert not list(adapter_faults(model_adapters, shape, layout))


def test_shared_by_the_experts_of_a_layer(moe):
    tensors = adapter_tensors(adapters(moe, "experts", share=True), moe)
    assert len(tensors) == 4 * 3 * 2
    assert tensors["model.layers.1.mlp.experts.*.up_proj.lora_B"] == (32, 4)


def test_a_rank_holds_what_belongs_to_its_part_of_the_matrix(dense):
    layout = Layout.smallest(tensor=2)
    parts = {
        p.segments[0].hf_name.removeprefix("model.layers.0."): (p.shape, p.segments[0])
        for p in adapter_parameters(adapters(dense), dense, layout, 1)
        if ".layers.0." in p.segments[0].hf_name
    }
    shape, segment = parts["self_attn.q_proj.lora_B"]
    assert (shape, segment.dim, segment.hf_start, segment.length) == ((256, 4), 0, 256, 256)
    shape, segment = parts["mlp.down_proj.lora_A"]
    assert (shape, segment.dim, segment.hf_start, segment.length) == ((4, 64), 1, 64, 64)
    assert parts["self_attn.q_proj.lora_A"][0] == (4, 64)
    assert parts["mlp.down_proj.lora_B"][0] == (64, 4)


def test_fused_rows_lie_where_the_fused_weight_has_them(dense):
    linear = adapted_linears(adapters(dense, "q_proj", "v_proj"), dense, Layout(), 0)[0]
    assert linear.path == "decoder.layers.0.self_attention.linear_qkv"
    query, value = linear.parts
    # Two query groups of [2 x 128 queries, 128 keys, 128 values].
    assert [(b.local_start, b.length) for b in query.blocks] == [(0, 256), (512, 256)]
    assert [(b.local_start, b.length) for b in value.blocks] == [(384, 128), (896, 128)]
    assert linear.rows == 1024


def test_rows_of_a_rank_are_neighbours_except_those_of_a_delta_nets_queries_keys_and_values():
    expected = {
        DELTA_NETS[0]: {"q_proj": [(64, 64)], "in_proj_qkvz": [(160, 160)], "in_proj_ba": [(8, 8)]},
        DELTA_NETS[1]: {
            "q_proj": [(64, 64)], "in_proj_qkv": [(16, 16), (48, 16), (128, 64)], "in_proj_z": [(64, 64)],
        },
    }  # fmt: skip
    for name, ranges_by_matrix in expected.items():
        shape = small_model(name)
        parts = {}
        for linear in adapted_linears(adapters(shape), shape, Layout.smallest(tensor=2), 1):
            parts |= {part.name: part for part in linear.parts}
        for matrix, ranges in ranges_by_matrix.items():
            assert list(parts[matrix].ranges) == ranges


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_primary_parts_tile_every_tensor_once(moe, layout, share):
    check_tiling(moe, layout, share=share)


@pytest.mark.parametrize("name", DELTA_NETS)
@pytest.mark.parametrize("layout", ["single", "TP2 ETP2", "TP2 EP2", "PP2 VPP2 EP2"])
def test_primary_parts_tile_the_tensors_of_delta_nets(name, layout):
    check_tiling(small_model(name), LAYOUTS[layout])


def check_tiling(shape, layout, *, share=False):
    """Assert that the ranks' primary parts of A and B have every element of the model's tensors once."""
    model_adapters = adapters(shape, share=share)
    covered = {
        name: torch.zeros(dims) for name, dims in adapter_tensors(model_adapters, shape).items()
    }
    for rank in range(layout.world_size):
        for p in adapter_parameters(model_adapters, shape, layout, rank):
            filled = torch.zeros(p.shape)
            for segment in p.segments:
                segment.of_local(filled).add_(1)
                segment.of_hf(covered[segment.hf_name]).add_(p.is_primary)
            assert (filled == 1).all()
    assert all((count == 1).all() for count in covered.values())


@pytest.mark.parametrize("name", DELTA_NETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_parts_are_the_parts_of_the_merged_matrix(name, ranks):
    """Compare each rank's B A, in the rows of its fused linear, with the part of the whole B A that the family's table
    gives to the rank."""
    shape = small_model(name)
    model_adapters, layout = adapters(shape), Layout.smallest(tensor=ranks)
    tensors = adapter_tensors(model_adapters, shape)
    torch.manual_seed(0)
    whole = {name: torch.randn(dims) for name, dims in tensors.items()}
    products = {}
    for tensor, a in whole.items():
        matrix, _, factor = tensor.rpartition(".")
        if factor == "lora_A":
            products[f"{matrix}.weight"] = whole[f"{matrix}.lora_B"] @ a

    def read(tensor, dims):
        return whole[tensor]

    options = AdapterOptions(model_adapters, 0.0, False, torch.float32, torch.device("cpu"))
    compared = set()
    for rank in range(ranks):
        linears = adapted_linears(model_adapters, shape, layout, rank)
        modules: list[Any] = [
            DenseAdapter(linear, options) for linear in linears if not linear.of_experts
        ]
        table = adapter_parameters(model_adapters, shape, layout, rank)
        fill(modules, (p for p in table if ".experts." not in p.name), read, tensors)
        weights = {p.name: p for p in local_parameters(shape, layout, rank)}
        for module in modules:
            name = f"{module.linear.path}.weight"
            expected = torch.zeros(weights[name].shape)
            for segment in weights[name].segments:
                segment.of_local(expected).copy_(segment.of_hf(products[segment.hf_name]))
            torch.testing.assert_close(module.weight_delta(), model_adapters.scale * expected)
            compared.add(name)
    names = [name.rpartition("self_attention.")[2] for name in compared]
    assert {"in_proj.weight", "out_proj.weight", "linear_qkv.weight"} <= set(names)


def test_buckets_hold_every_tensor_on_rank_0(moe):
    model_adapters, layout = adapters(moe), Layout.smallest(tensor=2, expert=2)
    plan = adapter_buckets_plan(model_adapters, moe, layout, 4096, 4)
    names = [tensor.name for bucket in plan for tensor in bucket.tensors]
    assert names == list(adapter_tensors(model_adapters, moe))
    assert {bucket.receiver for bucket in plan} == {0}
    assert max(bucket.elements * 4 for bucket in plan if len(bucket.tensors) > 1) <= 4096


@pytest.mark.parametrize("init", INITS)
def test_a_starts_with_the_spread_of_its_inputs_or_of_the_rank_and_b_at_zero(init):
    a = initial_tensor("m.lora_A", (16, 900), 16, 1, init)
    # Uniform within 1 / sqrt(in), as torch's own linears start and PEFT's A with them; or N(0, 1 / rank^2).
    std = {"kaiming": 1 / math.sqrt(3 * 900), "gaussian": 1 / 16}[init]
    assert a.std() == pytest.approx(std, rel=0.03)
    assert abs(a.mean()) < 0.03 * std
    if init == "kaiming":
        assert 0.99 / 30 < a.abs().max() <= 1 / 30
    else:
        assert 3 * std < a.abs().max() < 6 * std
    assert not initial_tensor("m.lora_B", (900, 16), 16, 1, init).any()


@pytest.mark.parametrize("init", INITS)
def test_every_a_starts_otherwise_and_the_same_each_time(moe, init):
    """The values depend only on the name of A and the run's seed, not on the rank that draws them."""
    tensors = adapter_tensors(adapters(moe), moe)
    initial_values = [
        initial_tensor(name, (2, 8), 4, seed, init)
        for seed in (1, 2)
        for name in tensors
        if name.endswith("lora_A")
    ]
    different_values = {tuple(a.flatten().tolist()) for a in initial_values}
    assert len(different_values) == len(initial_values) == len(tensors)
    name = next(iter(tensors))
    assert torch.equal(initial_tensor(name, (2, 8), 4, 1, init), initial_values[0])


class Operations(TorchDispatchMode):
    """Collects the names of the operators that run inside the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("dtype", "rank", "is_grouped"),
    [
        (torch.bfloat16, 8, True),
        (torch.float32, 4, True),
        # Rows of the product are 8 bytes apart, and the kernel needs multiples of 16.
        (torch.bfloat16, 4, False),
        (torch.float64, 8, False),
    ],
)
@pytest.mark.parametrize("tokens", [(3, 0, 5, 2), (0, 0, 0, 7), (0, 0, 0, 0)])
def test_experts_adapters_run_in_one_kernel_and_as_one_by_one(dtype, rank, is_grouped, tokens):
    torch.manual_seed(0)
    x = torch.randn(sum(tokens), 32, dtype=dtype, requires_grad=True)
    a = torch.randn(len(tokens), rank, 32, dtype=dtype, requires_grad=True)
    with Operations() as used:
        output = grouped_linear(x, a, tokens)
    pieces = x.split(list(tokens))
    expected_output = torch.cat([F.linear(piece, a[i]) for i, piece in enumerate(pieces)])
    gradient = torch.randn_like(output)
    actual_tensors = [output, *torch.autograd.grad(output, (x, a), gradient)]
    expected_tensors = [expected_output, *torch.autograd.grad(expected_output, (x, a), gradient)]
    torch.testing.assert_close(actual_tensors, expected_tensors)
    assert used.names.count("_grouped_mm") == int(is_grouped and sum(tokens) > 0)
