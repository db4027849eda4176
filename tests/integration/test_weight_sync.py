"""Verified weight updates into the real SGLang server on a CPU, and every way to spoil an update."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.fleet.membership import Member
from megatron_dppo.fleet.record import Keys, Server
from megatron_dppo.loop import server_access
from megatron_dppo.loop.server_access import ServerAccess
from megatron_dppo.spec import RunSpec
from megatron_dppo.trainer.collectives import first_failure
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import TrainerWeights
from megatron_dppo.weights.engine_weights import EngineWeights, MemoryOrderError, WireHeader
from megatron_dppo.weights.engines import GRACE_S, EngineFaultError, Engines
from megatron_dppo.weights.shards import ShardChecksums
from megatron_dppo.weights.shared_bytes import SharedBytes
from megatron_dppo.weights.source import Plan
from megatron_dppo.weights.transaction import (
    AlteredEngineError,
    UpdateReport,
    WeightUpdateError,
    WeightUpdater,
    WeightUpdateRefusedError,
)
from megatron_dppo.weights.verification import ChecksumMismatchError
from tests.integration.dying_ranks import PARKED, POINTS
from tests.integration.runs import ROOT
from tests.integration.weight_server import (
    ADMIN_KEY,
    KEY,
    PROMPT,
    RUNNER,
    TIMEOUT_S,
    Generation,
    RunningServer,
    Source,
    Weights,
    altered_on_the_way,
    assert_serves,
    engine_log_probs,
    engine_weights,
    policy_config,
    read,
    reference_log_probs,
    run_config,
    serve,
    updater,
)
from tests.patience import UNBOUNDED_S, own_patience
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = serve(save_tiny_model(tmp_path_factory.mktemp("first"), seed=0))
    yield server
    server.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the same shape: the trainer's weights after a step."""
    return save_tiny_model(tmp_path_factory.mktemp("trained"), seed=1)


@pytest.mark.first
def test_the_engine_runs_the_new_weights(server: RunningServer, trained: Path) -> None:
    assert_serves(server, server.folder, 0)
    engine = server.weights()
    updates = updater(engine, Source(trained))
    report = updates.update(1)
    assert report.verified
    assert report.tensors == 21
    assert report.bytes == sum(t.nbytes for t in read(trained).values())
    assert server.version() == "1"
    assert_serves(server, trained, 1)
    # The group is kept for the next update.
    updates.source = Source(server.folder)
    assert updates.update(2).verified
    assert_serves(server, server.folder, 2)
    updates.close()


def nudge(weights: Weights) -> Weights:
    """Return the weights after a small step: one element of every tensor has changed."""
    new: Weights = {}
    for name, tensor in weights.items():
        new[name] = tensor.clone()
        new[name].view(-1)[3] += 1
    return new


def interrupt_update() -> None:
    raise InterruptedError("the update was interrupted")


@pytest.mark.parametrize("strategy", ["distributed", "tensor"])
def test_changes_reach_the_engine_and_an_interrupted_update_leaves_the_version_before(
    server: RunningServer, trained: Path, strategy: str
) -> None:
    old = read(trained)
    new = nudge(old)
    updates = updater(
        server.weights(), Source(trained, weights=old), strategy=strategy, changes_only=True
    )
    assert updates.update(1).sent_fraction == 1.0
    updates.source = Source(trained, weights=new)
    report = updates.update(2)
    assert report.verified
    assert report.sent_fraction is not None
    assert report.sent_fraction < 0.01
    scores = engine_log_probs(server)
    updates.source = Source(trained, weights=nudge(new), between=interrupt_update)
    with pytest.raises(WeightUpdateError, match="the update was interrupted"):
        updates.update(3)
    assert server.version() == "2"
    assert engine_log_probs(server) == scores
    updates.source = Source(trained)
    assert updates.update(3).sent_fraction == 1.0
    assert_serves(server, trained, 3)
    updates.close()


class LateWeights(EngineWeights):
    """With ``delay_s``, its requests to receive a bucket come so late, and those that close a session later."""

    delay_s: float | None = None

    async def receive(self, header: WireHeader, group: str) -> None:
        if self.delay_s is not None:
            await asyncio.sleep(self.delay_s)
        await super().receive(header, group)

    async def receive_shared(self, by_rank: Sequence[Sequence[SharedBytes]]) -> None:
        if self.delay_s is not None:
            await asyncio.sleep(self.delay_s)
        await super().receive_shared(by_rank)

    async def _call(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        if self.delay_s is not None and path == "/end_weight_update":
            await asyncio.sleep(0.4)
        await super()._call(path, body)


@pytest.mark.parametrize("strategy", ["distributed", "tensor"])
def test_a_bucket_on_its_way_is_not_applied_after_an_interrupted_update(
    server: RunningServer, trained: Path, strategy: str
) -> None:
    """The engine must not receive changes between the requests that drop them and the end of their session."""
    old = read(trained)
    engine = server.weights(LateWeights)
    updates = updater(engine, Source(trained, weights=old), strategy=strategy, changes_only=True)
    updates.update(1)
    for delay_s in (0.01, 0.02, 0.03):
        engine.delay_s = delay_s
        updates.source = Source(trained, weights=nudge(old), between=interrupt_update)
        with pytest.raises(WeightUpdateError, match="the update was interrupted"):
            updates.update(2)
        engine.delay_s = None
        assert server.version() == "1"
        updates.source = Source(trained, weights=old)
        updates.update(1)
    updates.close()


def test_an_interrupted_update_of_whole_weights_leaves_the_version_before(
    tmp_path: Path, trained: Path
) -> None:
    """Servers with ``engine.atomic_updates`` keep received buckets until the end of an update."""
    server = serve(save_tiny_model(tmp_path / "model", seed=0), atomic_updates=True)
    try:
        updates = updater(server.weights(), Source(trained))
        updates.is_atomic = True
        updates.update(1)
        assert_serves(server, trained, 1)
        updates.source = Source(
            server.folder, weights=read(server.folder), between=interrupt_update
        )
        with pytest.raises(WeightUpdateError, match="the update was interrupted"):
            updates.update(2)
        assert_serves(server, trained, 1)
        updates.source = Source(server.folder)
        updates.update(2)
        assert_serves(server, server.folder, 2)
        updates.close()
    finally:
        server.process.kill()


def swap_gate_and_up(new: Weights, old: Weights) -> Weights:
    gate, up = (f"model.layers.0.mlp.experts.3.{x}_proj.weight" for x in ("gate", "up"))
    return {**new, gate: new[up], up: new[gate]}


def lose_an_expert(new: Weights, old: Weights) -> Weights:
    return {n: old[n] if ".layers.1.mlp.experts.5." in n else t for n, t in new.items()}


def send_a_stale_shard(new: Weights, old: Weights) -> Weights:
    name = "model.layers.1.self_attn.o_proj.weight"
    return {**new, name: torch.cat([new[name][:, :32], old[name][:, 32:]], dim=1)}


def flip_one_bit(new: Weights, old: Weights) -> Weights:
    name = "model.layers.0.self_attn.k_proj.weight"
    flipped = new[name].clone()
    flipped.view(torch.int32)[5, 11] ^= 1
    return {**new, name: flipped}


def arriving_as(weights: Weights) -> AbstractContextManager[None]:
    """Within the context, an engine of one rank receives ``weights`` in place of the trainer's weights."""
    return altered_on_the_way(lambda part, _: part.of_block(weights[part.name]))


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
@pytest.mark.first
def test_a_corruption_on_the_way_is_caught_and_named(
    server: RunningServer, trained: Path, corrupt: Callable[..., Weights], tensors: set[str]
) -> None:
    old, new = read(server.folder), read(trained)
    updater(server.weights(), Source(trained, weights=old)).update(10)
    updates = updater(server.weights(), Source(trained, weights=new), strategy="tensor")
    with arriving_as(corrupt(new, old)), pytest.raises(WeightUpdateError) as failure:
        updates.update(11)
    assert failure.value.engines == (server.process.url,)
    fault = failure.value.__cause__
    assert isinstance(fault, EngineFaultError)
    cause = fault.faults[server.process.url]
    assert isinstance(cause, ChecksumMismatchError)
    assert {(m.tensor, m.rank) for m in cause.mismatches} == {(name, 0) for name in tensors}
    assert all(name in str(failure.value) for name in tensors)
    assert updates.committed_version is None
    assert server.version() == "unverified-11"
    # The engine is quarantined: no client gets an answer from these weights.
    with pytest.raises((TimeoutError, urllib.error.URLError)):
        server.post("/generate", {"input_ids": PROMPT}, timeout=2)
    updates.attach([server.process.url])
    assert updates.update(11).verified
    assert_serves(server, trained, 11)
    updates.close()


class SourceWithout(Source):
    """Weights whose plan leaves out the tensor ``lost``."""

    def __init__(self, folder: Path, lost: str) -> None:
        super().__init__(folder, weights=read(folder))
        self._lost = lost

    def plan(self, bucket_bytes: int) -> Plan:
        buckets = []
        for bucket in super().plan(bucket_bytes):
            kept = tuple(tensor for tensor in bucket.tensors if tensor.name != self._lost)
            buckets.append(replace(bucket, tensors=kept))
        return buckets


def test_a_trainer_that_never_sends_an_expert_is_refused(
    server: RunningServer, trained: Path
) -> None:
    lost = "model.layers.1.mlp.experts.5.down_proj.weight"
    updates = updater(server.weights(), SourceWithout(trained, lost), strategy="disk")
    with pytest.raises(WeightUpdateError, match=f"never sent: {lost}"):
        updates.update(20)
    assert server.version() == "unverified-20"
    assert updater(server.weights(), Source(trained, weights=read(trained))).update(20).verified


def test_a_bug_of_the_senders_surfaces_and_frees_the_engine_at_once(
    server: RunningServer, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer can't compute the checksums from the second message on."""
    source = Source(trained, weights=read(trained))
    updates = updater(server.weights(), source, strategy="tensor")
    add, count = ShardChecksums.add, itertools.count()

    def fail(checksums: ShardChecksums, *arguments: Any) -> None:
        if next(count):
            raise ValueError("no such checksum")
        add(checksums, *arguments)

    monkeypatch.setattr(ShardChecksums, "add", fail)
    patience = own_patience(TIMEOUT_S / 3)
    with pytest.raises(ValueError, match=r"^no such checksum$"):
        updates.update(21)
    assert not patience.is_exhausted()
    monkeypatch.undo()
    assert server.version() == "unverified-21"
    assert updater(server.weights(), Source(trained, weights=read(trained))).update(21).verified


def swap_every_gate_and_up(new: Weights) -> Weights:
    def other(name: str) -> str:
        if ".gate_proj." in name:
            return name.replace(".gate_proj.", ".up_proj.")
        return name.replace(".up_proj.", ".gate_proj.")

    return {name: new[other(name)] for name in new}


@pytest.mark.first
def test_the_canary_sees_what_checksums_cannot(server: RunningServer, trained: Path) -> None:
    """The conversion swaps gate and up projections. The checksums agree: the engine has the weights that were sent."""
    wrong = Source(trained, weights=swap_every_gate_and_up(read(trained)))
    wrong.model = trained
    updates = updater(server.weights(), wrong)
    with pytest.raises(
        WeightUpdateError, match=r"version 30: CanaryError: .* differs by"
    ) as failure:
        updates.update(30)
    assert failure.value.engines == (server.process.url,)
    engine = server.weights()
    assert server.version() == "unverified-30"
    with pytest.raises((TimeoutError, urllib.error.URLError)):
        server.post("/generate", {"input_ids": PROMPT}, timeout=2)
    # Without the canary the update passes.
    assert updater(engine, Source(trained, weights=wrong.weights)).update(30).verified
    right = updater(engine, Source(trained))
    report = right.update(31)
    assert report.canary is not None
    assert report.canary.tokens == 4 * 23
    assert report.canary.max_abs_diff < 1e-4
    assert 0 < report.canary.decode_max_abs_diff < 1e-4
    assert_serves(server, trained, 31)


def test_weights_that_changed_since_the_last_update_are_noticed_before_the_next(
    server: RunningServer, trained: Path
) -> None:
    """The comparison comes first: an engine answers no request for checksums once the session of an update is open."""
    new = read(trained)
    updates = updater(server.weights(), Source(trained, weights=new))
    updates.compare_before_every = 1
    assert updates.update(33).verified
    assert updates.update(34).verified
    other = {name: tensor.clone() for name, tensor in new.items()}
    other["model.norm.weight"] += 1
    assert updater(server.weights(), Source(trained, weights=other)).update(35).verified
    with pytest.raises(AlteredEngineError, match=r"version 34.*model\.norm\.weight"):
        updates.update(36)
    assert server.version() == "unverified-36"
    assert updater(server.weights(), Source(trained, weights=new)).update(37).verified


class FolderSpoilingWeights(EngineWeights):
    """Flips one bit of the folder before the engine reads it."""

    async def load_folder(self, folder: str) -> None:
        (file,) = Path(folder).glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        await super().load_folder(folder)


@pytest.mark.parametrize("strategy", ["tensor", "disk"])
def test_other_strategies_keep_the_same_promises(
    server: RunningServer, trained: Path, tmp_path: Path, strategy: str
) -> None:
    new = read(trained)
    spoiled = server.weights(FolderSpoilingWeights)
    options: dict[str, Any] = {"strategy": strategy, "directory": str(tmp_path)}
    with (
        arriving_as(flip_one_bit(new, {})),
        pytest.raises(WeightUpdateError, match="1 engine tensors differ from the trainer's"),
    ):
        updater(spoiled, Source(trained, weights=new), **options).update(80)
    assert server.version() == "unverified-80"
    updates = updater(server.weights(), Source(trained), **options)
    report = updates.update(80)
    assert report.verified
    assert report.bytes == report.bytes_moved == sum(t.nbytes for t in new.values())
    assert_serves(server, trained, 80)
    old = Source(server.folder)
    updates.source = old
    assert updates.update(81).verified
    assert_serves(server, server.folder, 81)
    assert list(tmp_path.iterdir()) == []
    updates.close()


def test_requests_run_wholly_on_the_weights_they_began_with(
    server: RunningServer, trained: Path
) -> None:
    updates = updater(server.weights(), Source(server.folder, weights=read(server.folder)))
    updates.update(40)
    hurried_updates = updater(
        server.weights(), Source(trained, weights=read(trained)), timeout_s=0.01
    )
    hurried_updates.committed_version = 40
    running = Generation(server, tokens=480)
    assert running.begun.wait(60)
    # A paused request can't end before the update, even on a busy machine.
    RUNNER.run(server.weights().pause())
    assert running.is_alive()
    with pytest.raises(WeightUpdateRefusedError, match="kept the engine busy"):
        hurried_updates.update(41)
    assert hurried_updates.committed_version == 40
    assert server.version() == "40"
    assert running.is_alive()

    late: list[Generation] = []

    def send_late_request() -> None:
        late.append(Generation(server, tokens=20))
        time.sleep(1)

    updates.source = Source(trained, weights=read(trained), between=send_late_request)
    updates.update(41)
    assert running.versions() == ["40"]
    assert late[0].versions() == ["41"]
    assert_serves(server, trained, 41)
    updates.close()


@pytest.fixture(scope="module")
def dying_ranks(server: RunningServer, trained: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.dying_ranks"]
    process = subprocess.Popen(
        [*command, server.process.url, str(server.folder), str(trained)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


FAST_POINTS = ("joining", "streaming", PARKED)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[] if point in FAST_POINTS else [pytest.mark.slow])
        for point in (*POINTS, PARKED)
    ],
)
def test_new_ranks_take_a_server_over_from_one_that_died_in_an_update(
    server: RunningServer,
    trained: Path,
    dying_ranks: subprocess.Popen[str],
    point: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The server notices at its own pace that the other side of the group has died; a busy machine makes it slow.
    monkeypatch.setattr(server_access, "_FORGET_S", UNBOUNDED_S)
    engine_section = {"device": "cpu", "hang_timeout_s": UNBOUNDED_S}
    config = run_config(server.folder, engine=engine_section)
    spec = RunSpec.of_checked(config)
    earlier_access, access = [ServerAccess(config, spec.model, spec.servers) for _ in range(2)]
    member = Member(Server("engine0", server.process.url), Keys(KEY, ADMIN_KEY))
    earlier_engine = RUNNER.run(earlier_access.open_weights(member))
    updater(earlier_engine, Source(server.folder, weights=read(server.folder))).update(35)
    assert dying_ranks.stdin is not None
    assert dying_ranks.stdout is not None
    print(point, file=dying_ranks.stdin, flush=True)
    assert dying_ranks.stdout.readline() == f"{point}\n"
    RUNNER.run(access.forget_ranks(member))
    engine = RUNNER.run(access.open_weights(member))
    assert engine.groups == ()
    assert engine.occupation.released == ({"kv_cache", "weights"} if point == PARKED else set())
    updates = updater(engine, Source(trained))
    if point == PARKED:
        updates.leave_devices = lambda: None
    assert updates.update(36).verified
    assert_serves(server, trained, 36)
    updates.close()


async def interrupt(engine: EngineWeights) -> None:
    """Put running requests back into the queue with the tokens that they have."""
    await engine.client.control_json("/pause_generation", {"mode": "retract"})
    await engine.flush()


async def load(engine: EngineWeights, folder: Path, version: int) -> None:
    await engine.begin()
    await engine.load_folder(str(folder))
    await engine.end()
    await engine.set_version(str(version))
    await engine.flush()


def test_a_request_in_flight_keeps_every_token_while_the_memory_is_away(
    server: RunningServer, trained: Path
) -> None:
    updater(server.weights(), Source(server.folder, weights=read(server.folder))).update(45)
    engines = Engines([server.weights()], RUNNER)
    running = Generation(server, tokens=300, return_logprob=True)
    assert running.begun.wait(60)
    while running.info["completion_tokens"] < 20:
        time.sleep(0.01)
    # A call that would kill the server is not sent.
    with pytest.raises(MemoryOrderError):
        engines.each(lambda engine: engine.restore(["weights"]))
    with pytest.raises(EngineFaultError, match="can't release memory: requests are running"):
        engines.release()

    engines.each(interrupt)
    engines.release()
    with pytest.raises(MemoryOrderError):
        engines.release(["kv_cache"])
    with pytest.raises(MemoryOrderError):
        engines.each(lambda engine: engine.resume())
    engines.each(lambda engine: engine.restore(["weights"]))
    engines.each(lambda engine: load(engine, trained, version=46))
    engines.each(lambda engine: engine.restore())
    engines.each(lambda engine: engine.resume())

    assert running.versions() == ["45", "46"]
    entries = running.info["output_token_logprobs"]
    tokens = PROMPT + [int(entry[1]) for entry in entries]
    assert len(entries) == 300
    found = [entry[0] for entry in entries]
    for span, folder in zip(running.info["weight_versions"], (server.folder, trained), strict=True):
        start, end = span["start"], span["end"]
        assert end - start >= 20
        expected = reference_log_probs(folder, tokens)[len(PROMPT) - 1 :]
        assert found[start:end] == pytest.approx(expected[start:end], abs=1e-4)
    engines.close()


def test_a_paused_engine_leaves_the_processor_to_others(server: RunningServer) -> None:
    """SGLang's unmodified scheduler uses a whole core while it is paused."""
    engine = server.weights()
    children = psutil.Process(server.process.pid).children(recursive=True)
    (scheduler,) = [child for child in children if "scheduler" in child.name()]
    assert RUNNER.run(engine.pause_when_idle(30))
    before = sum(scheduler.cpu_times()[:2])
    time.sleep(2)
    assert sum(scheduler.cpu_times()[:2]) - before < 0.2
    RUNNER.run(engine.resume())


def test_a_hung_engine_fails_in_time_and_recovers(server: RunningServer, trained: Path) -> None:
    group = os.getpgid(server.process.pid)
    hang = Source(trained, weights=read(trained), between=lambda: os.killpg(group, signal.SIGSTOP))
    updates = updater(server.weights(), hang, timeout_s=5, canary_every=0)
    patience = own_patience(5 + 2 * GRACE_S + 5)
    try:
        with pytest.raises(WeightUpdateError, match="took longer than 5 s"):
            updates.update(50)
        assert not patience.is_exhausted()
        assert updates.committed_version is None
    finally:
        os.killpg(group, signal.SIGCONT)
    assert server.version() == "unverified-50"
    updates = updater(server.weights(), Source(server.folder))
    assert updates.update(50).verified
    assert_serves(server, server.folder, 50)
    updates.close()


def expert_parallel(url: str, trained: str, start_folder: str) -> list[dict[str, Any]]:
    """On two expert-parallel trainer ranks: send an update with one flipped bit, and then a right update."""
    trainer = Trainer.read(policy_config(trained, world_size=2, expert=2))
    weights = read(Path(trained))
    outcomes = []
    for on_the_way in (flip_one_bit(weights, {}), weights):

        async def open_engine(url: str) -> EngineWeights:
            return await engine_weights(url, start_folder)

        config = WeightSyncConfig(changes_only=True, strategy="tensor")
        updates = WeightUpdater(TrainerWeights(trainer), config, first_failure, open_engine, RUNNER)
        updates.attach([url])
        try:
            with arriving_as(on_the_way):
                outcomes.append(outcome(updates.update(60)))
            outcomes[-1]["changed"] = updates.update(60).bytes
        except WeightUpdateError as error:
            outcomes.append({"error": str(error), "engines": list(error.engines)})
        outcomes[-1]["committed"] = updates.committed_version
        updates.close()
    return outcomes


def outcome(report: UpdateReport) -> dict[str, Any]:
    return {
        "verified": report.verified,
        "bytes": [report.bytes, report.bytes_moved, report.bytes_bound],
    }


def test_two_trainer_ranks_send_what_each_holds(server: RunningServer, trained: Path) -> None:
    where = (server.process.url, str(trained), str(server.folder))
    worker = "tests.integration.test_weight_sync:expert_parallel"
    first, second = run_ranks(worker, 2, *where)
    assert first == second
    failed, done = first
    assert failed["committed"] is None
    assert failed["engines"] == [server.process.url]
    assert "layers.0.self_attn.qkv_proj.weight on engine rank 0" in failed["error"]
    size = sum(t.nbytes for t in read(trained).values())
    # The ranks exchange nothing.
    changed = done.pop("changed")
    assert done == {"verified": True, "bytes": [size] * 3, "committed": 60}
    # Nothing has changed: each rank sends one item of its message.
    assert changed == 2 * 8
    assert_serves(server, trained, 60)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_engine_ranks(tmp_path: Path, ep_size: int) -> None:
    """With TP=2 the engine pads vocabulary and experts, and does not tie tied embeddings. EP=2 has whole experts."""
    folder = save_tiny_model(tmp_path / "start", vocab_size=500, tied=True)
    trained = save_tiny_model(tmp_path / "trained", vocab_size=500, tied=True, seed=1)
    weights = read(trained)
    server = serve(folder, tp_size=2, ep_size=ep_size)
    try:
        assert_serves(server, folder, 0)
        updates = updater(server.weights(), Source(trained, weights=weights), changes_only=True)
        report = updates.update(1)
        assert (report.verified, report.tensors) == (True, 2 * 21)
        kept = server.weights().tensors.kept_bytes(torch.float32)
        assert report.bytes_moved == report.bytes_bound == kept
        # The embedding is sent once, although the engine holds it twice.
        assert report.bytes == sum(t.nbytes for t in weights.values())
        assert_serves(server, trained, 1)
        updates.source = Source(trained, weights=nudge(weights))
        report = updates.update(2)
        assert report.verified
        # One item of every tensor, and one of every message without a change.
        assert 8 * len(weights) <= report.bytes < 8 * 2 * len(weights)
        updates.close()
    finally:
        server.process.kill()


def test_an_engine_killed_in_the_update_of_two(server: RunningServer, trained: Path) -> None:
    """The living engine serves the version before until an update without the dead engine. Then the dead engine's
    successor joins.

    Updates send only changes, but whole weights after the failure and in the first update of the new pair of servers.
    """
    earlier_groups = set(server.weights().groups)
    second = serve(server.folder)
    pid = second.process.pid
    both = [server.weights(), second.weights()]
    try:
        updates = updater(both, Source(trained), changes_only=True)
        report = updates.update(70)
        size = sum(t.nbytes for t in read(trained).values())
        assert (report.tensors, report.bytes_moved) == (2 * 21, 2 * size)
        assert_serves(server, trained, 70)
        assert_serves(second, trained, 70)
        changed = nudge(read(trained))
        updates.source = Source(
            trained, weights=changed, between=lambda: os.killpg(pid, signal.SIGKILL)
        )
        patience = own_patience(30)
        with pytest.raises(WeightUpdateError) as failure:
            updates.update(71)
        assert not patience.is_exhausted()
        assert failure.value.engines == (second.process.url,)
        assert updates.committed_version is None
        assert_serves(server, trained, 70)
        updates.source = Source(server.folder)
        updates.attach([server.process.url])
        assert updates.update(71).sent_fraction == 1.0
        assert_serves(server, server.folder, 71)
        # The engine has left the group of the failed update. Otherwise it would keep the group's connections.
        assert len(set(server.weights().groups) - earlier_groups) == 1
        second.process.kill()

        second = serve(server.folder)
        pair = [server.weights(), second.weights()]
        joined = updater(pair, Source(trained, weights=read(trained)), changes_only=True)
        assert joined.update(72).sent_fraction == 1.0
        assert_serves(server, trained, 72)
        assert_serves(second, trained, 72)
        joined.source = Source(trained, weights=changed)
        report = joined.update(73)
        assert report.verified
        # The first server sends the changes on to the second.
        assert report.bytes_moved == 2 * report.bytes < size / 10
        joined.close()
    finally:
        second.process.kill()
