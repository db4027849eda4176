"""Updates that send only the changes: changes of a bucket, their place in an engine, and when all weights are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo import block_fp8
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shard_plan import Message
from megatron_dppo.system.lease import FencedError
from megatron_dppo.weights.changes import (
    Changes,
    PositionError,
    apply_changes,
    find_changes,
    kept_changes,
)
from megatron_dppo.weights.checksums import EngineTensors
from megatron_dppo.weights.one_rank import OneRankWeights
from megatron_dppo.weights.sent_weights import SentWeights
from megatron_dppo.weights.server.direct_loading import TensorPlaces
from megatron_dppo.weights.server.shards import (
    SHARED_INSTRUCTION,
    WHOLE,
    MessagePlacements,
    OtherPlanError,
    PlanFacts,
    SharedInstruction,
    SharedMessage,
)
from megatron_dppo.weights.shards import Shards
from megatron_dppo.weights.transaction import AlteredEngineError, WeightUpdateError, WeightUpdater
from megatron_dppo.weights.verification import compare_checksums
from tests.unit import test_fp8_engine
from tests.unit.test_direct_loading import Bucket, digests, hashes, held, weights
from tests.unit.test_engine_checksums import model_shape
from tests.unit.weight_doubles import BYTES, NORM, B, Engine, Source, updater

Spoil = Callable[[Message, Changes], Changes]


def unspoiled(message: Message, changes: Changes) -> Changes:
    return changes


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.int8), (2, torch.int16), (4, torch.int32)])
def test_changes_turn_the_base_into_the_new_bytes(size: int, dtype: torch.dtype) -> None:
    base = torch.arange(100).to(dtype)
    new = base.clone()
    new[[0, 7, 99]] += 1
    changes = find_changes(new.view(torch.uint8), base.view(torch.uint8), size)
    assert changes is not None
    assert changes.positions.tolist() == [0, 7, 99]
    assert sum(piece.numel() for piece in changes.pieces()) == 3 * (4 + size)
    apply_changes(base.view(torch.uint8), changes)
    assert torch.equal(base, new)


def test_changes_that_are_not_fewer_bytes_are_none() -> None:
    base = torch.zeros(60, dtype=torch.uint8)
    new = base.clone()
    new[:12] = 1
    # A change takes 5 bytes, 4 of them for its position: 12 changes are no fewer bytes than the whole bucket.
    assert find_changes(new, base, 1) is None
    new[11] = 0
    changes = find_changes(new, base, 1)
    assert changes is not None
    assert changes.count == 11


def test_of_equal_bytes_the_first_item_is_sent() -> None:
    data = torch.arange(24, dtype=torch.uint8)
    changes = find_changes(data, data.clone(), 2)
    assert changes is not None
    assert (changes.count, changes.values.view(torch.uint8).tolist()) == (1, [0, 1])


@pytest.mark.parametrize("position", [-1, 6])
def test_a_position_outside_of_the_message_is_refused(position: int) -> None:
    changes = Changes(
        torch.tensor([position], dtype=torch.int32), torch.zeros(1, dtype=torch.int16)
    )
    with pytest.raises(PositionError, match=str(position)):
        kept_changes(changes, 12)


class ServedTensors:
    """The tensors of the ranks of one server, loaded by an update from one trainer rank with ``base``."""

    def __init__(self, table: EngineTensors, base: Bucket) -> None:
        self._shape = table.shape
        self._facts = PlanFacts(Layout(), (table.layout,), 10**6, "bfloat16", table.quantized)
        self._shards = Shards(table.shape, self._facts, "cpu", 0)
        self.tensors = [held(table, rank) for rank in range(table.ranks)]
        self._placements: list[MessagePlacements] = []
        for rank, tensors in enumerate(self.tensors):
            places = TensorPlaces(table, rank, tensors)
            places.fill_padding()
            self._placements.append(places.placements)
        self.messages = self._shards.messages
        self.base = self.packed(base)
        for message, data in zip(self.messages, self.base, strict=True):
            self._receive(message, data, WHOLE)

    def packed(self, bucket: Bucket) -> list[Tensor]:
        """Return the flat bytes of each message."""
        source = OneRankWeights(self._shape, dict(bucket))
        self._shards.prepare(source.values(), source.all_max)
        data = []
        for message in self.messages:
            (packed,) = self._shards.pack([message], source.values())
            data.append(packed.clone())
        return data

    def change(self, new: Bucket, spoil: Spoil = unspoiled) -> None:
        """Send the changes from the base to ``new``."""
        for message, base, data in zip(self.messages, self.base, self.packed(new), strict=True):
            changes = find_changes(data, base, message.item_bytes)
            assert changes is not None
            sent = torch.cat(spoil(message, changes).pieces())
            self._receive(message, sent, changes.count)

    def _receive(self, message: Message, data: Tensor, changed: int) -> None:
        for rank in message.column:
            instruction = SharedInstruction(
                self._facts, self._shards.plan.fingerprint, rank, 0, message.step, changed
            )
            text = SHARED_INSTRUCTION.dump_json(instruction).decode()
            kept = SharedMessage(text, data).receive(self._placements[rank])
            for apply in kept:
                apply()


def train_bucket(base: Bucket) -> Bucket:
    """Return the bucket with every seventh element of each tensor changed."""
    new: Bucket = []
    for name, tensor in base:
        moved = tensor.clone()
        moved.view(-1)[::7] *= -1
        new.append((name, moved))
    return new


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["tied", "fp8", "dense"])
def test_changes_and_whole_weights_make_the_same_tensors(kind: str, ranks: int) -> None:
    quantized = kind == "fp8"
    if quantized:
        shape = test_fp8_engine.model_shape()
    else:
        shape = model_shape("qwen2" if kind == "dense" else "qwen3_moe", tied=kind == "tied")
    table = EngineTensors(shape, EngineLayout(ranks), "cpu", quantized=quantized)
    base = weights(shape)
    new = train_bucket(base)
    served = ServedTensors(table, base)
    served.change(new)
    sent = encode_fp8(new) if quantized else new
    for tensors, expected in zip(served.tensors, digests(table, sent), strict=True):
        assert hashes(tensors) == expected


def encode_fp8(bucket: Bucket) -> Bucket:
    quantized: Bucket = []
    for name, tensor in bucket:
        quantized += block_fp8.encode(name, tensor)
    return quantized


def altered_tensors(table: EngineTensors, served: ServedTensors, new: Bucket) -> set[str]:
    """Return the names of the engine's tensors that verification finds to differ from ``new``."""
    mismatches = compare_checksums(digests(table, new), [hashes(served.tensors[0])])
    return {mismatch.tensor for mismatch in mismatches}


def test_a_stale_tensor_of_the_base_is_named() -> None:
    table = EngineTensors(model_shape())
    base = weights(model_shape())
    new = train_bucket(base)
    stale = "model.layers.0.mlp.gate.weight"
    served = ServedTensors(table, [(n, t + 1 if n == stale else t) for n, t in base])
    served.base = served.packed(base)
    served.change(new)
    assert altered_tensors(table, served, new) == {stale}


def test_swapped_blocks_of_positions_are_named() -> None:
    table = EngineTensors(model_shape())
    base = weights(model_shape())
    first, second = "model.layers.0.mlp.gate.weight", "model.norm.weight"
    new: Bucket = []
    for name, tensor in base:
        moved = tensor.clone()
        if name in (first, second):
            moved.view(-1)[:4] += 1
        new.append((name, moved))

    def swap(message: Message, changes: Changes) -> Changes:
        return replace(changes, positions=changes.positions.roll(4))

    served = ServedTensors(table, base)
    served.change(new, swap)
    assert altered_tensors(table, served, new) == {first, second}


@pytest.mark.parametrize("fault", ["sender", "bytes"])
def test_a_message_that_the_plan_does_not_have_is_refused(fault: str) -> None:
    table = EngineTensors(model_shape())
    served = ServedTensors(table, weights(model_shape()))
    message, data = served.messages[0], served.base[0]
    if fault == "sender":
        message = replace(message, step=9)
    else:
        data = data[:-2]
    with pytest.raises(OtherPlanError, match="no such message"):
        served._receive(message, data, WHOLE)


def test_a_bucket_is_sent_whole_without_a_base() -> None:
    sent = SentWeights()
    first = torch.arange(40, dtype=torch.uint8)
    second = first.clone()
    second[3] += 1
    sent.begin(is_base=True)
    assert sent.changes(first, 1) is None
    sent.begin(is_base=True)
    changes = sent.changes(second, 1)
    assert changes is not None
    assert changes.positions.tolist() == [3]
    # After a failure, the kept bytes belong to no version.
    sent.begin(is_base=False)
    assert sent.changes(first, 1) is None
    sent.begin(is_base=True)
    changes = sent.changes(second, 1)
    assert changes is not None
    assert changes.positions.tolist() == [3]


def test_an_element_that_returns_to_an_earlier_value_is_sent_again() -> None:
    sent = SentWeights()
    x = torch.arange(40, dtype=torch.uint8)
    y = x.clone()
    y[3] += 1
    served = x.clone()
    sent.begin(is_base=True)
    assert sent.changes(x, 1) is None
    for data in (y, x, y):
        sent.begin(is_base=True)
        changes = sent.changes(data.clone(), 1)
        assert changes is not None
        assert changes.positions.tolist() == [3]
        apply_changes(served, changes)
        assert torch.equal(served, data)


def connect(*engines: Engine, **config: Any) -> tuple[WeightUpdater, Source]:
    source = Source()
    return updater(*engines, source=source, changes_only=True, **config), source


def sizes_of(engine: Engine, updates: WeightUpdater, source: Source, version: int) -> list[int]:
    engine.sent.clear()
    source.train()
    updates.update(version)
    return engine.sent


# One message of all weights, or of two elements, each with its position.
WHOLE_SIZES, CHANGED_SIZES = [BYTES], [2 * 8]


def test_the_second_update_of_a_server_sends_changes() -> None:
    engine = Engine()
    updates, source = connect(engine)
    assert updates.update(1).sent_fraction == 1.0
    assert engine.sent == WHOLE_SIZES
    assert sizes_of(engine, updates, source, 2) == CHANGED_SIZES
    source.train()
    report = updates.update(3)
    assert report.bytes == CHANGED_SIZES[0]
    assert report.sent_fraction == CHANGED_SIZES[0] / BYTES
    assert report.metrics()["weights/sent_fraction"] == report.sent_fraction


def test_whole_weights_are_sent_after_a_failure_and_to_a_new_server() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    engine.failing = "end"
    with pytest.raises(WeightUpdateError):
        sizes_of(engine, updates, source, 2)
    assert engine.sent == CHANGED_SIZES
    assert updates.committed_version is None
    engine.failing = None
    assert sizes_of(engine, updates, source, 2) == WHOLE_SIZES
    assert sizes_of(engine, updates, source, 3) == CHANGED_SIZES
    updates.attach([engine.url])
    assert sizes_of(engine, updates, source, 4) == WHOLE_SIZES


def test_after_an_interrupted_update_engines_serve_the_version_that_they_hold() -> None:
    engine, other = Engine(), Engine(B)
    updates, source = connect(engine, other)
    updates.update(1)
    engine.failing = "load"

    def lose_the_version() -> None:
        other.altered = {NORM: "changed"}

    other.on_end = lose_the_version
    source.train()
    with pytest.raises(WeightUpdateError):
        updates.update(2)
    assert (engine.label, engine.calls[-1]) == ("1", "resume")
    assert other.label == "unverified-2"
    assert "resume" not in other.calls[other.calls.index("unverified-2") :]


def test_whole_weights_that_engines_keep_are_verified_and_given_up_after_a_failure() -> None:
    engine = Engine()
    engine.keeps_whole = True
    updates = updater(engine, verify_every=9)
    updates.is_atomic = True
    updates.update(1)
    engine.failing = "load"
    with pytest.raises(WeightUpdateError):
        updates.update(2)
    assert (engine.label, engine.calls[-1]) == ("1", "resume")


def test_whole_weights_that_were_interrupted_are_compared_with_no_version() -> None:
    engine = Engine()
    updates = updater(engine)
    updates.update(1)
    engine.failing = "load"
    with pytest.raises(WeightUpdateError):
        updates.update(2)
    assert engine.label == "unverified-2"


def test_the_engines_of_another_start_are_left_alone() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    checks = iter([None, FencedError("taken over")])

    def fence() -> None:
        fault = next(checks)
        if fault is not None:
            raise fault

    updates.fence = fence
    source.train()
    with pytest.raises(FencedError):
        updates.update(2)
    assert engine.label == "unverified-2"


def test_a_refused_update_keeps_the_base() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    engine.idle = False
    with pytest.raises(WeightUpdateError):
        updates.update(2)
    engine.idle = True
    assert sizes_of(engine, updates, source, 2) == CHANGED_SIZES


def test_an_engine_without_the_base_is_named_and_sent_nothing() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    engine.altered = {NORM: "other"}
    with pytest.raises(AlteredEngineError, match=rf"version 1.*{NORM} on engine rank 0"):
        sizes_of(engine, updates, source, 2)
    assert engine.sent == []
    engine.altered = {}
    assert sizes_of(engine, updates, source, 2) == WHOLE_SIZES


def test_whole_weights_are_sent_to_a_server_that_was_started_again(caplog) -> None:
    engine, other = Engine(), Engine(B)
    updates, source = connect(engine, other)
    updates.update(1)
    other.label, other.altered = "0", {NORM: "start"}
    source.train()
    other.sent.clear()

    def load() -> None:
        other.altered = {}

    other.on_end = load
    assert updates.update(2).sent_fraction == 1.0
    assert other.sent == WHOLE_SIZES
    assert f"{B} were started again" in caplog.text
    assert sizes_of(other, updates, source, 3) == CHANGED_SIZES


def test_a_wrong_checksum_of_the_base_is_named() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    assert updates._digests is not None
    for by_rank in updates._digests.values():
        by_rank[0][NORM] = "wrong"  # type: ignore[index]
    with pytest.raises(AlteredEngineError, match=f"{NORM} on engine rank 0: expected wrong"):
        sizes_of(engine, updates, source, 2)
    assert engine.sent == []


def test_every_update_of_changes_is_verified() -> None:
    engine = Engine()
    updates, source = connect(engine, verify_every=3)
    updates.update(1)
    for version in (2, 3):
        assert sizes_of(engine, updates, source, version) == CHANGED_SIZES
        assert updates._updates_since["verify"] == 0
