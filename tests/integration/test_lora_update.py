"""Merged adapters on their way into the real SGLang server: verified like full weights, and the same every time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.loop.engine_session import first_failure
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import TrainerWeights
from megatron_dppo.weight_sync.transaction import WeightUpdater
from tests.adapters import save_random_adapters
from tests.integration.runs import TrainingRun, records_of, summary_of, write_material
from tests.integration.weight_server import (
    RUNNER,
    Served,
    assert_serves,
    engine_weights,
    read,
    run_config,
    serve,
)
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
SECTION = {"rank": 4}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = serve(save_tiny_model(tmp_path_factory.mktemp("base")))
    yield server
    server.process.kill()


def update_twice(url: str, base: str, adapters: str, merged: str) -> dict[str, Any]:
    """Two expert-parallel ranks send merged weights twice, canary included, and export them."""
    lora = {**SECTION, "start_from": adapters}
    trainer = Trainer(run_config(Path(base), parallel={"world_size": 2, "expert": 2}, lora=lora))

    async def open_engine(url: str) -> EngineWeights:
        return await engine_weights(url, base)

    updates = WeightUpdater(
        TrainerWeights(trainer), WeightSyncConfig(), first_failure, open_engine, RUNNER
    )
    updates.attach([url])
    reports = [updates.update(version) for version in (1, 2)]
    updates.close()
    trainer.export_hf(merged)
    trainer.close()
    return {
        "verified": [report.verified for report in reports],
        "bytes": [report.bytes for report in reports],
    }


def test_the_engine_runs_the_merged_model(served: Served, tmp_path: Path) -> None:
    adapters = save_random_adapters(tmp_path / "adapters", served.folder, SECTION)
    merged = tmp_path / "merged"
    worker = "tests.integration.test_lora_update:update_twice"
    where = (served.process.url, str(served.folder), str(adapters), str(merged))
    found, *_ = run_ranks(worker, 2, *where)
    size = sum(t.nbytes for t in read(served.folder).values())
    assert found == {"verified": [True, True], "bytes": [size, size]}
    assert_serves(served, merged, 2)
    assert not read(merged)["model.layers.0.self_attn.q_proj.weight"].equal(
        read(served.folder)["model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_run_with_adapters_from_the_data_to_its_exports(tmp_path: Path) -> None:
    overrides = [
        "lora.rank=4",
        "algorithm.reference_kl=0.05",
        "run.steps=2",
        "optimizer.lr=0.01",
        "reward.name=tests.unit.planted_rewards:of_every_character",
    ]
    with TrainingRun(write_material(tmp_path), *overrides) as run:
        run.finish()
    records = {r["step"]: r for r in records_of(run.directory)}
    trained = [records[step] for step in (1, 2)]
    updates, verified = (
        sum(r.get(f"weights/{what}", 0) for r in records.values())
        for what in ("updates", "verified")
    )
    assert updates == verified > 0
    # The second mini-batch of a step is computed by a policy that has left its reference.
    assert all(0 < r["reference/kl"] < 1 for r in trained)
    assert summary_of(run.directory)["hf_export_max_logprob_diff"] <= 1e-4
    config = json.loads((run.directory / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    base, merged = read(tmp_path / "model"), read(run.directory / "hf")
    adapted = {name for name in base if not base[name].equal(merged[name])}
    assert adapted
    assert all(name.split(".")[-2].endswith("_proj") for name in adapted)
