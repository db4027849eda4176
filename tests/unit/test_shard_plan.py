"""The plan of an update in which every engine rank receives only what it keeps.

It is compared with hand-worked plans, proved on a thousand drawn layouts, and carried out element by element; planted
faults are found. ``annexes/test_weight_plan.py`` proves it on the layouts of all recipes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError, ProofError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.shard_plan import Message, ShardPlan, prove_shards, scales_of, shard_plan
from megatron_dppo.weights.checksums import EngineTensors
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "model_configs"
MIB = 2**20


def real_shape(name: str, **changes: Any) -> ModelShape:
    return replace(load_model_shape(CONFIGS / name), **changes)


MOE = real_shape("qwen3-30b-a3b", num_layers=4, num_experts=8, vocab_size=1000)


def proved(
    shape: ModelShape,
    layout: Layout,
    servers: list[EngineLayout],
    message_bytes: int = 8 * MIB,
    *,
    quantized: bool = False,
) -> ShardPlan:
    """Return the plan after its proof. Check that no engine rank receives more than it keeps."""
    plan = shard_plan(shape, layout, servers, message_bytes, 2, quantized=quantized)
    prove_shards(plan, shape, layout, servers, quantized=quantized)
    received = tuple(plan.received[rank] for rank in range(len(plan.kept)))
    assert received == plan.kept
    return plan


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("engine", [EngineLayout(2), EngineLayout(4, 2, attention_replicas=2)])
def test_the_bound_is_what_the_tables_of_the_engine_hold(
    engine: EngineLayout, *, quantized: bool
) -> None:
    plan = proved(MOE, Layout(), [engine], quantized=quantized)
    table = EngineTensors(MOE, engine, quantized=quantized)
    assert table.kept_bytes(torch.bfloat16) == plan.bound
    # Without padding. Attention and the embedding are on as many ranks as there are replicas.
    held = sum(torch.Size(dims).numel() for dims in table.shapes.values())
    assert quantized or plan.bound >= 2 * held


def slices_of(
    plan: ShardPlan, name: str
) -> list[tuple[int, tuple[int, ...], int, int, tuple[int, ...]]]:
    """Return sender, column, first index, step of the first receiver and shape of the slices of one tensor."""
    return [
        (message.sender, message.column, part.block_part.hf_start, message.step, part.shape)
        for message in plan.messages
        for part in message.slices
        if part.name == name
    ]


def test_two_trainer_ranks_and_two_servers_of_two_ranks_by_hand() -> None:
    """Both divide the model by two in the same way: trainer rank r sends to rank r of both servers, in one column."""
    plan = proved(MOE, Layout(2, expert_tensor=2), [EngineLayout(2)] * 2, 1 << 30)
    matrix = "model.layers.1.self_attn.o_proj.weight"
    # 2048 rows and 4096 columns; each rank has 2048 columns. The cut is along dim 1.
    assert slices_of(plan, matrix) == [
        (1, (1, 3), 0, 0, (2048, 2048)),
        (0, (0, 2), 0, 2, (2048, 2048)),
    ]
    # Every rank holds the norms. They are less than a message, so one rank sends them to all. They arrive at engine
    # rank r in step r. If trainer rank 0 sent its matrix in step 1, it would arrive at rank 2 together with the norms.
    norms = slices_of(plan, "model.norm.weight")
    assert norms == [(0, (0, 1, 2, 3), 0, 0, (2048,))]
    # Rows 500 to 511 of the vocabulary are on trainer rank 1 and on engine rank 0.
    assert plan.connections == {
        *(("trainer", 0, 0), ("trainer", 1, 1), ("trainer", 1, 0)),
        *(("engine", 0, 2), ("engine", 1, 3), ("engine", 0, 1), ("engine", 1, 2), ("engine", 2, 3)),
    }
    elements = sum(torch.Size(dims).numel() for dims in hf_tensors(MOE).values())
    assert sum(plan.sent.values()) < 2 * elements * 1.001
    # In SGLang rank 0 has 512 rows of the vocabulary, and rank 1 has 488 rows.
    assert plan.kept[0] - plan.kept[1] == 2 * 2 * 2048 * (512 - 488)


def test_a_matrix_whose_cuts_cross() -> None:
    """The trainer divides the experts' rows, and the engine divides whole experts: each piece is sent whole."""
    layout, engine = Layout.smallest(2, expert=2, expert_tensor=2), EngineLayout(2, 2)
    down = "model.layers.0.mlp.experts.5.down_proj.weight"
    slices = slices_of(proved(MOE, layout, [engine]), down)
    # Expert 5 is on trainer ranks 2 and 3, which have 384 of its 768 columns, and on engine rank 1.
    assert [(sender, column, first, dims) for sender, column, first, _, dims in slices] == [
        (2, (1,), 0, (2048, 384)),
        (3, (1,), 384, (2048, 384)),
    ]


def test_replicas_share_the_bytes_that_they_send() -> None:
    """Eight replicas of a model of one rank, and a server of one rank: each sends an eighth."""
    plan = proved(MOE, Layout(data=8), [EngineLayout(1)], MIB)
    sent = plan.sent
    assert sorted(sent) == list(range(8))
    assert max(sent.values()) < 1.02 * min(sent.values())
    # A message is never larger than a bucket: an index of a slice has at most 8 KiB.
    assert max(message.bytes for message in plan.messages) <= MIB
    few = proved(MOE, Layout(data=8), [EngineLayout(1)], 1 << 40)
    assert sorted(few.sent) == [0]
    assert len(few.messages) == 1


def test_the_copies_of_attention_replicas_and_key_value_heads_are_one_column() -> None:
    engine = EngineLayout(8, 8, attention_replicas=4)
    plan = proved(MOE, Layout(), [engine])
    queries = "model.layers.0.self_attn.q_proj.weight"
    columns = {tuple(sorted(column)) for _, column, *_ in slices_of(plan, queries)}
    assert columns == {(0, 2, 4, 6), (1, 3, 5, 7)}
    # Four key-value heads on eight ranks: neighbours hold the same head.
    keys = "model.layers.0.self_attn.k_proj.weight"
    plan = proved(MOE, Layout(), [EngineLayout(8, 8)])
    columns = {tuple(sorted(column)) for _, column, *_ in slices_of(plan, keys)}
    assert columns == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_the_servers_of_a_host_take_turns_at_the_network() -> None:
    """Five servers of one rank on hosts 0, 1, 0, 1 and 1. Each message enters each host once, at another rank."""
    hosts = (0, 1, 0, 1, 1)
    servers = [EngineLayout(1)] * 5
    plan = shard_plan(MOE, Layout(), servers, 16 * MIB, 2, hosts=hosts)
    prove_shards(plan, MOE, Layout(), servers)
    assert {message.column for message in plan.messages} == {
        (0, 2, 1, 3, 4),
        (2, 0, 3, 4, 1),
        (0, 2, 4, 1, 3),
        (2, 0, 1, 3, 4),
        (0, 2, 3, 4, 1),
        (2, 0, 4, 1, 3),
    }
    ports = Counter[int]()
    for message, hop in plan.hops:
        if not hop.is_local:
            ports[hop.receiver] += message.bytes
    for rank, servers_of_host in enumerate((2, 3, 2, 3, 3)):
        assert ports[rank] == pytest.approx(plan.kept[rank] / servers_of_host, abs=32 * MIB)
    # In a step each rank receives at most one message from its host, and one from the network.
    taken = Counter((hop.receiver, hop.is_local, m.step + hop.steps) for m, hop in plan.hops)
    assert set(taken.values()) == {1}


def test_a_message_enters_a_host_while_the_one_before_is_sent_on() -> None:
    plan = shard_plan(MOE, Layout(), [EngineLayout(1)] * 2, 16 * MIB, 2, hosts=(0, 0))
    for number, message in enumerate(plan.messages):
        assert message.step == number
        assert message.column == ((0, 1) if number % 2 == 0 else (1, 0))


def test_servers_of_different_layouts() -> None:
    plan = proved(
        MOE, Layout(2, 2, expert_tensor=2), [EngineLayout(4), EngineLayout(2, 2), EngineLayout(1)]
    )
    assert len(plan.kept) == 7
    assert plan.received == dict(enumerate(plan.kept))


def test_a_tied_output_matrix_is_sent_once() -> None:
    shape = replace(MOE, tied_embeddings=True)
    plan = proved(shape, Layout(), [EngineLayout(2)])
    parts = slices_of(plan, "model.embed_tokens.weight")
    assert sum(dims[0] for *_, dims in parts) == 1000
    # With attention replicas every rank holds the whole embedding, and a part of the output matrix.
    replicas = shard_plan(shape, Layout(), [EngineLayout(2, attention_replicas=2)], MIB, 2)
    prove_shards(replicas, shape, Layout(), [EngineLayout(2, attention_replicas=2)])
    assert sum(replicas.received.values()) - replicas.bound == 2 * 2048 * 1000


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_block_fp8_sends_bytes_and_scales(tensor: int) -> None:
    layout = Layout(tensor, expert_tensor=tensor)
    plan = proved(MOE, layout, [EngineLayout(2)], quantized=True)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert {part.item_bytes for m in plan.messages for part in m.slices if part.name == name} == {1}
    # 768 rows and 2048 columns have 6 x 16 blocks. Of four ranks each has 192 rows, a block and a half.
    assert (
        sum(torch.Size(dims).numel() for *_, dims in slices_of(plan, f"{name}_scale_inv")) == 6 * 16
    )
    (tensor_sources,) = [t for t in gather_plan(MOE, layout) if t.name == name]
    starts = [
        (p.rank, p.segment.hf_start, p.segment.local_start)
        for p in scales_of(tensor_sources).pieces
    ]
    by_hand = {
        1: [(0, 0, 0)],
        2: [(0, 0, 0), (1, 3, 0)],
        4: [(0, 0, 0), (1, 2, 1), (2, 3, 0), (3, 5, 1)],
    }
    assert starts == by_hand[tensor]
    # Larger items come first in a message.
    for message in plan.messages:
        sizes = [part.item_bytes for part in message.slices]
        assert sizes == sorted(sizes, reverse=True)


def drawn_layouts(draw: random.Random) -> tuple[ModelShape, Layout, list[EngineLayout]]:
    """Draw a model, a trainer layout and servers. Raises LayoutError for sizes that do not fit."""
    shape = draw.choice(SMALL)
    pipeline = draw.choice((1, 1, 2, 3))
    uneven = pipeline > 1 and draw.random() < 0.5
    tensor, expert, expert_tensor = (draw.choice((1, 2, 4)) for _ in range(3))
    layout = Layout(
        tensor,
        pipeline,
        draw.choice((None, 2)) if pipeline > 1 and not uneven else None,
        expert if shape.is_moe else 1,
        expert_tensor if shape.is_moe else tensor,
        draw.choice((1, 2, 3, 4)),
        context=draw.choice((1, 1, 2)),
        first_stage_layers=1 if uneven else None,
    )
    servers = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        ranks = draw.choice((1, 2, 4, 8))
        replicas = draw.choice((1, 1, 2))
        server = EngineLayout(ranks, draw.choice((1, 2, 4)) if shape.is_moe else 1, replicas)
        servers.append(server)
    if draw.random() < 0.7:
        servers = servers[:1] * len(servers)
    return shape, layout, servers


SMALL = [
    real_shape(name, num_layers=layers, vocab_size=vocab, **experts)
    for name, layers, vocab, experts in (
        ("qwen3-30b-a3b", 2, 1000, {"num_experts": 4}),
        ("qwen3-1.7b-base", 2, 1000, {}),
        ("qwen3-8b-base", 3, 999, {}),
        ("glm-4.5-air", 3, 1000, {"num_experts": 4}),
        ("moonlight-16b-a3b-instruct", 2, 1024, {"num_experts": 4}),
        ("gpt-oss-20b", 2, 1000, {"num_experts": 4}),
        ("qwen3-next-80b-a3b-instruct", 4, 1000, {"num_experts": 4}),
    )
]


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 10))]
)
def test_a_thousand_drawn_layouts(part: int) -> None:
    draw = random.Random(part)
    families: Counter[str] = Counter()
    while families.total() < 100:
        try:
            shape, layout, servers = drawn_layouts(draw)
            plan = shard_plan(shape, layout, servers, draw.choice((MIB, 64 * MIB)), 2)
        except LayoutError:
            continue
        prove_shards(plan, shape, layout, servers)
        moved = sum(plan.received.values())
        is_doubled = shape.tied_embeddings and any(s.attention_replicas > 1 for s in servers)
        assert moved >= plan.bound
        assert is_doubled or moved <= 1.05 * plan.bound
        families[shape.family] += 1
    assert len(families) == len({shape.family for shape in SMALL})


def test_holders_are_the_ranks_that_hold_a_piece() -> None:
    for shape, layout in (
        (MOE, Layout(2, 2, 2, 2, 1, 4, context=2)),
        (MOE, Layout.smallest(2, expert=2, expert_tensor=2)),
        (real_shape("gpt-oss-20b", num_layers=2, num_experts=4), Layout(2, 1, None, 2, 1, 4)),
    ):
        held: dict[object, list[int]] = {}
        for rank in range(layout.world_size):
            for p in local_parameters(shape, layout, rank):
                for segment in p.segments:
                    stage = layout.coordinates(rank).pp
                    held.setdefault((stage, p.chunk, p.name, segment), []).append(rank)
        pieces = [piece for tensor in gather_plan(shape, layout) for piece in tensor.pieces]
        assert all(piece.rank == piece.holders[0] for piece in pieces)
        for piece in pieces:
            stage = layout.coordinates(piece.rank).pp
            assert list(piece.holders) == held[stage, piece.chunk, piece.name, piece.segment]


def trainer_tensors(
    shape: ModelShape, layout: Layout, whole: dict[str, Tensor]
) -> list[dict[object, Tensor]]:
    """Return each rank's parameters, cut from whole tensors."""
    ranks = []
    for rank in range(layout.world_size):
        values: dict[object, Tensor] = {}
        for p in local_parameters(shape, layout, rank):
            values[p.chunk, p.name] = torch.zeros(p.shape, dtype=torch.float64)
            for segment in p.segments:
                segment.of_local(values[p.chunk, p.name]).copy_(
                    segment.of_hf(whole[segment.hf_name])
                )
        ranks.append(values)
    return ranks


def engine_tensors(table: EngineTensors, whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return each rank's tensors, cut from whole tensors."""
    ranks = [
        {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
        for sizes in table.sizes
    ]
    for name, parts in table.parts.items():
        for part in parts:
            values = part.cut(whole[name], torch.float64).reshape(-1)
            ranks[part.rank][part.tensor][part.start : part.start + values.numel()] = values
    return ranks


def carried_out(
    plan: ShardPlan, trainer: list[dict[object, Tensor]], tables: list[EngineTensors]
) -> list[dict[str, Tensor]]:
    """Return all engine ranks' tensors after the plan's messages, from senders' own parameters alone."""
    servers = [(table, rank) for table in tables for rank in range(table.ranks)]
    filled = [
        {name: torch.zeros(size, dtype=torch.float64) for name, size in table.sizes[rank].items()}
        for table, rank in servers
    ]
    for message in plan.messages:
        for s in message.slices:
            values = s.of_piece(s.piece.segment.of_local(trainer[message.sender][s.piece.key]))
            for receiver in message.column:
                table, rank = servers[receiver]
                places = [
                    part
                    for part in table.parts[s.name]
                    if part.rank == rank and replace(part.block, local_start=0) == s.block
                ]
                assert places
                for part in places:
                    dims = list(table.shapes[s.name])
                    dims[s.block.dim] = part.width
                    size = torch.Size(dims).numel()
                    region = filled[receiver][part.tensor][part.start : part.start + size].view(
                        dims
                    )
                    s.of_block(region.narrow(s.block.dim, 0, s.block.length)).copy_(
                        values + part.adds_one
                    )
    return filled


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen3_moe", [Layout(2, 2, None, 2, 1, 2), Layout.smallest(2, 1, None, 2, 2)]),
        ("gpt_oss", [Layout(2, 1, None, 2, 1, 2)]),
        ("qwen3_next", [Layout(2, 1, None, 2, 1, 2)]),
        ("deepseek_v3", [Layout(2, 1, None, 2, 1, 2)]),
    ],
)
def test_every_element_of_the_engines_comes_from_its_sender(
    tmp_path: Path, family: str, layouts: list[Layout]
) -> None:
    """The dense twin: engine tensors that are cut from whole tensors equal the tensors that the messages fill."""
    shape = load_model_shape(save_tiny_model(tmp_path, family))
    whole: dict[str, Tensor] = {}
    first = 1
    for name, dims in hf_tensors(shape).items():
        count = torch.Size(dims).numel()
        whole[name] = torch.arange(first, first + count, dtype=torch.float64).view(dims)
        first += count
    engines = [EngineLayout(1), EngineLayout(2), *([EngineLayout(2, 2)] if shape.is_moe else [])]
    for layout in layouts:
        trainer = trainer_tensors(shape, layout, whole)
        for servers in ([engines[-1]], engines, engines[1:2] * 2):
            plan = shard_plan(shape, layout, servers, 20_000, 8)
            tables = [EngineTensors(shape, server, "cpu") for server in servers]
            expected = [rank for table in tables for rank in engine_tensors(table, whole)]
            filled = carried_out(plan, trainer, tables)
            for number, (tensors, expected_tensors) in enumerate(
                zip(filled, expected, strict=True)
            ):
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, expected_tensors[name]), (number, name)


def spoiled(plan: ShardPlan, message: Message) -> ShardPlan:
    """Return the plan with another first message."""
    return replace(plan, messages=(message, *plan.messages[1:]))


def test_planted_faults_are_found() -> None:
    layout, servers = Layout(2, expert_tensor=2), [EngineLayout(2)]
    plan = proved(MOE, layout, servers)
    first, second = plan.messages[:2]
    part, *others = first.slices
    faults = [
        (replace(first, sender=1), "trainer rank 1 sends a slice of rank 0"),
        (
            replace(first, slices=tuple(others)),
            "receive it, expected|covered up to|is provided never",
        ),
        (replace(first, slices=(part, part, *others)), "twice"),
        (replace(first, column=(1,), step=99), "receive it, expected"),
        (
            replace(first, slices=(replace(part, start=part.start + 1), *others)),
            "are sent of a piece of",
        ),
        (
            replace(first, step=second.step, sender=second.sender, slices=second.slices),
            "messages in step",
        ),
        (
            replace(first, slices=(replace(part, block=replace(part.block, hf_name="x")), *others)),
            "index 0 is provided never",
        ),
    ]
    for message, text in faults:
        with pytest.raises(ProofError, match=text):
            prove_shards(spoiled(plan, message), MOE, layout, servers)
    with pytest.raises(ProofError, match="engine ranks"):
        prove_shards(plan, MOE, layout, [EngineLayout(2)] * 2)


def test_the_whole_of_qwen3_30b_a3b() -> None:
    """32 trainer GPUs and 4 servers of 4 GPUs: 244 GB move, where a broadcast of whole tensors moves 977 GB."""
    shape = real_shape("qwen3-30b-a3b")
    plan = shard_plan(shape, Layout(4, 1, None, 8, 1, 8), [EngineLayout(4)] * 4, 128 * MIB, 2)
    moved = sum(plan.received.values())
    assert moved == plan.bound
    assert 244e9 < moved < 245e9
    assert max(plan.sent.values()) < 1.05 * sum(plan.sent.values()) / 32
    # The largest messages of all steps, one after the other, are hardly more than what a rank keeps, or half of it
    # where two servers share a node.
    assert sum(plan.step_bytes) < 1.12 * max(plan.kept)
    paired = shard_plan(
        shape, Layout(4, 1, None, 8, 1, 8), [EngineLayout(4)] * 4, 128 * MIB, 2, hosts=(0, 0, 1, 1)
    )
    assert sum(paired.step_bytes) < 1.16 * max(plan.kept) / 2
