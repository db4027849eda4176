"""Adapters are sent to the real SGLang server, alone and merged. The updates are verified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.checkpoint_conversion.adapters import AdapterFolder
from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineRequestError
from megatron_dppo.engine.protocol import (
    UNVERIFIED_VERSION,
    GenerationRequest,
    SamplingParams,
    adapter_name,
)
from megatron_dppo.engine.server.continuation import Continuation
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.generation import GenerationLimits, Results, generate_many
from megatron_dppo.fleet.membership import Member
from megatron_dppo.fleet.record import Keys, Server
from megatron_dppo.model.quantization import Rounding
from megatron_dppo.trainer.collectives import first_failure
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import AdapterWeights, TrainerWeights
from megatron_dppo.weights.adapters import AdapterUpdater
from megatron_dppo.weights.canary import Tolerance, compare_canary
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.transaction import WeightUpdateError, WeightUpdater
from tests.adapters import peft_model, save_random_adapters
from tests.integration.runs import TrainingRun, records_of, summary_of, write_material
from tests.integration.weight_server import (
    ADMIN_KEY,
    KEY,
    PROMPT,
    RUNNER,
    RunningServer,
    adapter_log_probs,
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
ALONE = {"rank": 4, "target_modules": ["attention"], "update": "adapters"}
CLOSE = Tolerance(1e-5, 1e-5)
TOKENS = [*PROMPT, 3, 50, 77, 120, 9]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that takes both kinds of updates. Its frozen model is unchanged until the update with merged weights."""
    server = serve(save_tiny_model(tmp_path_factory.mktemp("base")), lora=ALONE)
    yield server
    server.process.kill()


class DisturbedAdapters(AdapterWeights):
    """Adapters of a trainer whose log-probabilities are wrong by ``error`` nats, or whose folders are wrong."""

    error = 0.0

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.folder = DisturbedFolder(self.folder.adapters, self.folder.shape, self.folder.base)

    def score(
        self, prompts: Sequence[Sequence[int]], *, rounding: Rounding | None = None
    ) -> list[list[float]]:
        scores = super().score(prompts, rounding=rounding)
        return [[log_prob + self.error for log_prob in each] for each in scores]


class DisturbedFolder(AdapterFolder):
    is_wrong: ClassVar[bool] = False

    def write(self, out_dir: Any, tensors: Any, dtype: Any) -> None:
        first, *rest = tensors
        changed = (first[0], first[1] + 1 if self.is_wrong else first[1])
        super().write(out_dir, [changed, *rest], dtype)


async def engine_state(url: str, base: str) -> list[str]:
    """Return the engine's version and adapters."""
    engine = await engine_weights(url, base)
    held = [await engine.version(), *await engine.adapter_names()]
    await engine.close()
    return held


def update_adapters(url: str, base: str, adapters: str, exported: str) -> dict[str, Any]:
    """On two expert-parallel ranks, send only adapters: two versions, two updates that fail, and one more version."""
    lora = {**ALONE, "start_from": adapters}
    trainer = Trainer.read(
        run_config(Path(base), parallel={"world_size": 2, "expert": 2}, lora=lora)
    )
    source, settings = DisturbedAdapters(trainer), WeightSyncConfig(strategy="disk")

    async def open_engine(url: str) -> EngineWeights:
        return await engine_weights(url, base)

    updates = AdapterUpdater(source, settings, first_failure, open_engine, RUNNER)
    updates.attach([url])
    steps: list[Any] = []

    def step(version: int) -> None:
        for value in trainer.adapted.values().values():
            value.mul_(1.05)
        try:
            report = updates.update(version)
            outcome: list[Any] = [
                report.verified,
                report.bytes,
                report.tensors,
                report.canary is not None,
            ]
        except WeightUpdateError as error:
            outcome = [str(error)]
        steps.append([outcome, RUNNER.run(engine_state(url, base))])

    step(1)
    step(2)
    DisturbedFolder.is_wrong = True
    step(3)
    DisturbedFolder.is_wrong, source.error = False, 0.5
    step(3)
    source.error = 0.0
    step(3)
    updates.close()
    trainer.adapted.export(exported, trainer.config.model.hf_checkpoint)
    trainer.close()
    return {"steps": steps}


def test_the_engine_computes_with_adapters_alone(server: RunningServer, tmp_path: Path) -> None:
    adapters = save_random_adapters(tmp_path / "adapters", server.folder, ALONE)
    exported = tmp_path / "exported"
    worker = "tests.integration.test_lora_update:update_adapters"
    where = (server.process.url, str(server.folder), str(adapters), str(exported))
    found, *_ = run_ranks(worker, 2, *where)
    first, second, wrong_file, wrong_scores, third = found["steps"]
    sent = load_file(exported / "adapter_model.safetensors").values()
    size, whole = sum(t.nbytes for t in sent), len(RUNNER.run(server.weights().checksums())[0])
    # Four fused matrices' A and B in two layers, and in the first update the frozen model.
    assert first == [[True, size, whole + 8, True], ["1", "policy-1"]]
    assert second == [[True, size, 8, True], ["2", "policy-2"]]
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"
    assert f"1 engine tensors differ from the trainer's: {name}" in wrong_file[0][0]
    assert "canary" in wrong_scores[0][0]
    assert wrong_file[1] == wrong_scores[1] == ["2", "policy-2"]
    assert third[1] == ["3", "policy-3"]

    judge, _ = peft_model(str(server.folder), str(exported))
    with torch.no_grad():
        logits = judge(torch.tensor([TOKENS])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
    compare_canary([expected], [adapter_log_probs(server, "policy-3", TOKENS)], CLOSE)
    with pytest.raises(EngineRequestError, match="never been loaded: policy-4"):
        adapter_log_probs(server, "policy-4", TOKENS)
    # SGLang's own endpoint loads the folder that a run exports.
    RUNNER.run(server.weights().load_adapter("exported", str(exported)))
    compare_canary([expected], [adapter_log_probs(server, "exported", TOKENS)], CLOSE)
    RUNNER.run(server.weights().drop_adapters())


async def wait_until_under_way(fleet: FleetClient, calls: int, weights: EngineWeights) -> None:
    """Wait until the server has ``calls`` calls and has answered a later call. Each call then has 1 to 299 tokens."""
    while sum(active.in_flight for active in fleet._servers) < calls:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await weights.score([TOKENS], adapter_name(1))


def test_an_aborted_response_goes_on_with_the_new_adapters(
    server: RunningServer, tmp_path: Path
) -> None:
    """Each token's log-probability equals PEFT's with the adapters of the token's version."""
    base = str(server.folder)
    folders = [
        save_random_adapters(tmp_path / f"adapters{seed}", server.folder, ALONE, seed)
        for seed in (3, 4)
    ]
    sampling = SamplingParams(300, ignore_eos=True)
    requests = [GenerationRequest(i, PROMPT, sampling) for i in range(3)]
    member = Member(Server("engine", server.process.url, 1, 1), Keys(KEY, ADMIN_KEY))
    continuation = Continuation(lambda ids, special=True: "")

    async def load(weights: EngineWeights, version: int) -> None:
        assert await weights.pause_when_idle(5)
        await weights.set_version(f"{UNVERIFIED_VERSION}{version}")
        name = adapter_name(version)
        await weights.load_adapter(name, str(folders[version - 1]))
        await weights.set_version(str(version))
        await weights.resume()
        await weights.drop_adapters(kept=name)

    async def work() -> Results:
        weights = await engine_weights(server.process.url, base)
        fleet = FleetClient(lambda lost: None, adapters=True)
        await load(weights, 1)
        await fleet.serve([member], 1)
        limits = GenerationLimits(concurrency=3)
        generation = generate_many(fleet, requests, limits, continuation=continuation)
        running = asyncio.create_task(generation)
        await wait_until_under_way(fleet, len(requests), weights)
        await fleet.hold(abort=True)
        await load(weights, 2)
        await fleet.serve([member], 2)
        results = await running
        await fleet.close()
        await weights.drop_adapters()
        await weights.set_version("0")
        await weights.close()
        return results

    results = RUNNER.run(work())
    assert continuation.redrawn == 3
    off_by_one: list[np.ndarray] = []
    judges = [peft_model(base, str(folder))[0] for folder in folders]
    for whole in results.values():
        versions = whole.columns["weight_version"].astype(np.int64)
        assert (whole.sampled, set(versions.tolist())) == (300, {1, 2})
        tokens = torch.from_numpy(whole.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = torch.stack(
                [judge(tokens).logits[0, len(PROMPT) - 1 : -1] for judge in judges]
            )
        log_probs = logits.log_softmax(-1).numpy()
        of_own_version = log_probs[versions - 1, np.arange(300), whole.response_ids]
        other = log_probs[2 - versions, np.arange(300), whole.response_ids]
        reported = whole.columns["rollout_log_probs"]
        assert np.abs(reported - of_own_version).max() < 1e-5
        boundary = int(np.argmax(versions == 2))
        off_by_one.append(np.abs(reported - other)[boundary - 1 : boundary + 1])
    assert np.max(off_by_one) > 1e-2


def update_twice(url: str, base: str, adapters: str, merged: str) -> dict[str, Any]:
    """On two expert-parallel ranks, send merged weights twice, with the canary, and export them."""
    lora = {**SECTION, "start_from": adapters}
    trainer = Trainer.read(
        run_config(Path(base), parallel={"world_size": 2, "expert": 2}, lora=lora)
    )

    async def open_engine(url: str) -> EngineWeights:
        return await engine_weights(url, base)

    settings = WeightSyncConfig()
    updates = WeightUpdater(TrainerWeights(trainer), settings, first_failure, open_engine, RUNNER)
    updates.attach([url])
    reports = [updates.update(version) for version in (1, 2)]
    updates.close()
    trainer.export_hf(merged)
    trainer.close()
    return {
        "verified": [report.verified for report in reports],
        "bytes": [report.bytes for report in reports],
    }


def test_the_engine_runs_the_merged_model(server: RunningServer, tmp_path: Path) -> None:
    adapters = save_random_adapters(tmp_path / "adapters", server.folder, SECTION)
    merged = tmp_path / "merged"
    worker = "tests.integration.test_lora_update:update_twice"
    where = (server.process.url, str(server.folder), str(adapters), str(merged))
    found, *_ = run_ranks(worker, 2, *where)
    size = sum(t.nbytes for t in read(server.folder).values())
    assert found == {"verified": [True, True], "bytes": [size, size]}
    assert_serves(server, merged, 2)
    assert not read(merged)["model.layers.0.self_attn.q_proj.weight"].equal(
        read(server.folder)["model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_run_with_adapters_from_the_data_to_its_exports(tmp_path: Path) -> None:
    overrides = [
        "lora.rank=4",
        "lora.update=adapters",
        "weight_sync.strategy=disk",
        "algorithm.reference_kl=0.05",
        "run.steps=2",
        "optimizer.lr=0.01",
        "reward.name=tests.unit.planted_rewards:of_every_character",
    ]
    with TrainingRun(write_material(tmp_path, "qwen3"), *overrides) as run:
        run.finish()
    records = {r["step"]: r for r in records_of(run.directory)}
    trained = [records[step] for step in (1, 2)]
    updates, verified = (
        sum(r.get(f"weights/{what}", 0) for r in records.values())
        for what in ("updates", "verified")
    )
    assert updates == verified > 0
    # At the second mini-batch of a step, the policy differs from its reference.
    assert all(0 < r["reference/kl"] < 1 for r in trained)
    assert summary_of(run.directory)["hf_export_max_logprob_diff"] <= 1e-4
    config = json.loads((run.directory / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    base, merged = read(tmp_path / "model"), read(run.directory / "hf")
    adapted = {name for name in base if not base[name].equal(merged[name])}
    assert adapted
    assert all(name.split(".")[-2].endswith("_proj") for name in adapted)
