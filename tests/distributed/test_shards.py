"""Trainer ranks send shards to engine ranks over gloo. The engine's tensors, and the checksums that the trainer expects
of them, equal those of whole tensors, bit for bit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.block_fp8 import encode
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters, own_dtypes
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EngineTensors, ExpectedChecksums
from megatron_dppo.weights.links import Link, connect_store
from megatron_dppo.weights.server.direct_loading import TensorPlaces
from megatron_dppo.weights.server.shards import INSTRUCTION, IncomingShards, Instruction, PlanFacts
from megatron_dppo.weights.server.weight_groups import new_name
from megatron_dppo.weights.shards import Shards
from tests.ranks import run_ranks
from tests.unit.test_direct_loading import held

pytestmark = pytest.mark.distributed

LIMIT = timedelta(seconds=60)
DTYPE = torch.bfloat16
SHAPE = ModelShape(
    family="qwen3_moe", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, head_dim=16,
    ffn_hidden_size=64, vocab_size=515, tied_embeddings=False, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
    max_position_embeddings=64, dtype="bfloat16", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=48,
)  # fmt: skip
ONE = EngineLayout()
TWO = EngineLayout(2)

FP8_SHAPE = replace(
    SHAPE, num_layers=2, hidden_size=256, num_query_groups=4, head_dim=64, moe_ffn_hidden_size=768
)

# Name -> the trainer's layout, and the servers' layouts.
CASES = {
    "one to one": (Layout(), [ONE]),
    "TP2 to TP2": (Layout(tensor=2, expert_tensor=2), [TWO]),
    "TP2 to TP1, columns of rows": (Layout(tensor=2, expert_tensor=2), [ONE]),
    "EP2 to TP2": (Layout(data=2, expert=2), [TWO]),
    "EP4 to two servers": (Layout(data=4, expert=4), [TWO, TWO]),
    "TP2 PP2 EP2 to EP2": (Layout(tensor=2, pipeline=2, expert=2), [EngineLayout(2, 2)]),
    "PP2 VPP2 to attention replicas": (
        Layout(pipeline=2, virtual_pipeline=2),
        [EngineLayout(4, 2, attention_replicas=2)],
    ),
    "TP4 ETP2 to TP4": (Layout(tensor=4, expert=2, expert_tensor=2), [EngineLayout(4)]),
    "CP2 DP2 to servers of several layouts": (Layout(context=2, data=2), [ONE, TWO]),
    "DP2 to two servers on each of two hosts": (Layout(data=2), [ONE] * 4),
}
# Pieces of 64 rows or columns, and of 192, are no whole blocks of block FP8.
FP8_CASES = {
    "one to two": (Layout(), [TWO]),
    "TP4 to TP2": (Layout(tensor=4, expert_tensor=4), [TWO]),
    "ETP2 to TP1": (Layout(data=2, expert_tensor=2), [ONE]),
    "TP2 EP2 to EP2": (Layout(tensor=2, expert=2), [EngineLayout(2, 2)]),
}
TRAINERS, ENGINES = 4, 4


def whole_tensors(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    own = own_dtypes(shape)
    tensors = {}
    for name, dims in hf_tensors(shape).items():
        dtype = getattr(torch, own[name]) if name in own else DTYPE
        tensors[name] = torch.randn(dims, generator=generator).to(dtype)
    return tensors


def trainer_values(
    shape: ModelShape, layout: Layout, rank: int, whole: Mapping[str, Tensor]
) -> dict[Any, Tensor]:
    values = {}
    for parameter in local_parameters(shape, layout, rank):
        dtype = whole[parameter.segments[0].hf_name].dtype
        local = torch.zeros(parameter.shape, dtype=dtype)
        for segment in parameter.segments:
            segment.of_local(local).copy_(segment.of_hf(whole[segment.hf_name]))
        values[parameter.chunk, parameter.name] = local
    return values


def expected_of(table: EngineTensors, whole: Mapping[str, Tensor]) -> list[dict[str, str]]:
    """Return the checksums of an engine's tensors, from whole tensors."""
    expected = ExpectedChecksums(table, DTYPE)
    encoded = list(whole.items())
    if table.quantized:
        encoded = [pair for item in whole.items() for pair in encode(*item)]
    expected.add(encoded)
    return expected.digests([expected.partial()])


def all_max(values: Tensor) -> Tensor:
    """Return the maximum over the trainer ranks. Every trainer rank sends, if a case has several."""
    dist.all_reduce(values, dist.ReduceOp.MAX, group=ALL_TRAINERS[0])
    return values


ALL_TRAINERS: list[Any] = []
"""The group of the present case's trainer ranks."""


def transfer(
    shape: ModelShape,
    facts: PlanFacts,
    whole: Mapping[str, Tensor],
    device: str,
    spoil: Callable[[int, Any, Tensor], None] | None = None,
) -> dict[str, Any]:
    """Send ``whole`` from the first ranks to the ranks from TRAINERS on. Collective over all ranks of the test.

    Returns whether this rank's side has the checksums of whole tensors.
    """
    rank = dist.get_rank()
    plan = facts.plan(shape)
    engines = sum(layout.tensor for layout in facts.servers)
    group_ranks = [*plan.members, *range(TRAINERS, TRAINERS + engines)]
    group = dist.new_group(group_ranks, backend="gloo")
    ALL_TRAINERS[:] = [dist.new_group(list(plan.members), backend="gloo")]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = connect_store(address, port, LIMIT.total_seconds())
    if rank in plan.members:
        shards = Shards(shape, facts, device, rank)
        values = trainer_values(shape, facts.layout, rank, whole)
        link = Link(group, store, LIMIT, torch.device("cpu"))
        shards.prepare(values, all_max)
        checksums = shards.checksums()
        for message in shards.messages:
            (data,) = shards.pack([message], values)
            checksums.add([message], [data])
            if spoil is not None:
                spoil(rank, message, data)
            link.wait(link.start([(data, len(plan.members) + message.column[0])], []))
        partials: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(partials, checksums.partials())
        digests = shards.digests([p for p in partials if p is not None])
        tables = {
            layout: EngineTensors(shape, layout, device, quantized=facts.quantized)
            for layout in facts.servers
        }
        is_right = all(
            digests[layout, device] == expected_of(table, whole) for layout, table in tables.items()
        )
        return {"is_right": is_right}
    if rank < TRAINERS or rank >= TRAINERS + engines:
        dist.all_gather_object([None] * dist.get_world_size(), None)
        return {"is_right": True}
    own = [(layout, i) for layout in facts.servers for i in range(layout.tensor)]
    layout, engine_rank = own[rank - TRAINERS]
    table = EngineTensors(shape, layout, device, quantized=facts.quantized)
    tensors = held(table, engine_rank)
    places = TensorPlaces(table, engine_rank, tensors)
    places.fill_padding()
    instruction = Instruction(facts, plan.fingerprint, address, port)
    incoming = IncomingShards(INSTRUCTION.dump_json(instruction).decode(), group, new_name(LIMIT))
    kept = incoming.receive(places.placements)
    assert kept == []
    dist.all_gather_object([None] * dist.get_world_size(), None)
    expected = expected_of(table, whole)[engine_rank]
    wrong = [name for name, tensor in tensors.items() if tiled_hash(tensor) != expected[name]]
    return {"is_right": not wrong, "wrong": wrong}


def transfers(
    cases: dict[str, Any],
    message_bytes: int,
    device: str,
    *,
    quantized: bool = False,
    planted: Sequence[tuple[str, int, int, float]] = (),
) -> dict[str, Any]:
    """Run the transfers of ``cases``. ``planted``: name, row and column of elements, and their values."""
    dist.init_process_group("gloo")
    shape = FP8_SHAPE if quantized else SHAPE
    whole = whole_tensors(shape)
    for name, row, column, value in planted:
        whole[name][row, column] = value
    reports = {}
    for name, (layout, servers) in cases.items():
        facts = PlanFacts(
            Layout(**layout),
            tuple(EngineLayout(**server) for server in servers),
            message_bytes,
            "bfloat16",
            quantized=quantized,
            hosts=tuple(number // 2 for number in range(len(servers))),
        )
        reports[name] = transfer(shape, facts, whole, device)
    return reports


def assert_right(cases: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
    as_json = {
        name: (asdict(layout), [asdict(server) for server in servers])
        for name, (layout, servers) in cases.items()
    }
    worker = "tests.distributed.test_shards:transfers"
    ranks = run_ranks(worker, TRAINERS + ENGINES, as_json, *arguments, **options)
    for name in cases:
        reports = [rank_reports[name] for rank_reports in ranks]
        assert all(report["is_right"] for report in reports), (name, reports)


@pytest.mark.parametrize(
    ("message_bytes", "device"), [(30_000, "cpu"), (1_000_000, "cuda")], ids=str
)
def test_every_engine_rank_has_what_whole_tensors_give_it(message_bytes: int, device: str) -> None:
    assert_right(CASES, message_bytes, device)


def test_blocks_of_fp8_are_those_of_whole_matrices() -> None:
    assert_right(FP8_CASES, 100_000, "cpu", quantized=True)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf], ids=["nan", "-nan", "inf"])
def test_a_nan_in_any_piece_of_a_block_of_fp8_reaches_the_engines(value: float) -> None:
    """With TP4 two ranks have 64 rows, or columns, of a block each. Element 0 is on the first of them, 127 on the
    second: the scale of the whole block is NaN or infinite on both."""
    layer = "model.layers.{}.self_attn.{}_proj.weight"
    planted = [
        (layer.format(0, "k"), 0, 5, value),
        (layer.format(1, "k"), 127, 200, value),
        (layer.format(0, "o"), 5, 0, value),
        (layer.format(1, "o"), 130, 127, value),
    ]
    cases = {"TP4 to TP2": FP8_CASES["TP4 to TP2"]}
    assert_right(cases, 100_000, "cpu", quantized=True, planted=planted)
