"""Updates that send only the changes: changes of a bucket, their place in an engine, and when all weights are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo import block_fp8
from megatron_dppo.checkpoint_conversion.gathering import Gathered
from megatron_dppo.engine.changes import (
    POSITIONS,
    Changes,
    PositionError,
    apply_changes,
    changes_header,
    find_changes,
    item_bytes,
    own_changes,
)
from megatron_dppo.engine.checksums import EngineTensors
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.direct_loading import ReceivedBucket, TensorPlaces, UnplaceableError
from megatron_dppo.engine.shared_buckets import WireHeader
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.gather_plan import Bucket as PlannedBucket
from megatron_dppo.model.gather_plan import TensorSources
from megatron_dppo.system.lease import FencedError
from megatron_dppo.weight_sync.sent_weights import SentWeights
from megatron_dppo.weight_sync.transaction import (
    AlteredEngineError,
    WeightUpdateError,
    WeightUpdater,
)
from megatron_dppo.weight_sync.verification import compare_checksums
from tests.unit import test_engine_rows, test_fp8_engine, test_weight_sync
from tests.unit.test_direct_loading import Bucket, digests, hashes, held, received, weights
from tests.unit.test_engine_checksums import model_shape


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
def test_a_position_outside_of_the_bucket_is_refused(position: int) -> None:
    changes = Changes(
        torch.tensor([position], dtype=torch.int32), torch.zeros(1, dtype=torch.int16)
    )
    with pytest.raises(PositionError, match=str(position)):
        own_changes(changes, torch.zeros(12, dtype=torch.uint8))


def test_a_rank_keeps_the_changes_of_its_own_items() -> None:
    changes = Changes(
        torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([7, 8, 9], dtype=torch.int16)
    )
    is_own = torch.tensor([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1], dtype=torch.uint8)
    own = own_changes(changes, is_own)
    assert (own.positions.tolist(), own.values.tolist()) == ([2, 5], [8, 9])


def test_sglangs_bucket_format_has_aligned_tensors_and_all_bytes() -> None:
    header = WireHeader(("a", "b"), ("float32", "bfloat16"), ((3,), (5,)), 22)
    assert item_bytes(header) == 2
    changed = changes_header(header, 3)
    assert changed.names[0] == POSITIONS
    assert changed.bytes == 3 * 4 + 3 * 2
    end = 0
    for name, dims in zip(changed.dtypes, changed.shapes, strict=True):
        size = getattr(torch, name).itemsize
        assert end % size == 0
        end += torch.Size(dims).numel() * size
    assert end == changed.bytes


def engine_client(table: EngineTensors) -> EngineWeights:
    client = HttpClient("http://127.0.0.1:1", "user", "admin")
    engine = EngineWeights(client, table, torch.bfloat16, timeout_s=1)
    engine.places_directly = True
    return engine


def changed_bucket(engine: EngineWeights, new: Bucket, base: Bucket) -> ReceivedBucket:
    """Return the changes of a bucket as a server receives them."""
    header = engine.header([(name, tensor.shape) for name, tensor in new])
    flat_new, flat_base = (torch.cat(engine.pieces(bucket)) for bucket in (new, base))
    changes = find_changes(flat_new, flat_base, item_bytes(header))
    assert changes is not None
    changed = changes_header(header, changes.count)
    dtypes = [getattr(torch, name) for name in changed.dtypes]
    return ReceivedBucket(changed.names, dtypes, changed.shapes, torch.cat(changes.pieces()))


def train_bucket(base: Bucket) -> Bucket:
    """Return the bucket with every seventh element of each tensor changed."""
    new: Bucket = []
    for name, tensor in base:
        moved = tensor.clone()
        moved.view(-1)[::7] *= -1
        new.append((name, moved))
    return new


def encode_fp8(bucket: Bucket) -> Bucket:
    quantized: Bucket = []
    for name, tensor in bucket:
        quantized += block_fp8.encode(name, tensor)
    return sorted(quantized, key=lambda item: -item[1].itemsize)


class ServedTensors:
    """The tensors of one engine rank, loaded with ``base``."""

    def __init__(self, table: EngineTensors, rank: int, base: Bucket) -> None:
        self.tensors = held(table, rank)
        self.places = TensorPlaces(table, rank, self.tensors)
        self.places.fill_padding()
        self.places.load_received(received(base))

    def change(self, bucket: ReceivedBucket) -> None:
        self.places.apply(self.places.kept_changes(bucket))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["tied", "fp8", "dense"])
def test_changes_and_whole_weights_make_the_same_tensors(kind: str, ranks: int) -> None:
    quantized = kind == "fp8"
    if quantized:
        shape = test_fp8_engine.model_shape()
    else:
        shape = model_shape("qwen2" if kind == "dense" else "qwen3_moe", tied=kind == "tied")
    table = EngineTensors(shape, EngineLayout(ranks), "cpu", quantized=quantized)
    start = weights(shape)
    base, new = start, train_bucket(start)
    if quantized:
        base, new = encode_fp8(base), encode_fp8(new)
    for rank, expected in enumerate(digests(table, new)):
        served = ServedTensors(table, rank, base)
        served.change(changed_bucket(engine_client(table), new, base))
        assert hashes(served.tensors) == expected


rows_of_each_kind = test_engine_rows.family


@pytest.mark.usefixtures("rows_of_each_kind")
def test_changes_of_tensors_that_the_engine_also_holds_as_1_plus_them() -> None:
    shape = replace(model_shape(), num_layers=2, dtype="bfloat16")
    table = EngineTensors(shape)
    assert table.hold_what_is_sent
    base = weights(shape)
    new = train_bucket(base)
    served = ServedTensors(table, 0, base)
    served.change(changed_bucket(engine_client(table), new, base))
    assert hashes(served.tensors) == digests(table, new)[0]
    (norm,) = (n for n in table.parts if n.endswith("layers.1.input_layernorm.weight"))
    table.parts[norm] = [part for part in table.parts[norm] if part.adds_one]
    assert not table.hold_what_is_sent


def altered_tensors(table: EngineTensors, served: ServedTensors, new: Bucket) -> set[str]:
    """Return the names of the engine's tensors that verification finds to differ from ``new``."""
    mismatches = compare_checksums(digests(table, new), [hashes(served.tensors)])
    return {mismatch.tensor for mismatch in mismatches}


def test_a_stale_tensor_of_the_base_is_named() -> None:
    shape = model_shape()
    table = EngineTensors(shape)
    base = weights(shape)
    new = train_bucket(base)
    stale = "model.layers.0.mlp.gate.weight"
    served = ServedTensors(table, 0, [(n, t + 1 if n == stale else t) for n, t in base])
    served.change(changed_bucket(engine_client(table), new, base))
    assert altered_tensors(table, served, new) == {stale}


def test_swapped_blocks_of_positions_are_named() -> None:
    shape = model_shape()
    table = EngineTensors(shape)
    base = weights(shape)
    first, second = "model.layers.0.mlp.gate.weight", "model.norm.weight"
    new: Bucket = []
    for name, tensor in base:
        moved = tensor.clone()
        if name in (first, second):
            moved.view(-1)[:4] += 1
        new.append((name, moved))
    served = ServedTensors(table, 0, base)
    bucket = changed_bucket(engine_client(table), new, base)
    positions = bucket.data[: 8 * 4].view(torch.int32)
    positions.copy_(positions.roll(4))
    served.change(bucket)
    assert altered_tensors(table, served, new) == {first, second}


def test_changes_of_an_unknown_tensor_are_refused() -> None:
    table = EngineTensors(model_shape())
    served = ServedTensors(table, 0, weights(model_shape()))
    same: Bucket = [("model.norm.weight", torch.zeros(8).bfloat16())]
    bucket = changed_bucket(engine_client(table), same, same)
    bucket.names = (POSITIONS, "model.other.weight", bucket.names[-1])
    with pytest.raises(UnplaceableError, match=r"model\.other\.weight"):
        served.change(bucket)


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


class Source(test_weight_sync.Source):
    """Two buckets of one tensor, which ``train`` changes in one element."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = {"a": torch.ones(50), "b": torch.ones(60)}

    def train(self) -> None:
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor.clone()
            self.tensors[name][5] += 1

    def plan(self, bucket_bytes: int, *, spread: bool) -> list[PlannedBucket]:
        return [
            PlannedBucket((TensorSources(name, t.shape, ()),)) for name, t in self.tensors.items()
        ]

    def gather(self, plan: Any) -> Iterator[Gathered]:
        for item in self.tensors.items():
            yield Gathered([item])


class Engine(test_weight_sync.Engine):
    """An engine without a server that records how many bytes of each bucket it receives."""

    places_directly = True
    tensors: Any = SimpleNamespace(hold_what_is_sent=True)

    def __init__(self, url: str = test_weight_sync.A) -> None:
        super().__init__(url)
        self.sent: list[int] = []
        self.held = dict.fromkeys("ab", "1")
        self.on_end: Callable[[], None] | None = None

    async def end(self) -> None:
        await super().end()
        if self.on_end is not None:
            self.on_end()

    def header(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> WireHeader:
        plain = super().header(tensors)
        shapes = tuple(tuple(dims) for _, dims in tensors)
        return WireHeader(plain.names, ("float32",) * len(tensors), shapes, plain.bytes)

    def planned_header(self, bucket: PlannedBucket) -> WireHeader:
        return self.header([(tensor.name, tensor.shape) for tensor in bucket.tensors])

    async def receive_shared(self, header: WireHeader, data: Tensor) -> None:
        self.step("load")
        assert data.numel() == header.bytes
        self.sent.append(data.numel())


WHOLE, CHANGED = [200, 240], [8, 8]


def connect(*engines: Engine, **config: Any) -> tuple[WeightUpdater, Source]:
    source = Source()
    return test_weight_sync.updater(*engines, source=source, changes_only=True, **config), source


def sizes_of(engine: Engine, updates: WeightUpdater, source: Source, version: int) -> list[int]:
    engine.sent.clear()
    source.train()
    updates.update(version)
    return engine.sent


def test_the_second_update_of_a_server_sends_changes() -> None:
    engine = Engine()
    updates, source = connect(engine)
    assert updates.update(1).sent_fraction == 1.0
    assert engine.sent == WHOLE
    assert sizes_of(engine, updates, source, 2) == CHANGED
    source.train()
    report = updates.update(3)
    assert report.bytes == sum(CHANGED)
    assert report.sent_fraction == sum(CHANGED) / sum(WHOLE)
    assert report.metrics()["weights/sent_fraction"] == report.sent_fraction


def test_whole_weights_are_sent_after_a_failure_and_to_a_new_server() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    engine.failing = "end"
    with pytest.raises(WeightUpdateError):
        sizes_of(engine, updates, source, 2)
    assert engine.sent == CHANGED
    assert updates.committed_version is None
    engine.failing = None
    assert sizes_of(engine, updates, source, 2) == WHOLE
    assert sizes_of(engine, updates, source, 3) == CHANGED
    updates.attach([engine.url])
    assert sizes_of(engine, updates, source, 4) == WHOLE


def test_after_an_interrupted_update_engines_serve_the_version_that_they_hold() -> None:
    engine, other = Engine(), Engine(test_weight_sync.B)
    updates, source = connect(engine, other)
    updates.update(1)
    engine.failing = "load"

    def lose_the_version() -> None:
        other.held = {"a": "1", "b": "changed"}

    other.on_end = lose_the_version
    source.train()
    with pytest.raises(WeightUpdateError):
        updates.update(2)
    assert (engine.label, engine.calls[-1]) == ("1", "resume")
    assert other.label == "unverified-2"
    assert "resume" not in other.calls[other.calls.index("unverified-2") :]


def test_whole_weights_that_engines_keep_are_verified_and_given_up_after_a_failure() -> None:
    engine = Engine()
    updates = test_weight_sync.updater(engine, source=Source(), verify_every=9)
    updates.is_atomic = True
    updates.update(1)
    engine.failing = "load"
    with pytest.raises(WeightUpdateError):
        updates.update(2)
    assert (engine.label, engine.calls[-1]) == ("1", "resume")


def test_whole_weights_that_were_interrupted_are_compared_with_no_version() -> None:
    engine = Engine()
    updates = test_weight_sync.updater(engine, source=Source())
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
    assert sizes_of(engine, updates, source, 2) == CHANGED


def test_an_engine_without_the_base_is_named_and_sent_nothing() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    engine.held = {"a": "1", "b": "other"}
    with pytest.raises(AlteredEngineError, match=r"version 1.*b on engine rank 0"):
        sizes_of(engine, updates, source, 2)
    assert engine.sent == []
    engine.held = dict.fromkeys("ab", "1")
    assert sizes_of(engine, updates, source, 2) == WHOLE


def test_whole_weights_are_sent_to_a_server_that_was_started_again(caplog) -> None:
    engine, other = Engine(), Engine(test_weight_sync.B)
    updates, source = connect(engine, other)
    updates.update(1)
    other.label, other.held = "0", {"a": "start", "b": "start"}
    source.train()
    other.sent.clear()

    def load() -> None:
        other.held = dict.fromkeys("ab", "1")

    other.on_end = load
    assert updates.update(2).sent_fraction == 1.0
    assert other.sent == WHOLE
    assert f"{test_weight_sync.B} were started again" in caplog.text
    assert sizes_of(other, updates, source, 3) == CHANGED


def test_a_wrong_checksum_of_the_base_is_named() -> None:
    engine = Engine()
    updates, source = connect(engine)
    updates.update(1)
    assert updates._digests is not None
    for by_rank in updates._digests.values():
        by_rank[0]["a"] = "wrong"  # type: ignore[index]
    with pytest.raises(AlteredEngineError, match="a on engine rank 0: expected wrong"):
        sizes_of(engine, updates, source, 2)
    assert engine.sent == []


def test_every_update_of_changes_is_verified() -> None:
    engine = Engine()
    updates, source = connect(engine, verify_every=3)
    updates.update(1)
    for version in (2, 3):
        assert sizes_of(engine, updates, source, version) == CHANGED
        assert updates._updates_since["verify"] == 0


def test_servers_with_sglangs_loader_are_sent_whole_weights() -> None:
    engine, other = Engine(), Engine(test_weight_sync.B)
    other.places_directly = False
    updates, source = connect(engine, other)
    updates.update(1)
    assert sizes_of(engine, updates, source, 2) == WHOLE
