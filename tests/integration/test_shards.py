"""Updates in shards into real SGLang servers on a CPU: every engine rank receives only what it keeps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import local_parameters
from megatron_dppo.trainer.collectives import first_failure
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import TrainerWeights
from megatron_dppo.weight_sync.engines import GRACE_S
from megatron_dppo.weight_sync.transaction import WeightUpdateError, WeightUpdater
from tests.integration.weight_server import (
    RUNNER,
    RunningServer,
    Source,
    assert_serves,
    engine_weights,
    policy_config,
    read,
    serve,
    updater,
)
from tests.patience import own_patience
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


class ShardSource(Source):
    """The weights of a folder, on one trainer rank. ``between`` runs when the update has read ``reads`` tensors."""

    layout = Layout()

    def __init__(self, folder: Path, between: Callable[[], None] | None = None) -> None:
        super().__init__(read(folder), between, model=folder)
        self.shape = load_model_shape(folder)

    def all_max(self, values: Tensor) -> Tensor:
        return values

    def values(self) -> Mapping[ParameterKey, Tensor]:
        values: dict[ParameterKey, Tensor] = {}
        for parameter in local_parameters(self.shape, self.layout, 0):
            local = torch.zeros(parameter.shape)
            for segment in parameter.segments:
                segment.of_local(local).copy_(segment.of_hf(self.weights[segment.hf_name]))
            values[parameter.chunk, parameter.name] = local
        if self.between is not None:
            self.between()
        return values


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two ranks, each with half of the experts. Vocabulary and experts are padded, and embeddings are tied."""
    folder = save_tiny_model(tmp_path_factory.mktemp("first"), vocab_size=500, tied=True)
    server = serve(folder, tp_size=2, ep_size=2)
    yield server
    server.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return save_tiny_model(folder, vocab_size=500, tied=True, seed=1)


def shard_updater(server: RunningServer, source: ShardSource, **options: Any) -> WeightUpdater:
    return updater(server.weights(), source, strategy="shards", **options)


def test_the_engine_ranks_receive_what_they_keep(server: RunningServer, trained: Path) -> None:
    updates = shard_updater(server, ShardSource(trained))
    report = updates.update(1)
    assert (report.verified, report.tensors) == (True, 2 * 21)
    assert report.bytes == sum(t.nbytes for t in read(trained).values())
    kept = server.weights().tensors.kept_bytes(torch.float32)
    assert report.bytes_moved == report.bytes_bound == kept
    assert_serves(server, trained, 1)
    # The group is kept for the next update.
    updates.source = ShardSource(server.folder)
    assert updates.update(2).verified
    assert_serves(server, server.folder, 2)
    updates.close()


def send(url: str, folder: str, start_folder: str, version: int, **parallel: int) -> dict[str, Any]:
    trainer = Trainer(policy_config(folder, world_size=2, **parallel))
    config = WeightSyncConfig(strategy="shards", bucket_mib=1)

    async def open_engine(url: str) -> EngineWeights:
        return await engine_weights(url, start_folder)

    updates = WeightUpdater(TrainerWeights(trainer), config, first_failure, open_engine, RUNNER)
    updates.attach([url])
    report = updates.update(version)
    updates.close()
    return {"verified": report.verified, "bytes": [report.bytes_moved, report.bytes_bound]}


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"expert": 2}, {"pipeline": 2}], ids=str)
def test_two_trainer_ranks(server: RunningServer, trained: Path, parallel: dict[str, int]) -> None:
    worker = "tests.integration.test_shards:send"
    where = (server.process.url, str(trained), str(server.folder), 10)
    reports = run_ranks(worker, 2, *where, **parallel)
    kept = server.weights().tensors.kept_bytes(torch.float32)
    assert reports == [{"verified": True, "bytes": [kept, kept]}] * 2
    assert_serves(server, trained, 10)


def test_a_hung_engine_fails_in_time_and_recovers(server: RunningServer, trained: Path) -> None:
    group = os.getpgid(server.process.pid)
    hang = ShardSource(trained, between=lambda: os.killpg(group, signal.SIGSTOP))
    updates = shard_updater(server, hang, timeout_s=5, canary_every=0)
    patience = own_patience(5 + 2 * GRACE_S + 5)
    try:
        with pytest.raises(WeightUpdateError, match="took longer than 5 s"):
            updates.update(50)
        assert not patience.is_exhausted()
        assert updates.committed_version is None
    finally:
        os.killpg(group, signal.SIGCONT)
    assert server.version() == "unverified-50"
    updates = shard_updater(server, ShardSource(server.folder))
    assert updates.update(50).verified
    assert_serves(server, server.folder, 50)
    updates.close()
