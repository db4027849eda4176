"""Environments that crash, hang, answer 10 MB or are slow, in real runs that generate ahead: no fault becomes a reward,
and the run trains on the tokens that the engine sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.data.trajectory import Trajectory
from tests.integration.runs import TrainingRun, records_of, summary_of, write_material

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "tests.unit.planted_environments:Faulty"
STEPS = (1, 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    path = write_material(folder)
    settings = yaml.safe_load(path.read_text())
    (folder / "faults").mkdir()
    settings["environment"] = {
        "name": NAME,
        "options": {"folder": str(folder / "faults")},
        "max_turns": 4,
        "max_observation_tokens": 40,
        "step_timeout_s": 10.0,
        "retries": 1,
    }
    settings["rollout"] |= {"stop_token_ids": list(range(3, 180)), "max_staleness": 1}
    settings["run"]["steps"] = len(STEPS)
    settings["evaluation"] = {"every": 100}
    settings["data"].pop("evaluation")
    settings["checkpoint"]["export_hf"] = False
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def run(config: Path) -> TrainingRun:
    with TrainingRun(config) as run:
        run.finish(timeout=600)
    return run


def batches(run: TrainingRun) -> list[Trajectory]:
    return [t for step in STEPS for t in load_batch(run.directory / "rollouts", step)]


def test_faults_are_counted_and_none_is_a_reward(run, config):
    batch = batches(run)
    records = [r for r in records_of(run.directory) if r["step"] in STEPS]
    assert len(batch) == 2 * 8 * 4
    # A whole episode has the reward .1 + .2 + .3. An episode that is cut off has the sum up to its last turn.
    assert {round(t.reward, 6) for t in batch} <= {0.1, 0.3, 0.6}
    assert all(t.reward == pytest.approx(0.6) for t in batch if t.finish_reason == "stop")
    assert max(t.turns for t in batch) == 3
    planted = len(list((config.parent / "faults").iterdir()))
    assert planted > 0
    # Episodes that shared a process with the episode at fault began again, too.
    assert sum(r["environment/faults"] for r in records) >= planted
    assert "its sample is replaced" in run.text
    assert sum(r["reward/replaced"] for r in records) > 0
    for words in (
        "ZeroDivisionError",
        "exited with code 3",
        "no answer to step",
        "an answer of 10000",
    ):
        assert words in run.text
    # The run's last lines and its summary name the environment at fault.
    faults = summary_of(run.directory)["environment_faults"]
    counted = sum(fault["count"] for fault in faults)
    assert counted == sum(r["environment/faults"] for r in records)
    assert {fault["environment"] for fault in faults} == {NAME}
    assert "ZeroDivisionError" in " ".join(fault["reason"] for fault in faults)
    assert f"the environment {NAME} failed {counted} times, most often" in " ".join(
        run.text.split()[-100:]
    )
    # Every prompt contains the first observation.
    assert all(len(t.prompt_ids) == len(batch[0].prompt_ids) for t in batch)


def test_turns_that_were_sampled_ahead_have_the_trainers_log_probabilities(run, config, tmp_path):
    """Steps that change nothing train on the second batch, too, with the weights that sampled most of it. Replacements
    of failed responses were sampled by later weights."""
    overrides = (
        f"run.directory={tmp_path / 'again'}", f"rollout.replay_from={run.directory}/rollouts",
        "optimizer.lr=1e-30", "rollout.max_staleness=0",
    )  # fmt: skip
    with TrainingRun(config, *overrides) as again:
        again.finish(timeout=600)
    for step in STEPS:
        batch = load_batch(again.directory / "rollouts", step)
        first = [t.column("weight_version") == 0 for t in batch]
        gaps = [
            np.abs(t.column("loss_log_probs") - t.column("rollout_log_probs"))[rows]
            for t, rows in zip(batch, first, strict=True)
        ]
        sampled_ahead = [t for t, rows in zip(batch, first, strict=True) if rows.all()]
        assert sum(t.turns > 1 for t in sampled_ahead) > len(batch) / 4
        assert max(np.concatenate(gaps)) < 5e-6


def test_an_environment_that_never_recovers_ends_the_run_by_name(config, tmp_path):
    overrides = (
        f"run.directory={tmp_path / 'ended'}", "environment.options.forever=true", "environment.retries=0",
        "reward.max_replacements=0", "environment.step_timeout_s=3.0",
    )  # fmt: skip
    with TrainingRun(config, *overrides) as ended:
        ended.finish(code=1, timeout=600)
    text = " ".join(ended.text.split())
    assert "responses have no reward; the first: reward environment: " in text
    assert NAME in text
