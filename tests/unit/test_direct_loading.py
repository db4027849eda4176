"""Direct placement in an engine's tensors gives the expected checksums, for every family and layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_dppo import block_fp8
from megatron_dppo.checkpoint_conversion.hf_folder import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.families import FAMILIES, load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, own_dtypes
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EngineTensors, ExpectedChecksums
from megatron_dppo.weights.one_rank import OneRankWeights
from megatron_dppo.weights.server.direct_loading import (
    ATOMIC_VARIABLE,
    DirectLoader,
    MappedFile,
    TensorPlaces,
    UnplaceableError,
    drop_kept,
    end_update,
    map_folder,
    read_folder_directly,
)
from megatron_dppo.weights.server.shards import (
    SHARED_INSTRUCTION,
    WHOLE,
    PlanFacts,
    SharedInstruction,
    SharedMessage,
)
from megatron_dppo.weights.shards import Shards
from tests.tiny_models import save_tiny_model
from tests.unit import test_fp8_engine
from tests.unit.test_engine_checksums import model_shape

DTYPE = torch.bfloat16
Bucket = list[tuple[str, Tensor]]


def weights(shape: ModelShape) -> Bucket:
    torch.manual_seed(0)
    own = own_dtypes(shape)
    bucket: Bucket = []
    for name, dims in hf_tensors(shape).items():
        dtype = getattr(torch, own[name]) if name in own else DTYPE
        bucket.append((name, torch.randn(dims).to(dtype)))
    return bucket


def digests(table: EngineTensors, bucket: Bucket) -> list[dict[str, str]]:
    expected = ExpectedChecksums(table, DTYPE)
    expected.add(bucket)
    return expected.digests([expected.partial()])


def held(table: EngineTensors, rank: int) -> dict[str, Tensor]:
    """Return the tensors of ``rank``, with arbitrary contents that are not zero."""
    tensors: dict[str, Tensor] = {}
    for name, size in table.sizes[rank].items():
        tensors[name] = torch.full((size,), 7.0).to(table.dtype_of(name, DTYPE))
    return tensors


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: tiled_hash(tensor) for name, tensor in tensors.items()}


def mapped(bucket: Bucket) -> MappedFile:
    """Return the bucket as the tensors of a file, the largest item sizes first."""
    sorted_bucket = sorted(bucket, key=lambda item: -item[1].itemsize)
    data = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in sorted_bucket])
    names = [name for name, _ in sorted_bucket]
    dtypes = [tensor.dtype for _, tensor in sorted_bucket]
    return MappedFile(names, dtypes, [tensor.shape for _, tensor in sorted_bucket], data)


def assert_places(table: EngineTensors, bucket: Bucket) -> None:
    for rank, expected in enumerate(digests(table, bucket)):
        tensors = held(table, rank)
        places = TensorPlaces(table, rank, tensors)
        places.fill_padding()
        for start in range(0, len(bucket), 5):
            places.load_file(mapped(bucket[start : start + 5]))
        assert hashes(tensors) == expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(tmp_path: Path, family: str) -> None:
    shape = load_model_shape(save_tiny_model(tmp_path, family))
    bucket = weights(shape)
    most_ranks = FAMILIES[family].most_engine_ranks or 2
    for device in ("cpu", "cuda"):
        for ranks in range(1, most_ranks + 1):
            assert_places(EngineTensors(shape, EngineLayout(ranks), device), bucket)


@pytest.mark.parametrize("expert", [2, 4])
def test_groups_of_experts(tmp_path: Path, expert: int) -> None:
    shape = load_model_shape(save_tiny_model(tmp_path))
    table = EngineTensors(shape, EngineLayout(4, expert), "cpu")
    bucket = weights(shape)
    assert_places(table, bucket)
    # A server computes only the places of its own rank.
    for rank, expected in enumerate(digests(table, bucket)):
        own_table = EngineTensors(shape, EngineLayout(4, expert), "cpu", only_rank=rank)
        tensors = held(own_table, rank)
        places = TensorPlaces(own_table, rank, tensors)
        places.fill_padding()
        places.load_file(mapped(bucket))
        assert hashes(tensors) == expected


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_attention_replicas_of_every_family(tmp_path: Path, family: str) -> None:
    shape = load_model_shape(save_tiny_model(tmp_path, family))
    bucket = weights(shape)
    layouts = [EngineLayout(4, 1, 2), EngineLayout(2, 2 if shape.is_moe else 1, 2, True)]
    for layout in layouts:
        has_replicas = FAMILIES[family].attention_replicas
        if not has_replicas or layout.output_per_replica > FAMILIES[family].output_per_replica:
            with pytest.raises(LayoutError, match=family):
                EngineTensors(shape, layout)
        else:
            assert_places(EngineTensors(shape, layout, "cpu"), bucket)


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_share_heads_and_hold_only_padding_of_the_vocabulary(tied: bool) -> None:
    shape = model_shape(tied=tied, vocab=100)
    assert_places(EngineTensors(shape, EngineLayout(4), "cpu"), weights(shape))


def test_ranks_of_a_replica_divide_no_output_matrix_that_sglang_pads() -> None:
    layout = EngineLayout(4, 1, 2, output_per_replica=True)
    with pytest.raises(LayoutError, match="enable_dp_lm_head"):
        EngineTensors(model_shape(vocab=100), layout)
    EngineTensors(model_shape(vocab=128), layout)
    # A replica of one rank holds all rows of the output matrix, so it gathers none.
    EngineTensors(model_shape(vocab=100), EngineLayout(2, 1, 2, output_per_replica=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_block_fp8(ranks: int) -> None:
    shape = test_fp8_engine.model_shape()
    encoded_bucket: Bucket = []
    for name, tensor in weights(shape):
        encoded_bucket += block_fp8.encode(name, tensor)
    assert_places(EngineTensors(shape, EngineLayout(ranks), "cpu", quantized=True), encoded_bucket)


def test_a_repeated_tensor_and_the_probe_change_nothing() -> None:
    shape = model_shape(tied=True)
    table = EngineTensors(shape)
    bucket = weights(shape)
    tensors = held(table, 0)
    places = TensorPlaces(table, 0, tensors)
    places.load(bucket)
    places.load([("rotary_emb.inv_freq", torch.ones(1))])
    # SGLang's loader receives the tied embedding of a mixture a second time, as the output matrix.
    places.load([("lm_head.weight", torch.zeros(100, 8))])
    assert hashes(tensors) == digests(table, bucket)[0]


@pytest.mark.parametrize(
    "fault", [("model.layers.0.unknown", (1,)), ("model.norm.weight", (9,))], ids=["name", "shape"]
)
def test_a_tensor_without_a_place_is_refused(fault: tuple[str, tuple[int, ...]]) -> None:
    name, dims = fault
    table = EngineTensors(model_shape())
    places = TensorPlaces(table, 0, held(table, 0))
    with pytest.raises(UnplaceableError, match=name):
        places.load([(name, torch.zeros(dims))])


class Model(torch.nn.Module):
    """The parts of an SGLang model that direct placement uses: named tensors, a loader, and a derived value."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.loaded_names: list[str] = []
        self.derived_values: list[float] = []

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield from self.tensors.items()

    def load_weights(self, bucket: Bucket) -> None:
        self.loaded_names += [name for name, _ in bucket]

    def post_load_weights(self) -> None:
        self.derived_values.append(float(self.tensors["model.norm.weight"][0]))


class Updater:
    def __init__(self, model: Model) -> None:
        self.get_model = lambda: model
        self.post_load_flags: list[bool] = []

    def end(self, _: Any, *, run_post_load: bool) -> None:
        self.post_load_flags.append(run_post_load)


def make_model(tensors: dict[str, Tensor]) -> tuple[Model, DirectLoader]:
    model = Model(tensors)
    loader = DirectLoader(model, 0, lambda: EngineTensors(model_shape()))
    model.load_weights = loader  # type: ignore[method-assign,assignment]
    return model, loader


def test_tensors_are_derived_once_at_the_end_of_a_session() -> None:
    bucket = weights(model_shape())
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    loader.begin()
    for item in bucket:
        loader([item])
    assert not model.derived_values
    updater = Updater(model)
    end_update(updater.end, updater, run_post_load=False)
    assert updater.post_load_flags == [True]
    assert not model.loaded_names


def shared_messages(bucket: Bucket) -> list[SharedMessage]:
    """Return the messages of an update of one engine rank."""
    shape = model_shape()
    facts = PlanFacts(Layout(), (EngineLayout(),), 1000, "bfloat16", quantized=False)
    shards = Shards(shape, facts, "cpu", 0)
    values = OneRankWeights(shape, dict(bucket)).values()
    messages = []
    for message in shards.messages:
        (data,) = shards.pack([message], values)
        instruction = SharedInstruction(
            facts, shards.plan.fingerprint, 0, message.sender, message.step, WHOLE
        )
        text = SHARED_INSTRUCTION.dump_json(instruction).decode()
        messages.append(SharedMessage(text, data.clone()))
    return messages


def test_no_kept_message_of_an_interrupted_update_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ATOMIC_VARIABLE, "1")
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    loader.begin()
    for message in shared_messages(weights(model_shape()))[:2]:
        loader(message)
    drop_kept(SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model))))
    loader.begin()
    before = hashes(model.tensors)
    updater = Updater(model)
    end_update(updater.end, updater, run_post_load=False)
    assert hashes(model.tensors) == before


def test_kept_messages_are_loaded_only_at_the_end_of_their_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ATOMIC_VARIABLE, "1")
    bucket = weights(model_shape())
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    updater = Updater(model)
    loader.begin()
    before = hashes(model.tensors)
    for message in shared_messages(bucket):
        loader(message)
    assert hashes(model.tensors) == before
    end_update(updater.end, updater, run_post_load=False)
    assert hashes(model.tensors) == digests(EngineTensors(model_shape()), bucket)[0]
    # A folder replaces a tensor outside of an update. The next update has no message.
    norm = model.tensors["model.norm.weight"]
    loader([("model.norm.weight", torch.zeros_like(norm))])
    loader.begin()
    end_update(updater.end, updater, run_post_load=False)
    assert set(norm.tolist()) == {0.0}


def test_a_folder_is_loaded_outside_of_a_session() -> None:
    bucket = weights(model_shape())
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    loader(iter(bucket))
    assert hashes(model.tensors) == digests(EngineTensors(model_shape()), bucket)[0]
    assert model.derived_values == [float(dict(bucket)["model.norm.weight"][0])]


def test_the_folder_of_an_update_is_read_file_by_file(tmp_path: Path) -> None:
    shape = model_shape()
    bucket = weights(shape)
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in bucket}
    with ShardedWriter(tmp_path / "hf", specs, max_shard_bytes=2000) as writer:
        for name, tensor in bucket:
            writer.write_rows(name, 0, tensor)
    model, loader = make_model(held(EngineTensors(shape), 0))
    updater = Updater(model)
    read_folder_directly(updater, str(tmp_path / "hf"), "safetensors")
    loader(iter(()))
    assert hashes(model.tensors) == digests(EngineTensors(shape), bucket)[0]
    # The next call loads the tensors of its bucket, not of the folder.
    loader([("model.norm.weight", torch.zeros(8).bfloat16())])
    assert not model.tensors["model.norm.weight"].any()


@pytest.mark.parametrize("name", ["a-leftover.safetensors", "zz-leftover.safetensors"])
def test_files_that_the_index_of_a_folder_does_not_name_are_not_read(
    tmp_path: Path, name: str
) -> None:
    """For example, shards of an earlier checkpoint, whose names sort before or after the model's files."""
    bucket = weights(model_shape())
    specs = {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in bucket}
    with ShardedWriter(tmp_path / "hf", specs, max_shard_bytes=2000) as writer:
        for key, tensor in bucket:
            writer.write_rows(key, 0, tensor)
    save_file({key: torch.zeros_like(tensor) for key, tensor in bucket}, tmp_path / "hf" / name)
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    loader.read_next_from(tmp_path / "hf")
    loader(iter(()))
    assert hashes(model.tensors) == digests(EngineTensors(model_shape()), bucket)[0]


def test_a_consolidated_file_beside_the_only_one_is_not_read(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors"):
        save_file({f"w {name}": torch.ones(4)}, tmp_path / name)
    buckets = map_folder(tmp_path)
    assert buckets is not None
    assert [bucket.names for bucket in buckets] == [["w model.safetensors"]]


def test_a_folder_whose_tensors_are_not_aligned_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    specs = {"a": TensorSpec((3,), torch.bfloat16), "b": TensorSpec((2,), torch.float32)}
    with ShardedWriter(tmp_path / "hf", specs) as writer:
        for name, spec in specs.items():
            writer.write_rows(name, 0, torch.ones(spec.shape, dtype=spec.dtype))
    assert map_folder(tmp_path / "hf") is None
    bucket = weights(model_shape())
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    loader.read_next_from(tmp_path / "hf")
    loader(iter(bucket))
    assert hashes(model.tensors) == digests(EngineTensors(model_shape()), bucket)[0]


def test_a_message_is_loaded_after_a_folder_that_sglang_refused(tmp_path: Path) -> None:
    """SGLang can refuse an update before it reads the folder."""
    bucket = weights(model_shape())
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    updater = Updater(model)
    read_folder_directly(updater, str(tmp_path / "missing"), "safetensors")
    loader.begin()
    for message in shared_messages(bucket):
        loader(message)
    assert hashes(model.tensors) == digests(EngineTensors(model_shape()), bucket)[0]


@pytest.mark.parametrize("options", [{}, {"weight_name_filter": lambda name: True}])
def test_sglang_reads_a_folder_of_other_files_or_of_chosen_tensors(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    bucket = weights(model_shape())
    if options:
        specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in bucket}
        with ShardedWriter(tmp_path / "hf", specs) as writer:
            for name, tensor in bucket:
                writer.write_rows(name, 0, torch.zeros_like(tensor))
    model, loader = make_model(held(EngineTensors(model_shape()), 0))
    updater = Updater(model)
    read_folder_directly(updater, str(tmp_path / "hf"), "auto", **options)
    loader(iter(bucket))
    assert hashes(model.tensors) == digests(EngineTensors(model_shape()), bucket)[0]


def test_tensors_that_were_replaced_between_updates_are_found() -> None:
    bucket = weights(model_shape())
    table = EngineTensors(model_shape())
    model, loader = make_model(held(table, 0))
    loader(bucket)
    name = "model.layers.0.mlp.experts.w13_weight"
    model.tensors[name] = torch.zeros_like(model.tensors[name])
    loader.begin()
    loader(bucket)
    assert hashes(model.tensors) == digests(table, bucket)[0]


@pytest.mark.parametrize("fault", ["missing", "larger", "transposed"])
def test_another_model_keeps_sglangs_loader(fault: str) -> None:
    tensors = held(EngineTensors(model_shape()), 0)
    name = "model.layers.0.mlp.experts.w2_weight"
    tensor = tensors.pop(name)
    if fault == "larger":
        tensors[name] = torch.cat([tensor, tensor])
    elif fault == "transposed":
        tensors[name] = tensor.view(8, -1).t()
    model, loader = make_model(tensors)
    loader.begin()
    loader([("model.norm.weight", torch.zeros(8))])
    assert model.loaded_names == ["model.norm.weight"]
    updater = Updater(model)
    end_update(updater.end, updater, run_post_load=False)
    assert updater.post_load_flags == [False]
