"""Agents that edit their history, in real runs: their branches are trained on, each sampled token once, with the
engine's log-probabilities and routing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from megatron_dppo.config.loading import load_config
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain.seen_step import SeenStep, check_agreement
from tests.extras import extra_packages
from tests.integration.runs import ROOT, TrainingRun, records_of, write_material
from tests.unit.test_agents import TEMPLATE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]
LIMIT_S = 900

LAYOUTS = {
    "PP2": ("parallel.tensor=1", "parallel.pipeline=2"),
    "CP2 LoRA": ("parallel.tensor=1", "parallel.context=2", "lora.rank=4"),
    "DP2": ("parallel.tensor=1",),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainingRun:
    path = write_material(tmp_path_factory.mktemp("branches"))
    tokenizer = AutoTokenizer.from_pretrained(path.parent / "model")
    # A template that writes tools.
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path.parent / "model")
    settings = yaml.safe_load(path.read_text())
    settings["environment"] = {
        "name": "agent",
        "options": {"agent": "tests.unit.planted_agents:shortening"},
        "max_tokens": 700,
        "max_observation_tokens": 48,
        # A worker that a busy machine delays must not count as a fault.
        "step_timeout_s": LIMIT_S,
    }
    # A random policy ends a turn about every third token, so that few turns are cut off.
    settings["rollout"] |= {"stop_token_ids": list(range(3, 180)), "router_replay": True}
    settings["training"]["prompts_per_mini_batch"] = settings["rollout"]["prompts_per_step"]
    path.write_text(yaml.safe_dump(settings))
    with TrainingRun(path, "run.steps=2") as run:
        run.finish(timeout=LIMIT_S)
    return run


def check_step(directory: Path, step: int) -> list[Trajectory]:
    """Assert that pi is mu at every sampled token of every branch: the only mini-batch has the rollout's weights."""
    batch = load_batch(directory / "rollouts", step)
    (record,) = [r for r in records_of(directory) if r["step"] == step]
    gaps = [np.abs(t.column("loss_log_probs") - t.column("rollout_log_probs")).max() for t in batch]
    assert max(gaps) < 5e-6
    # Of about 21,000 choices, one between nearly equal scores may differ in the trainer.
    assert record["r3/agreement_first"] > 0.9999
    assert record["r3/unrecorded_share"] == record["r3/discarded_tokens"] == 0
    assert record["policy/tokens"] == sum(t.sampled for t in batch)
    # Branches do not change the number of responses, and each token has its response's advantage.
    settings = load_config(directory / "config.yaml")
    assert len(batch) == settings.rollout.prompts_per_step * settings.rollout.group_size
    assert record["reward/mean"] == pytest.approx(np.mean([t.reward for t in batch]))
    seen = SeenStep.of(batch, settings.algorithm)
    advantages = np.repeat([t.advantage for t in batch], [t.sampled for t in batch])
    assert seen.inputs.advantages.tolist() == advantages.tolist()
    check_agreement(seen, directory, step)
    return batch


def test_a_branching_agent_trains_at_the_engines_log_probabilities(run):
    for step in (1, 2):
        batch = check_step(run.directory, step)
        (record,) = [r for r in records_of(run.directory) if r["step"] == step]
        assert record["environment/faults"] == 0
        assert record["rollout/turns"] == np.mean([t.turns for t in batch])
        whole = [t for t in batch if t.finish_reason == "stop"]
        assert len(whole) > len(batch) / 4
        assert {len(t.branch_lengths) for t in whole} == {2}
        assert any(t.has_advantage for t in batch)
        for t in whole:
            first, second = t.branches
            # The shortened history repeats the first turn, which is not a turn of the second branch.
            assert (first.turns, second.turns) == (3, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_train_on_the_saved_branches(run, tmp_path, layout):
    config = run.directory.parent / "config.yaml"
    overrides = (
        f"run.directory={tmp_path / 'again'}", f"rollout.replay_from={run.directory}/rollouts",
        "run.steps=1", "checkpoint.export_hf=false", *LAYOUTS[layout],
    )  # fmt: skip
    with TrainingRun(config, *overrides) as again:
        again.finish(timeout=LIMIT_S)
    check_step(again.directory, 1)


def test_a_frameworks_agent_that_drops_what_it_was_told_trains(run, tmp_path):
    """The agent uses pydantic-ai with a tool, from separately installed packages.

    It doubts the first answer. It leaves empty answers out of the history that it sends, so the history becomes a new
    branch.
    """
    path = os.pathsep.join([str(ROOT), str(extra_packages("agents"))])
    agent = f"env PYTHONPATH={path} {sys.executable} -m tests.unit.planted_agents doubtful"
    overrides = (
        f"run.directory={tmp_path / 'run'}", "run.steps=1", "checkpoint.export_hf=false",
        "data.evaluation={}", "rollout.prompts_per_step=4", "rollout.group_size=2",
        "training.prompts_per_mini_batch=4", f"environment.options.agent={agent}",
        "environment.max_tokens=1900", "environment.max_observation_tokens=900",
    )  # fmt: skip
    with TrainingRun(run.directory.parent / "config.yaml", *overrides) as agents:
        agents.finish(timeout=LIMIT_S)
    batch = check_step(agents.directory, 1)
    *_, record = records_of(agents.directory)
    assert record["environment/faults"] == 0
    assert sum(t.turns > 1 for t in batch) > len(batch) / 4
