"""R3 against the real engine in bfloat16: because of rounding, the trainer's routers choose other
experts than the engine's, and replay removes this part of |pi - mu|. The doctor measures the parts
on a batch that has every cause of a gap.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.batch_file import load_batch, save_batch
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.protocol import RoutedShape, SamplingParams
from megatron_dppo.fleet.generation import GenerationJob, GenerationLimits, generate_many
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.ports import free_port
from tests.integration.runs import TrainingRun, records_of, summary_of, write_material
from tests.integration.test_engine import ADMIN_KEY, API_KEY, engine_of, run_config
from tests.patience import wait_healthy
from tests.ranks import ROOT
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TEMPERATURE = 0.8
PROMPTS, GROUP, TOKENS = 24, 4, 48


def generate(folder: Path, config: TrainConfig) -> None:
    """Save a batch with the engine's routing as the batch of step 1, and again as the batch of step 2.

    Version 0 sampled both. Step 2 trains on it with version 1.
    """
    engine = engine_of(config, free_port())
    try:
        engine.start()
        wait_healthy(engine)
        job = GenerationJob(
            RunData(config).train.problems,
            GROUP,
            SamplingParams(TOKENS, temperature=TEMPERATURE, ignore_eos=True),
            {"routed_experts": RoutedShape.of_model(load_model_shape(config.model.hf_checkpoint))},
        )
        with AsyncRunner() as runner:
            client = EngineClient(engine.url, API_KEY, ADMIN_KEY)
            done = runner.run(generate_many(client, job.requests(), GenerationLimits(96)))
            runner.run(client.close())
        for step in (1, 2):
            save_batch(folder / "rollouts", step, job.trajectories(done))
    finally:
        engine.kill()


def save_later_weights(model: Path, later: Path) -> None:
    """Save ``model`` with every weight changed by some percent, as some steps of training might change it."""
    shutil.copytree(model, later)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(model / "model.safetensors")
    for tensor in weights.values():
        tensor.mul_(1 + 0.03 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    save_file(weights, later / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with two saved batches. Its folder ``later`` has the weights of version 1."""
    run = tmp_path_factory.mktemp("r3") / "run"
    run.mkdir()
    model = save_tiny_model(
        run / "model", "qwen3_moe", seed=5, dtype=torch.bfloat16, layers=8,
        num_experts=32, num_experts_per_tok=4,
    )  # fmt: skip
    problems = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(PROMPTS)]
    (run / "train.jsonl").write_text("\n".join(problems) + "\n")
    config = run_config(
        model,
        run={"directory": str(run)},
        model={"dtype": "bfloat16"},
        data={"train": str(run / "train.jsonl"), "shuffle": False},
        rollout={"temperature": TEMPERATURE, "prompts_per_step": PROMPTS, "save": True},
        training={"prompts_per_mini_batch": PROMPTS // 2},
    )
    assert config.rollout.router_replay
    (run / "config.yaml").write_text(resolved_yaml(config))
    save_later_weights(model, run / "later")
    generate(run, config)
    return run


@pytest.fixture(scope="module")
def report(run) -> dict[str, Any]:
    subprocess.run(
        [sys.executable, "-m", "megatron_dppo", "doctor", str(run), "--parts", "--limit=0",
         "--weights", f"1={run / 'later'}", "--json", str(run / "gap.json"), "--png", str(run / "gap.png")],
        cwd=ROOT, check=True,
    )  # fmt: skip
    assert (run / "gap.png").stat().st_size > 50_000
    return json.loads((run / "gap.json").read_text())


@pytest.mark.slow
def test_replay_takes_the_routing_out_of_the_gap(report):
    assert report["tokens"] == PROMPTS * GROUP * TOKENS
    rungs = {rung["fixes"]: rung for rung in report["rungs"]}
    without_replay, with_replay = rungs["staleness"], rungs["routing"]
    assert (without_replay["replay"], with_replay["replay"]) == (False, True)
    assert without_replay["dtype"] == with_replay["dtype"] == "bfloat16"
    assert without_replay["weights"] == with_replay["weights"]
    gaps = f"{without_replay['gap']:.2e} -> {with_replay['gap']:.2e}"
    print(f"|pi - mu| {gaps}, routing agrees {with_replay['agreement']:.4f}")
    assert 0.5 < with_replay["agreement"] < 1, "nothing to replay: rounding changed no choice"
    assert with_replay["gap"] < 0.75 * without_replay["gap"]


@pytest.mark.slow
def test_every_cause_has_its_part(report):
    parts = report["parts"]
    assert list(parts) == ["sampling transform", "staleness", "routing", "numerics"]
    assert sum(parts.values()) == pytest.approx(report["rungs"][0]["gap"])
    assert min(parts["sampling transform"], parts["staleness"]) > 5 * parts["routing"] > 0
    assert parts["numerics"] > 0
    assert [rung["fixes"] for rung in report["rungs"]][-1] == "precision"


@pytest.mark.slow
def test_a_run_in_two_replicas_replays_the_saved_recordings(run, tmp_path):
    overrides = (
        f"run.directory={tmp_path / 'again'}", f"rollout.replay_from={run}/rollouts",
        "parallel.world_size=2", "parallel.expert=2", "checkpoint.export_hf=false",
    )  # fmt: skip
    with TrainingRun(run / "config.yaml", *overrides) as again:
        again.finish()
    record = records_of(again.directory)[-1]
    lengths = [t.length for t in load_batch(run / "rollouts", 1)]
    recorded = sum(n - 1 for n in lengths)
    assert record["r3/compared"] == 8 * recorded
    assert 0.5 < record["r3/agreement_first"] < 1
    assert record["r3/bytes_per_token"] == pytest.approx(8 * 4 * recorded / sum(lengths))
    assert record["r3/unrecorded_share"] == record["r3/discarded_tokens"] == 0
    assert record["mismatch/mean_abs_prob_gap"] < 1e-3
    before, after = (load_batch(d / "rollouts", 1) for d in (run, again.directory))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a.columns["routed_experts"], b.columns["routed_experts"])


@pytest.mark.slow
def test_the_routing_of_an_expert_parallel_server_is_replayed(tmp_path: Path) -> None:
    """Each of two ranks has whole experts. Recorded choices number the model's experts, not a rank's."""
    config = write_material(tmp_path)
    run = TrainingRun(
        config,
        *("model.dtype=bfloat16", "rollout.router_replay=true"),
        *("sglang.tp_size=2", "sglang.ep_size=2", "run.steps=2", "evaluation.every=2"),
    )
    with run:
        run.finish()
    summary = summary_of(run.directory)
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 3
    gap = summary["mean_abs_prob_gap"]
    print("mean |pi - mu|", gap)
    assert 0 < gap <= BY_METRIC[names.GAP_ON_POLICY].upper("bfloat16")
