"""``megatron-dppo rollout``: a real server without a trainer makes batches. A run without servers trains on them."""

from __future__ import annotations

import json
import sys
from statistics import fmean

import pytest

from megatron_dppo.data.batch_file import load_batch
from tests.integration.runs import GROUP, PROMPTS, TrainingRun, records_of, write_material
from tests.patience import run_patiently

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]
REWARD = "reward.name=tests.unit.planted_rewards:of_every_character"


def generate(config, out, steps) -> str:
    command = [sys.executable, "-m", "megatron_dppo", "rollout", str(config), "--out", str(out)]
    completed = run_patiently([*command, f"run.steps={steps}", REWARD])
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed.stdout


def test_batches_without_a_trainer_are_trained_on_by_a_run_without_servers(tmp_path):
    config, out = write_material(tmp_path), tmp_path / "generated"
    generate(config, out, 1)
    first = (out / "rollouts" / "step_000001.safetensors").read_bytes()
    output = generate(config, out, 2)
    assert "batch 2 of 2" in output
    assert (out / "rollouts" / "step_000001.safetensors").read_bytes() == first
    batches = {step: load_batch(out / "rollouts", step) for step in (1, 2)}
    for batch in batches.values():
        assert len(batch) == PROMPTS * GROUP
        assert all(t.stamp.reward == t.reward for t in batch)
    assert not {t.problem_id for t in batches[1]} & {t.problem_id for t in batches[2]}

    overrides = [f"rollout.replay_from={out / 'rollouts'}", "run.steps=2", REWARD]
    overrides += ["data.evaluation.sums=null", "checkpoint.export_hf=false"]
    with TrainingRun(config, *overrides) as run:
        run.finish()
    trained = {record["step"]: record for record in records_of(run.directory)}
    for step, batch in batches.items():
        assert trained[step]["reward/mean"] == pytest.approx(fmean(t.reward for t in batch))
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["mean_abs_prob_gap"] < 1e-4
