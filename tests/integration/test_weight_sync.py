"""Verified weight updates into the real SGLang server on a CPU, and every way to spoil one."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.rollout.engine_weights import EngineWeights, WireBucket
from megatron_dppo.weight_sync.base import (
    Bucket,
    ChecksumMismatchError,
    WeightUpdateError,
    WeightUpdateRefusedError,
)
from megatron_dppo.weight_sync.canary import CanaryError, compare_canary
from megatron_dppo.weight_sync.distributed import DistributedTransport
from megatron_dppo.weight_sync.update import WeightUpdater
from tests.integration.weight_server import (
    BUCKET_TENSORS,
    PROMPT,
    TIMEOUT_S,
    Generation,
    Served,
    Source,
    Weights,
    assert_serves,
    engine_log_probs,
    engine_weights,
    read,
    reference_log_probs,
    serve,
    updater,
)
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = serve(save_tiny_model(tmp_path_factory.mktemp("first"), seed=0))
    yield server
    server.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the same shape: what the trainer holds after a step."""
    return save_tiny_model(tmp_path_factory.mktemp("trained"), seed=1)


def test_the_engine_runs_the_new_weights(served: Served, trained: Path) -> None:
    assert_serves(served, served.folder, 0)
    engine = served.weights()
    updates = updater(engine, Source(read(trained)))
    report = updates.update(1)
    assert report.verified
    assert report.tensors == 21
    assert report.bytes == sum(t.nbytes for t in read(trained).values())
    assert engine.version() == "1"
    assert_serves(served, trained, 1)
    # The group is kept for the next update.
    updates._source = Source(read(served.folder))
    assert updates.update(2).verified
    assert_serves(served, served.folder, 2)
    updates.close()


def swap_gate_and_up(new: Weights, old: Weights) -> Weights:
    gate, up = (f"model.layers.0.mlp.experts.3.{x}_proj.weight" for x in ("gate", "up"))
    return {**new, gate: new[up], up: new[gate]}


def lose_an_expert(new: Weights, old: Weights) -> Weights:
    return {n: t for n, t in new.items() if ".layers.1.mlp.experts.5." not in n}


def send_a_stale_shard(new: Weights, old: Weights) -> Weights:
    name = "model.layers.1.self_attn.o_proj.weight"
    return {**new, name: torch.cat([new[name][:, :32], old[name][:, 32:]], dim=1)}


def flip_one_bit(new: Weights, old: Weights) -> Weights:
    name = "model.layers.0.self_attn.k_proj.weight"
    flipped = new[name].clone()
    flipped.view(torch.int32)[5, 11] ^= 1
    return {**new, name: flipped}


class Corrupting(EngineWeights):
    """Puts ``on_the_way`` on the wire instead of what it is handed."""

    on_the_way: Weights

    def pack(self, bucket: Bucket) -> WireBucket:
        names = [name for name, _ in bucket if name in self.on_the_way]
        return super().pack([(name, self.on_the_way[name]) for name in names])


CORRUPTIONS = [
    (swap_gate_and_up, {"model.layers.0.mlp.experts.w13_weight"}),
    (
        lose_an_expert,
        {"model.layers.1.mlp.experts.w13_weight", "model.layers.1.mlp.experts.w2_weight"},
    ),
    (send_a_stale_shard, {"model.layers.1.self_attn.o_proj.weight"}),
    (flip_one_bit, {"model.layers.0.self_attn.qkv_proj.weight"}),
]


@pytest.mark.parametrize(
    ("corrupt", "tensors"), CORRUPTIONS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_corruption_on_the_way_is_caught_and_named(
    served: Served, trained: Path, corrupt: Callable[..., Weights], tensors: set[str]
) -> None:
    old, new = read(served.folder), read(trained)
    updater(served.weights(), Source(old)).update(10)
    spoiled = served.weights(Corrupting)
    spoiled.on_the_way = corrupt(new, old)
    updates = updater(spoiled, Source(new))
    with pytest.raises(WeightUpdateError) as failure:
        updates.update(11)
    cause = failure.value.__cause__
    assert isinstance(cause, ChecksumMismatchError)
    assert {(m.tensor, m.rank) for m in cause.mismatches} == {(name, 0) for name in tensors}
    assert all(name in str(failure.value) for name in tensors)
    assert updates.committed_version is None
    engine = served.weights()
    assert engine.version() == "unverified-11"
    # Quarantined: no one gets an answer from these weights.
    with pytest.raises((TimeoutError, urllib.error.URLError)):
        served.post("/generate", {"input_ids": PROMPT}, timeout=2)
    updates.attach(DistributedTransport(engine, timeout_s=TIMEOUT_S))
    assert updates.update(11).verified
    assert_serves(served, trained, 11)
    updates.close()


def test_a_trainer_that_never_sends_an_expert_is_refused(served: Served, trained: Path) -> None:
    weights = read(trained)
    lost = "model.layers.1.mlp.experts.5.down_proj.weight"
    del weights[lost]
    updates = updater(served.weights(), Source(weights))
    with pytest.raises(WeightUpdateError, match=f"never sent: {lost}"):
        updates.update(20)
    assert served.weights().version() == "unverified-20"
    updates._source = Source(read(trained))
    assert updates.update(20).verified
    updates.close()


def test_the_canary_sees_what_checksums_cannot(served: Served, trained: Path) -> None:
    """Gate and up swapped by the conversion: the engine holds exactly what the trainer sent."""
    wrong = swap_gate_and_up(read(trained), {})
    updates = updater(served.weights(), Source(wrong))
    assert updates.update(30).verified
    tokens, log_probs, _ = engine_log_probs(served)
    with pytest.raises(CanaryError, match="differs by"):
        compare_canary([reference_log_probs(trained, tokens)], [log_probs], 1e-3)
    updates.close()


def test_requests_run_wholly_on_the_weights_they_began_with(served: Served, trained: Path) -> None:
    updates = updater(served.weights(), Source(read(served.folder)))
    updates.update(40)
    hurried = updater(served.weights(), Source(read(trained)), timeout_s=0.01)
    hurried.committed_version = 40
    running = Generation(served, tokens=480)
    assert running.begun.wait(60)
    with pytest.raises(WeightUpdateRefusedError, match="kept the engine busy"):
        hurried.update(41)
    assert hurried.committed_version == 40
    assert served.weights().version() == "40"
    assert running.is_alive()

    late: list[Generation] = []

    def ask_meanwhile() -> None:
        late.append(Generation(served, tokens=20))
        time.sleep(1)

    updates._source = Source(read(trained), between=ask_meanwhile)
    updates.update(41)
    assert running.versions() == ["40"]
    assert late[0].versions() == ["41"]
    assert_serves(served, trained, 41)
    updates.close()


def test_a_hung_engine_fails_in_time_and_recovers(served: Served, trained: Path) -> None:
    group = os.getpgid(served.process.pid)
    hang = Source(read(trained), between=lambda: os.killpg(group, signal.SIGSTOP))
    updates = updater(served.weights(), hang, timeout_s=5)
    start = time.monotonic()
    try:
        with pytest.raises(WeightUpdateError, match="took longer than 5 s"):
            updates.update(50)
        assert time.monotonic() - start < 20
    finally:
        os.killpg(group, signal.SIGCONT)
    updates.attach(DistributedTransport(served.weights(), timeout_s=TIMEOUT_S))
    updates._source = Source(read(served.folder))
    assert updates.update(50).verified
    assert_serves(served, served.folder, 50)
    updates.close()


def two_ranks(url: str, folder: str, model: str, corrupt: bool) -> dict[str, Any]:
    """A trainer of two ranks, each with every other tensor; rank 0 talks to the engine."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = read(Path(folder))

    class Sharded:
        def hf_buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
            items = list(weights.items())
            for start in range(0, len(items), BUCKET_TENSORS):
                bucket = []
                for i, (name, tensor) in enumerate(items[start : start + BUCKET_TENSORS]):
                    full = tensor if i % 2 == rank else torch.full_like(tensor, -1)
                    dist.broadcast(full, src=i % 2)
                    bucket.append((name, full))
                yield bucket if rank == 0 else []

    def agree(error: str | None) -> str | None:
        data = torch.zeros(2, 512, dtype=torch.uint8)
        text = (error or "").encode()[:512]
        data[rank, : len(text)] = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[
            : len(text)
        ]
        dist.all_reduce(data, dist.ReduceOp.MAX)
        errors = [bytes(row.tolist()).rstrip(b"\0").decode() for row in data]
        return next((e for e in errors if e), None)

    transport = None
    if rank == 0:
        engine = engine_weights(url, model, Corrupting)
        engine.on_the_way = flip_one_bit(weights, {}) if corrupt else weights
        transport = DistributedTransport(engine, timeout_s=TIMEOUT_S)
    updates = WeightUpdater(Sharded(), transport, WeightSyncConfig(), agree)
    try:
        report = updates.update(60)
    except WeightUpdateError as error:
        return {"error": str(error), "committed": updates.committed_version}
    updates.close()
    return {"verified": report.verified, "committed": updates.committed_version}


def test_two_trainer_ranks_share_the_outcome(served: Served, trained: Path) -> None:
    where = (served.process.url, str(trained), str(served.folder))
    worker = "tests.integration.test_weight_sync:two_ranks"
    first, second = run_ranks(worker, 2, *where, True)
    assert first == second
    assert first["committed"] is None
    assert "layers.0.self_attn.qkv_proj.weight on engine rank 0" in first["error"]
    assert run_ranks(worker, 2, *where, False) == [{"verified": True, "committed": 60}] * 2
    assert_serves(served, trained, 60)


def test_two_engine_ranks(tmp_path: Path) -> None:
    """TP=2, a vocabulary and experts that the engine pads, tied embeddings that it doesn't tie."""
    folder = save_tiny_model(tmp_path / "start", vocab_size=500, tied=True)
    trained = save_tiny_model(tmp_path / "trained", vocab_size=500, tied=True, seed=1)
    weights = read(trained)
    served = serve(folder, tp_size=2)
    try:
        updates = updater(served.weights(), Source(weights))
        report = updates.update(1)
        assert (report.verified, report.tensors) == (True, 2 * 21)
        twice = weights["model.embed_tokens.weight"].nbytes
        assert report.bytes == sum(t.nbytes for t in weights.values()) + twice
        assert_serves(served, trained, 1)
        updates.close()
    finally:
        served.process.kill()


def test_an_engine_killed_in_an_update_and_its_next_incarnation(
    served: Served, trained: Path
) -> None:
    pid = served.process.pid
    updates = updater(served.weights(), Source(read(trained)))
    updates.update(70)
    updates._source = Source(read(trained), between=lambda: os.killpg(pid, signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(WeightUpdateError):
        updates.update(71)
    assert time.monotonic() - start < 30
    assert updates.committed_version is None
    served.process.kill()

    again = serve(served.folder)
    try:
        updates.attach(DistributedTransport(again.weights(), timeout_s=TIMEOUT_S))
        updates._source = Source(read(trained))
        assert updates.update(71).verified
        assert_serves(again, trained, 71)
        updates.close()
    finally:
        again.process.kill()
