"""Updates in shards into real SGLang servers on a CPU: every engine rank receives only what it keeps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineRequestError
from megatron_dppo.model.shard_plan import Message, Slice
from megatron_dppo.system import failpoints
from megatron_dppo.trainer.collectives import first_failure
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import TrainerWeights
from megatron_dppo.weights import engines, shared_bytes, shared_memory
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import GRACE_S
from megatron_dppo.weights.shards import ShardStrategy
from megatron_dppo.weights.shared_bytes import SharedBytes, shared_empty
from megatron_dppo.weights.transaction import WeightUpdateError, WeightUpdater
from tests.integration.test_weight_sync import interrupt_update
from tests.integration.weight_server import (
    RUNNER,
    TIMEOUT_S,
    RunningServer,
    Source,
    altered_on_the_way,
    assert_serves,
    engine_log_probs,
    engine_weights,
    policy_config,
    read,
    serve,
    updater,
    with_small_messages,
)
from tests.patience import Patience, own_patience
from tests.ranks import RankFailedError, run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two ranks, each with half of the experts. Vocabulary and experts are padded, and embeddings are tied."""
    folder = save_tiny_model(tmp_path_factory.mktemp("first"), vocab_size=500, tied=True)
    server = serve(folder, tp_size=2, ep_size=2)
    yield server
    server.process.kill()


@pytest.fixture(scope="module")
def second(server: RunningServer) -> Iterator[RunningServer]:
    """A server of one rank."""
    second = serve(server.folder)
    yield second
    second.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return save_tiny_model(folder, vocab_size=500, tied=True, seed=1)


def test_the_engine_ranks_receive_what_they_keep(server: RunningServer, trained: Path) -> None:
    updates = updater(server.weights(), Source(trained))
    report = updates.update(1)
    assert (report.verified, report.tensors) == (True, 2 * 21)
    assert report.bytes == sum(t.nbytes for t in read(trained).values())
    kept = server.weights().tensors.kept_bytes(torch.float32)
    assert report.bytes_moved == report.bytes_bound == kept
    # The vocabulary of 500 is padded to 512: of the embeddings one engine rank keeps 256 rows, the other 244.
    row_bytes = 4 * server.weights().tensors.shape.hidden_size
    assert report.busiest_over_mean == (1, pytest.approx(1 + 12 * row_bytes / kept))
    assert_serves(server, trained, 1)
    # The group is kept for the next update.
    updates.source = Source(server.folder)
    assert updates.update(2).verified
    assert_serves(server, server.folder, 2)
    updates.close()


def test_an_interrupted_update_of_whole_weights_is_quarantined_and_the_next_succeeds(
    server: RunningServer, trained: Path
) -> None:
    updates = updater(server.weights(), Source(trained, interrupt_update))
    patience = own_patience(TIMEOUT_S / 3)
    with pytest.raises(WeightUpdateError, match="the update was interrupted"):
        updates.update(25)
    assert not patience.is_exhausted()
    assert server.version() == "unverified-25"
    updates.source = Source(trained)
    assert updates.update(25).verified
    assert_serves(server, trained, 25)
    updates.close()


@pytest.mark.parametrize("strategy", ["distributed", "tensor"])
@pytest.mark.parametrize("fault", ["bit", "place"])
def test_a_fault_on_the_way_is_named_by_tensor_and_rank(
    server: RunningServer, trained: Path, fault: str, strategy: str
) -> None:
    """A message is spoiled after it was hashed: one bit, or two slices of equal size in each other's place."""
    weights = read(trained)
    updates = updater(server.weights(), Source(trained), strategy=strategy)
    assert isinstance(updates._strategy, ShardStrategy)
    message = updates._strategy.shards.messages[-1]
    first = message.slices[0]
    second = next(part for part in message.slices[1:] if part.shape == first.shape)
    other = {first: second, second: first}

    def alter(part: Slice, values: Tensor) -> Tensor:
        if fault == "bit" and part is first:
            values.view(torch.uint8).view(-1)[3] ^= 1
        if fault == "place" and part in other:
            own_part = other[part]
            return own_part.of_piece(weights[own_part.name])
        return values

    with altered_on_the_way(alter), pytest.raises(WeightUpdateError) as failure:
        updates.update(30)
    assert failure.value.engines == (server.process.url,)
    parts = server.weights().tensors.parts
    named = {part.tensor for part in parts[first.name] if part.rank in message.column}
    if fault == "place":
        named |= {part.tensor for part in parts[second.name] if part.rank in message.column}
    for name in named:
        assert f"{name} on engine rank {message.column[0]}" in str(failure.value)
    assert server.version() == "unverified-30"
    assert updates.update(30).verified
    updates.close()


def test_a_server_with_sglangs_loader_is_refused(server: RunningServer, trained: Path) -> None:
    engine = server.weights()
    engine.places_directly = False
    with pytest.raises(WeightUpdateError, match="disk"):
        updater(engine, Source(trained))


def kill_before(method: str, engine: EngineWeights, group: int) -> None:
    """Kill the server's process ``group`` when an update calls ``method`` of ``engine``."""
    original = getattr(engine, method)

    async def dying(*arguments: Any, **options: Any) -> Any:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        return await original(*arguments, **options)

    setattr(engine, method, dying)


CALLS = {
    "drain": "pause_when_idle",
    "begin": "set_version",
    "memory": "checksums",
    "join": "open_group",
    "session": "begin",
    "transfer": "receive",
    "end": "end",
    "verify": "checksums",
    "canary": "score",
    "commit": "resume",
}
"""Phase -> the call of an update in which a server dies. ``memory`` is of updates of changes only."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", CALLS)
def test_a_server_that_joined_dies_in_each_phase(
    server: RunningServer, trained: Path, phase: str
) -> None:
    """The error names the dead server, in time. The other server serves the version before or none, and the next
    update without the dead server succeeds."""
    first_url = server.process.url
    second = serve(server.folder)
    engines = [server.weights(), second.weights()]
    options = {"changes_only": phase == "memory", "timeout_s": 20}
    updates = updater(engines, Source(trained), **options)
    try:
        updates.attach([first_url])
        assert updates.update(100).verified
        # The second server joins.
        updates.attach([first_url, second.process.url])
        updates.source = Source(server.folder)
        if phase != "join":
            assert updates.update(101).verified
            assert_serves(second, server.folder, 101)
        kill_before(CALLS[phase], engines[1], second.process.pid)
        updates.source = Source(trained)
        patience = own_patience(20 + 3 * GRACE_S + 10)
        with pytest.raises(WeightUpdateError) as failure:
            updates.update(102)
        assert not patience.is_exhausted()
        assert failure.value.engines == (second.process.url,)
        assert updates.committed_version is None
        before = "100" if phase == "join" else "101"
        keeps_version = phase in ("drain", "memory")
        assert server.version() == (before if keeps_version else "unverified-102")
        updates.attach([first_url])
        updates.source = Source(trained)
        assert updates.update(102).verified
        assert_serves(server, trained, 102)
        updates.close()
    finally:
        second.process.kill()


FP8_SIZES: dict[str, Any] = {
    "hidden": 128,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 256,
    "num_experts": 4,
}
"""On two engine ranks each share is a multiple of the block size 128; on two trainer ranks, too."""


@pytest.mark.slow
def test_block_fp8_and_kept_messages(tmp_path: Path) -> None:
    """The server keeps whole messages until the end: an interrupted update leaves the version before."""
    folders = [
        save_tiny_model(tmp_path / str(seed), seed=seed, dtype=torch.bfloat16, **FP8_SIZES)
        for seed in range(2)
    ]
    server = serve(folders[0], quantization="fp8", atomic_updates=True, tp_size=2)
    try:
        sources = [Source(folder) for folder in folders]
        updates = updater(server.weights(), sources[1], canary_every=0)
        updates.is_atomic = True
        report = updates.update(1)
        kept = server.weights().tensors.kept_bytes(torch.bfloat16)
        assert (report.verified, report.bytes_moved) == (True, kept)
        scores = engine_log_probs(server)
        assert scores[2] == "1"
        # All pieces of matrices are read once for their scales, before the first message.
        updates.source = Source(folders[0], interrupt_update, reads=90)
        with pytest.raises(WeightUpdateError, match="the update was interrupted"):
            updates.update(2)
        assert engine_log_probs(server) == scores
        updates.source = sources[0]
        assert updates.update(2).verified
        assert engine_log_probs(server)[1] != scores[1]
        updates.close()
    finally:
        server.process.kill()


def send(
    url: str,
    folder: str,
    start_folder: str,
    version: int,
    dies: bool = False,
    failure: tuple[int, str] | None = None,
    strategy: str = "distributed",
    other_url: str = "",
    **parallel: int,
) -> dict[str, Any]:
    """Send ``folder`` from two ranks to a server, or to two.

    ``failure``: a rank that fails, and the plan of its failpoint. ``other_url``: another server. Then rank 0 takes
    itself for a process on the host of ``url``, and rank 1 for one on the host of ``other_url``.
    """
    urls = [url]
    if other_url:
        urls.append(other_url)
        modules: tuple[Any, ...] = (engines, shared_memory)
        for module in modules:
            module.on_this_host = urls[int(os.environ["RANK"])].__eq__
    if failure is not None and int(os.environ["RANK"]) == failure[0]:
        os.environ[failpoints.VARIABLE] = failure[1]
    trainer = Trainer.read(policy_config(folder, world_size=2, **parallel))
    config = with_small_messages(WeightSyncConfig.model_validate({"strategy": strategy}))

    async def open_engine(url: str) -> EngineWeights:
        return await engine_weights(url, start_folder)

    updates = WeightUpdater(TrainerWeights(trainer), config, first_failure, open_engine, RUNNER)
    updates.attach(urls)
    if dies and trainer.topology.rank == 1:
        assert isinstance(updates._strategy, ShardStrategy)
        batches = updates._strategy.shards.batches
        # The rank dies after its first batch.
        updates._strategy.shards.batches = DyingBatches(batches)
    report = updates.update(version)
    updates.close()
    return {"verified": report.verified, "bytes": [report.bytes_moved, report.bytes_bound]}


TRAINERS = [
    ("distributed", {"tensor": 2}),
    ("distributed", {"expert": 2}),
    ("distributed", {"pipeline": 2}),
    ("tensor", {"tensor": 2}),
]


@pytest.mark.parametrize(("strategy", "parallel"), TRAINERS, ids=str)
def test_two_trainer_ranks(
    server: RunningServer, trained: Path, strategy: str, parallel: dict[str, Any]
) -> None:
    worker = "tests.integration.test_shards:send"
    where = (server.process.url, str(trained), str(server.folder), 10)
    reports = run_ranks(worker, 2, *where, strategy=strategy, **parallel)
    kept = server.weights().tensors.kept_bytes(torch.float32)
    assert reports == [{"verified": True, "bytes": [kept, kept]}] * 2
    assert_serves(server, trained, 10)


def send_to_two_hosts(
    server: RunningServer, second: RunningServer, folder: Path, version: int, **options: Any
) -> list[Any]:
    """Send through shared memory. Each rank has half of the matrices, and is on the host of a server.

    The second server's URL names this machine in another way, as if it were another host.
    """
    other_url = second.process.url.replace("127.0.0.1", "localhost")
    where = (server.process.url, str(folder), str(server.folder), version)
    options |= {"strategy": "tensor", "tensor": 2, "other_url": other_url}
    return run_ranks("tests.integration.test_shards:send", 2, *where, **options)


def test_two_hosts_in_shared_memory(
    server: RunningServer, second: RunningServer, trained: Path
) -> None:
    reports = send_to_two_hosts(server, second, trained, 11)
    kept = sum(s.weights().tensors.kept_bytes(torch.float32) for s in (server, second))
    assert reports == [{"verified": True, "bytes": [kept, kept]}] * 2
    for updated in (server, second):
        assert_serves(updated, trained, 11)


class DyingBatches(list[Sequence[Message]]):
    def __iter__(self) -> Iterator[Sequence[Message]]:
        yield self[0]
        time.sleep(1)
        os._exit(1)


def assert_takes_update(
    server: RunningServer, trained: Path, version: int, patience: Patience
) -> None:
    """Assert that a new trainer's update arrives before ``patience`` is exhausted."""
    updates = updater(server.weights(), Source(trained))
    assert updates.update(version).verified
    assert not patience.is_exhausted()
    assert_serves(server, trained, version)
    updates.close()


@pytest.mark.parametrize("strategy", ["distributed", "tensor"])
def test_a_dead_sender_leaves_the_engines_free_for_new_ranks(
    server: RunningServer, trained: Path, strategy: str
) -> None:
    worker = "tests.integration.test_shards:send"
    where = (server.process.url, str(trained), str(server.folder), 40)
    with pytest.raises(RankFailedError):
        run_ranks(worker, 2, *where, dies=True, strategy=strategy, tensor=2)
    patience = own_patience(TIMEOUT_S / 2)
    assert_takes_update(server, trained, 41, patience)


@pytest.mark.parametrize("fault", ["memory", "message"])
def test_what_one_rank_cannot_open_or_place_fails_the_request_of_all(
    server: RunningServer, trained: Path, fault: str
) -> None:
    """A sender's memory goes with the sender. SGLang answers with the result of the first rank alone."""
    engine = server.weights()
    data = shared_empty(16, "cpu")
    payloads_of = shared_bytes.shared_payloads

    def without_memory(by_rank: Sequence[Sequence[SharedBytes]]) -> list[str]:
        payloads = payloads_of(by_rank)
        _, name, _ = data.untyped_storage()._share_filename_cpu_()
        Path("/dev/shm", name.decode().lstrip("/")).unlink()
        return payloads

    RUNNER.run(engine.begin())
    with pytest.MonkeyPatch.context() as patch:
        if fault == "memory":
            patch.setattr("megatron_dppo.weights.engine_weights.shared_payloads", without_memory)
        expected = {"memory": "memory cannot be opened", "message": "one version of megatron_dppo"}
        with pytest.raises(EngineRequestError, match=expected[fault]):
            RUNNER.run(engine.receive_shared([[], [SharedBytes("{}", data)]]))
    assert_takes_update(server, trained, 46, own_patience(TIMEOUT_S / 2))


DEATHS = [
    ("distributed", 0, "begin", 1),
    ("distributed", 0, "gather", 1),
    ("distributed", 0, "transfer", 2),
    ("distributed", 0, "arrive", 1),
    ("distributed", 0, "end", 1),
    ("distributed", 0, "verify", 1),
    ("distributed", 0, "commit", 1),
    ("distributed", 1, "begin", 1),
    ("distributed", 1, "begin", 2),
    ("distributed", 1, "gather", 1),
    ("distributed", 1, "hash", 1),
    ("distributed", 1, "arrive", 1),
    ("tensor", 0, "transfer", 2),
    ("tensor", 0, "end", 1),
    ("tensor", 1, "gather", 2),
    ("tensor", 1, "arrive", 1),
]
"""Ranks, the phases in which they die, and in which call. In its second call of ``begin``, a rank joins the group."""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rank", "phase", "call"), DEATHS)
def test_a_rank_that_dies_in_any_phase_leaves_the_engines_free(
    server: RunningServer, trained: Path, strategy: str, rank: int, phase: str, call: int
) -> None:
    updates = updater(server.weights(), Source(server.folder))
    assert updates.update(42).verified
    updates.close()
    worker = "tests.integration.test_shards:send"
    where = (server.process.url, str(trained), str(server.folder), 43)
    failure = (rank, f"update/{phase},kill,{call}")
    with pytest.raises(RankFailedError):
        run_ranks(worker, 2, *where, failure=failure, strategy=strategy, tensor=2)
    # In the phase begin, a rank may die before the version before is withdrawn.
    served = {"42", "unverified-43"} if phase == "begin" else {"unverified-43"}
    assert server.version() in served
    patience = own_patience(TIMEOUT_S / 2)
    assert_takes_update(server, trained, 44, patience)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "plan"),
    [
        (0, "update/transfer,kill,2"),
        (1, "update/transfer,kill,2"),
        (1, "update/begin,kill,2"),
        (1, "update/arrive,kill,1"),
        (0, "update/gather,error,3"),
        (1, "update/transfer,error,2"),
    ],
)
def test_a_rank_that_fails_on_one_host_leaves_the_engines_of_both_free(
    server: RunningServer, second: RunningServer, trained: Path, rank: int, plan: str
) -> None:
    send_to_two_hosts(server, second, server.folder, 52)
    with pytest.raises(RankFailedError) as failure:
        send_to_two_hosts(server, second, trained, 53, failure=(rank, plan))
    if "error" in plan:
        # The other rank does not wait for this one.
        assert str(failure.value).count("WeightUpdateError: weight update to version 53") == 2
    for failed in (server, second):
        assert failed.version() in (
            {"52", "unverified-53"} if "begin" in plan else {"unverified-53"}
        )
    patience = own_patience(TIMEOUT_S / 2)
    send_to_two_hosts(server, second, trained, 54)
    assert not patience.is_exhausted()
    for updated in (server, second):
        assert_serves(updated, trained, 54)


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 3])
def test_an_error_of_one_rank_fails_the_update_on_all(
    server: RunningServer, trained: Path, call: int
) -> None:
    """A rank cannot read its weights, or fails between two messages."""
    worker = "tests.integration.test_shards:send"
    where = (server.process.url, str(trained), str(server.folder), 45)
    with pytest.raises(RankFailedError) as failure:
        run_ranks(worker, 2, *where, failure=(1, f"update/gather,error,{call}"), tensor=2)
    assert str(failure.value).count("WeightUpdateError: weight update to version 45") == 2
    assert server.version() == "unverified-45"
    patience = own_patience(TIMEOUT_S / 2)
    assert_takes_update(server, trained, 46, patience)
