"""Shards of every family, packed by trainer ranks and placed by engine ranks in one process: tensors and expected
checksums equal those of whole tensors, and planted faults are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.model.engine_layout import EngineLayout, engine_faults
from megatron_dppo.model.families import FAMILIES, load_model_shape
from megatron_dppo.model.layout import Layout, holding_faults
from megatron_dppo.model.quantization import SCALE_SUFFIX, is_quantized
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.shard_plan import Message
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EngineTensors, IncompleteWeightsError
from megatron_dppo.weights.distributed import DistributedStrategy
from megatron_dppo.weights.server.direct_loading import TensorPlaces
from megatron_dppo.weights.server.shards import (
    INSTRUCTION,
    IncomingShards,
    MessagePlacement,
    MessagePlacements,
    OtherPlanError,
    PlanFacts,
    ShardStep,
    steps_of,
)
from megatron_dppo.weights.shards import Shards
from tests.distributed.test_shards import (
    FP8_SHAPE,
    SHAPE,
    expected_of,
    trainer_values,
    whole_tensors,
)
from tests.tiny_models import save_tiny_model
from tests.unit.test_direct_loading import DTYPE, held

TRAINERS = (
    Layout(),
    Layout(tensor=2, expert_tensor=2),
    Layout(pipeline=2),
    Layout(tensor=2, expert=2),
)
SERVERS = ([EngineLayout()], [EngineLayout(2)], [EngineLayout(2, 2), EngineLayout()])
Spoil = Callable[[Message, Tensor], Tensor | None]


def unspoiled(message: Message, data: Tensor) -> Tensor:
    return data


class Update:
    """An update in one process. ``spoil`` returns what arrives in place of a message's bytes; None: nothing arrives."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        servers: list[EngineLayout],
        spoil: Spoil = unspoiled,
        message_bytes: int = 20_000,
        device: str = "cpu",
        *,
        quantized: bool = False,
    ) -> None:
        whole = whole_tensors(shape)
        facts = PlanFacts(layout, tuple(servers), message_bytes, "bfloat16", quantized=quantized)
        tables = [EngineTensors(shape, server, device, quantized=quantized) for server in servers]
        ranks = [(table, rank) for table in tables for rank in range(table.ranks)]
        self.tensors = [held(table, rank) for table, rank in ranks]
        places = []
        for (table, rank), tensors in zip(ranks, self.tensors, strict=True):
            places.append(TensorPlaces(table, rank, tensors))
            places[-1].fill_padding()
        partials = []
        for trainer_rank in range(layout.world_size):
            self.shards = Shards(shape, facts, device, trainer_rank)
            values = trainer_values(shape, layout, trainer_rank, whole)
            self.shards.prepare(values, lambda vector: vector)
            checksums = self.shards.checksums()
            for message in self.shards.messages:
                (data,) = self.shards.pack([message], values)
                checksums.add([message], [data])
                arrived = spoil(message, data)
                for engine_rank in message.column if arrived is not None else ():
                    assert arrived is not None
                    blocks = places[engine_rank].placements.blocks
                    MessagePlacement(message, blocks, self.shards.dtype_of).place(arrived)
            partials.append(checksums.partials())
        self.partials = partials
        self.digests = self.shards.digests(partials)
        self.expected: list[dict[str, str]] = []
        for table in tables:
            expected = expected_of(table, whole)
            assert self.digests[table.layout, device] == expected
            self.expected += expected

    def wrong(self) -> set[tuple[int, str]]:
        """Return (engine rank, tensor) of each tensor that differs from the expected one."""
        return {
            (rank, name)
            for rank, tensors in enumerate(self.tensors)
            for name, tensor in tensors.items()
            if tiled_hash(tensor) != self.expected[rank][name]
        }


def fits(shape: ModelShape, layout: Layout, servers: list[EngineLayout]) -> bool:
    faults = list(holding_faults(layout.sizes, shape))
    for server in servers:
        faults += engine_faults(shape, server)
    return not faults


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(tmp_path: Path, family: str) -> None:
    shape = load_model_shape(save_tiny_model(tmp_path, family))
    numbers = count()
    for layout in TRAINERS:
        for servers in SERVERS:
            if fits(shape, layout, servers):
                # Servers on CPUs pad experts, and servers on GPUs do not.
                device = ("cpu", "cuda")[next(numbers) % 2]
                assert Update(shape, layout, servers, device=device).wrong() == set()
    assert next(numbers) >= 2


def test_slices_that_are_no_whole_words() -> None:
    """Rows of 3 elements of 2 bytes, which two trainer ranks and three engine ranks hold."""
    shape = replace(SHAPE, hidden_size=66, moe_ffn_hidden_size=6, head_dim=15)
    update = Update(shape, Layout(tensor=2, expert_tensor=2), [EngineLayout(2)], device="cuda")
    assert update.wrong() == set()
    update = Update(shape, Layout(tensor=2, expert_tensor=2), [EngineLayout()], device="cuda")
    assert update.wrong() == set()


def owners(message: Message, name: str, table: EngineTensors) -> set[tuple[int, str]]:
    """Return (engine rank, engine tensor) of the tensors that the slices of ``name`` in a message fill."""
    parts = table.parts[name]
    return {(part.rank, part.tensor) for part in parts if part.rank in message.column}


def twin_slices(message: Message) -> tuple[int, ...]:
    """Return the numbers of two slices of one size, of different tensors; nothing if there are none."""
    slices = message.slices
    for first, second in combinations(range(len(slices)), 2):
        if (
            slices[first].bytes == slices[second].bytes
            and slices[first].name != slices[second].name
        ):
            return first, second
    return ()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("fault", ["lost", "stale", "places", "bit"])
def test_a_planted_fault_is_named(tmp_path: Path, family: str, fault: str) -> None:
    """A message is lost, comes from the step before, has two slices in each other's place, or has another bit."""
    shape = load_model_shape(save_tiny_model(tmp_path, family))
    server = EngineLayout(1 if FAMILIES[family].most_engine_ranks == 1 else 2)
    plain = Update(shape, Layout(), [server])
    messages = plain.shards.messages
    table = plain.shards.table
    victim = messages[len(messages) // 2]
    if fault == "places":
        victim = next(message for message in messages if twin_slices(message))
    named: set[Any] = set()
    if fault == "bit":
        named = owners(victim, victim.slices[0].name, table)
    if fault in ("lost", "stale"):
        for part in victim.slices:
            named |= owners(victim, part.name, table)
    if fault == "places":
        for number in twin_slices(victim):
            named |= owners(victim, victim.slices[number].name, table)

    def spoil(message: Message, data: Tensor) -> Tensor | None:
        if message != victim:
            return data
        if fault == "lost":
            return None
        spoiled = data.clone()
        if fault == "stale":
            return spoiled.view(DTYPE).mul_(1.5).view(torch.uint8)
        if fault == "bit":
            spoiled[0] ^= 1
            return spoiled
        chunks = [part.bytes for part in victim.slices]
        one, other = (spoiled.split(chunks)[number] for number in twin_slices(victim))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        return spoiled

    wrong = Update(shape, Layout(), [server], spoil).wrong()
    assert wrong == named


@pytest.mark.parametrize("suffix", ["weight", "weight" + SCALE_SUFFIX])
def test_a_bit_of_block_fp8_that_differs_is_named(suffix: str) -> None:
    """In each message a bit of the last slice of quantised values, or of scales, differs."""
    server = EngineLayout(2)
    plain = Update(FP8_SHAPE, Layout(), [server], message_bytes=100_000, quantized=True)
    table = plain.shards.table
    victims: dict[Message, int] = {}
    """Message -> the number of its spoiled slice."""
    for message in plain.shards.messages:
        for number, part in enumerate(message.slices):
            is_fp8 = is_quantized(part.name.removesuffix(SCALE_SUFFIX))
            if is_fp8 and part.name.endswith(suffix):
                victims[message] = number
    named = set[tuple[int, str]]()
    for message, number in victims.items():
        named |= owners(message, message.slices[number].name, table)
    assert {rank for rank, _ in named} == {0, 1}
    assert len(named) < sum(len(sizes) for sizes in table.sizes)

    def spoil(message: Message, data: Tensor) -> Tensor:
        spoiled = data.clone()
        if message in victims:
            slices = message.slices[: victims[message]]
            spoiled[sum(part.bytes for part in slices)] ^= 1
        return spoiled

    update = Update(FP8_SHAPE, Layout(), [server], spoil, 100_000, quantized=True)
    assert update.wrong() == named


def test_a_rank_without_values_takes_part_in_the_exchange_of_magnitudes() -> None:
    layout = Layout(tensor=4, expert_tensor=4)
    facts = PlanFacts(layout, (EngineLayout(2),), 100_000, "bfloat16", quantized=True)
    shards = Shards(FP8_SHAPE, facts, "cpu", 1)
    exchanged: list[Tensor] = []

    def all_max(vector: Tensor) -> Tensor:
        exchanged.append(vector)
        return vector

    shards.prepare({}, all_max)
    values = trainer_values(FP8_SHAPE, layout, 1, whole_tensors(FP8_SHAPE))
    shards.prepare(values, all_max)
    without_values, with_values = exchanged
    assert not without_values.any()
    assert with_values.any()
    assert without_values.shape == with_values.shape
    assert without_values.dtype == with_values.dtype == torch.int32


def test_a_tensor_that_no_rank_sent_is_named() -> None:
    update = Update(SHAPE, Layout(pipeline=2), [EngineLayout(2)])
    with pytest.raises(IncompleteWeightsError, match=r"layers\.2\..* on engine rank"):
        update.shards.digests(update.partials[:1])
    with pytest.raises(IncompleteWeightsError, match="sent twice"):
        update.shards.digests([*update.partials, update.partials[0]])


def test_an_engine_with_another_plan_refuses() -> None:
    class Group:
        def rank(self) -> int:
            return 1

    with pytest.raises(OtherPlanError):
        IncomingShards('{"facts": 1}', Group(), "name")  # type: ignore[arg-type]
    facts = PlanFacts(Layout(), (EngineLayout(),), 1000, "bfloat16", quantized=False)
    plan = facts.plan(SHAPE)
    text = INSTRUCTION.dump_json(
        INSTRUCTION.validate_python(
            {"facts": facts, "fingerprint": "other", "address": "127.0.0.1", "port": 1}
        )
    ).decode()
    incoming = IncomingShards(text, Group(), "name")  # type: ignore[arg-type]
    with pytest.raises(OtherPlanError, match=plan.fingerprint):
        incoming.receive(MessagePlacements(EngineTensors(SHAPE), {}))


def test_the_memory_of_messages_is_freed_between_updates() -> None:
    facts = PlanFacts(Layout(), (EngineLayout(2),), 20_000, "bfloat16", quantized=False)
    shards = Shards(SHAPE, facts, "cpu", 0)
    values = trainer_values(SHAPE, Layout(), 0, whole_tensors(SHAPE))
    first = [shards.pack(batch, values)[0].clone() for batch in shards.batches]
    views = {key: list(targets) for key, targets in shards._targets.items()}
    shards.release_memory()
    assert [buffer.untyped_storage().nbytes() for buffer in shards._buffers._buffers] == [0, 0]
    again = [shards.pack(batch, values)[0].clone() for batch in shards.batches]
    assert len(first) > 2
    for before, after in zip(first, again, strict=True):
        assert torch.equal(before, after)
    # The views of the first update are used again.
    for key, targets in views.items():
        assert all(a is b for a, b in zip(targets, shards._targets[key], strict=True))


def test_messages_of_a_batch_begin_at_multiples_of_16_bytes() -> None:
    facts = PlanFacts(Layout(), (EngineLayout(2),), 20_000, "bfloat16", quantized=False)
    shards = Shards(SHAPE, facts, "cpu", 0, batch_bytes=60_000)
    values = trainer_values(SHAPE, Layout(), 0, whole_tensors(SHAPE))
    assert [m for batch in shards.batches for m in batch] == shards.messages
    assert max(map(len, shards.batches)) > 1
    single = Shards(SHAPE, facts, "cpu", 0)
    for batch in shards.batches:
        packed = shards.pack(batch, values)
        assert all(data.storage_offset() % 16 == 0 for data in packed)
        for message, data in zip(batch, packed, strict=True):
            (alone,) = single.pack([message], values)
            assert torch.equal(data, alone)


def test_the_busiest_ranks_are_compared_with_all_ranks() -> None:
    """The model fits in one message, so that one of two equal trainer ranks sends it to two equal servers."""
    facts = PlanFacts(Layout(data=2), (EngineLayout(),) * 2, 1 << 30, "bfloat16", quantized=False)
    source: Any = SimpleNamespace(rank=0)
    strategy = DistributedStrategy(source, WeightSyncConfig())
    strategy.planned = Shards(SHAPE, facts, "cpu", 0)
    assert strategy.busiest_over_mean == (2, 1)


def test_the_steps_of_a_chain() -> None:
    """Three servers of one rank: engine rank 0 receives from the trainer and sends on to 1, and 1 to 2."""
    facts = PlanFacts(Layout(), (EngineLayout(),) * 3, 1 << 30, "bfloat16", quantized=False)
    plan = facts.plan(SHAPE)
    (message,) = plan.messages
    assert message.column == (0, 1, 2)
    assert steps_of(plan, 0) == [ShardStep([(message, 0)], []), ShardStep([], [(message, 2)])]
    assert steps_of(plan, 1) == [ShardStep([(message, 1)], []), ShardStep([], [(message, 3)])]
    assert steps_of(plan, 2) == [ShardStep([(message, 2)], [])]
