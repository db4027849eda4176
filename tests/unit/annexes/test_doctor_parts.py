"""``megatron-dppo doctor --parts`` on a tiny model: every rung against transformers, and unusable inputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.data.batch_file import save_batch
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.ladder import rungs
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.small_config import small_config
from tests.tiny_models import save_tiny_model

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose engine was transformers. The weights that sampled its batches and the final weights differ."""
    folder = tmp_path_factory.mktemp("parts") / "run"
    folder.mkdir()
    model = save_tiny_model(folder / "model", "qwen3_moe", seed=1)
    save_tiny_model(folder / "hf", "qwen3_moe", seed=2)
    sizes = {"prompts_per_step": 6, "group_size": 2, "max_response_tokens": 16}
    config = small_config(
        folder,
        model,
        rollout={**sizes, "temperature": TEMPERATURE, "router_replay": True},
        training={"prompts_per_mini_batch": 6, "micro_batch_tokens": 64},
    )
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    save_batch(folder / "rollouts", 2, rollouts(model))
    stale = [
        t.with_columns(weight_version=np.full(t.sampled, 3, np.int32)) for t in rollouts(model)
    ]
    save_batch(folder / "rollouts", 4, stale)
    return folder


def log_probs(model: Path, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    """Return log pi of the response by transformers, float64 [R]."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = policy(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].double()
    ids = torch.from_numpy(trajectory.response_ids.astype(np.int64))[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, ids)[:, 0]


def rollouts(model: Path) -> list[Trajectory]:
    """Return twelve random responses. The first six have the experts that the policy's routers choose."""
    rng = np.random.default_rng(3)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = []
    for i in range(12):
        prompt = rng.integers(3, 512, size=3 + i % 4).tolist()
        response = rng.integers(3, 512, size=5 + i).tolist()
        t = Trajectory.of_response(prompt, response, problem_id=i // 2, sample_index=i % 2)
        mu = log_probs(model, t, TEMPERATURE).float().numpy()
        version = np.zeros(len(mu), np.int32)
        t = t.with_columns(rollout_log_probs=mu, weight_version=version)
        if i < 6:
            with torch.no_grad():
                answer = policy(torch.tensor([prompt + response]), output_router_logits=True)
            layers = [logits.topk(2, -1).indices for logits in answer.router_logits]
            routed = torch.stack(layers, 1)[:-1].numpy().astype(np.uint8)
            t = t.with_columns(routed_experts=routed)
        out.append(t)
    return out


def run_parts(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_patiently(
        [sys.executable, "-m", "megatron_dppo", "doctor", str(run), "--parts", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_every_rung_equals_transformers(run, tmp_path):
    result = run_parts(
        run, "--step=2", "--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "a.json").read_text())
    batch = rollouts(run / "model")
    mu = torch.cat([torch.tensor(t.columns["rollout_log_probs"]).double() for t in batch]).exp()

    def pi(model: str, temperature: float) -> torch.Tensor:
        return torch.cat([log_probs(run / model, r, temperature) for r in batch]).exp()

    start, transformed = pi("hf", 1.0), pi("hf", TEMPERATURE)
    gaps = [float((p - mu).abs().mean()) for p in (start, transformed)]
    rungs = report["rungs"]
    assert [r["fixes"] for r in rungs] == [
        "nothing fixed", "sampling transform", "staleness", "routing",
    ]  # fmt: skip
    assert [r["gap"] for r in rungs[:2]] == pytest.approx(gaps, rel=1e-4)
    assert rungs[1]["moved"] == pytest.approx(float((start - transformed).abs().mean()), rel=1e-4)
    assert rungs[2]["gap"] < 1e-6
    assert rungs[3]["gap"] < 1e-6
    assert rungs[2]["agreement"] is None
    assert rungs[3]["agreement"] == 1
    assert report["tokens"] == sum(5 + i for i in range(12))
    assert report["parts"]["sampling transform"] == pytest.approx(gaps[0] - gaps[1], rel=1e-3)
    assert report["parts"]["staleness"] == pytest.approx(gaps[1], rel=1e-3)
    assert abs(report["parts"]["routing"]) < 1e-6
    assert sum(report["parts"].values()) == pytest.approx(rungs[0]["gap"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "100.00% of" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3"], "step 3; saved are 2 to 4"),
        (["--step", "4"], "--weights 3=FOLDER"),
        (["--step", "2", "--weights", "1=nowhere"], "nowhere"),
        (["--html", "page.html"], "--html is"),
        (["--limit", "-1"], "--limit: got '-1'"),
    ],
)
def test_what_cannot_be_measured_is_said(run, arguments, message):
    result = run_parts(run, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("precision", "passes"), [(True, 2), (False, 1)])
def test_the_pass_in_float32_can_be_left_out(tmp_path, precision, passes):
    ladder = rungs(
        "bfloat16", 1.0,
        rollout_policy=tmp_path, policy=tmp_path, has_routing=False, precision=precision,
    )  # fmt: skip
    assert len(ladder) == passes
    assert ladder[-1].dtype == ("float32" if precision else "bfloat16")
