"""Episodes of three turns in real runs: the trainer's log-probabilities are the engine's at every sampled token, its
routing too, in every kind of layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_dppo.algorithms.policy_loss import build_algorithm
from megatron_dppo.config.loading import load_config
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.explain.explanation import SeenStep, check_agreement
from tests.integration.runs import TrainingRun, records_of, write_material

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = {
    "PP2": ("parallel.tensor=1", "parallel.pipeline=2"),
    "EP2": ("parallel.tensor=1", "parallel.expert=2"),
    "CP2 LoRA": ("parallel.tensor=1", "parallel.context=2", "lora.rank=4"),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = write_material(tmp_path_factory.mktemp("episodes"))
    settings = yaml.safe_load(path.read_text())
    settings["environment"] = {
        "name": "tests.unit.planted_environments:Counting",
        "credit": "turn",
        "max_turns": 4,
        "max_observation_tokens": 24,
    }
    # A random policy ends a turn about every third token; few then are cut off.
    settings["rollout"] |= {"stop_token_ids": list(range(3, 180)), "router_replay": True}
    settings["training"]["prompts_per_mini_batch"] = settings["rollout"]["prompts_per_step"]
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def run(config) -> TrainingRun:
    with TrainingRun(config, "run.steps=2") as run:
        run.finish()
    return run


def check_step(directory: Path, step: int) -> None:
    """One mini-batch at the rollout's weights: pi is mu, and nothing but sampled tokens counts."""
    batch = load_batch(directory / "rollouts", step)
    (record,) = [r for r in records_of(directory) if r["step"] == step]
    gaps = [
        np.abs(t.column("loss_log_probs") - t.column("rollout_log_probs")).max()
        for t in batch
        if "loss_log_probs" in t.columns
    ]
    assert len(gaps) == len(batch)
    assert max(gaps) < 2e-6
    assert record["r3/agreement_first"] == 1.0
    assert record["r3/unrecorded_share"] == record["r3/discarded_tokens"] == 0
    assert record["policy/tokens"] == sum(t.sampled for t in batch)
    # The loss saw each turn's own advantage: signs of masked tokens and all means are those of the saved ones.
    settings = load_config(directory / "config.yaml").algorithm
    seen = SeenStep.of(batch, settings)
    expected = torch.cat([by_hand(t, batch) for t in batch])
    torch.testing.assert_close(seen.inputs.advantages, expected, atol=1e-6, rtol=0)
    check_agreement(seen, build_algorithm(settings.name), directory, step)


def by_hand(t: Trajectory, batch: Sequence[Trajectory]) -> torch.Tensor:
    """A of each token: turn i of ``Counting`` earns i tenths."""
    group = [other for other in batch if other.problem_id == t.problem_id]
    left = [
        [sum(range(k, other.turns + 1)) / 10 for k in range(1, other.turns + 1)] for other in group
    ]
    mine = next(g for g, other in zip(left, group, strict=True) if other is t)
    by_turn = [
        g - sum(of[min(k, len(of) - 1)] for of in left) / len(left) for k, g in enumerate(mine)
    ]
    return torch.from_numpy(t.by_token(by_turn))


def test_the_trainer_has_the_engines_log_probabilities_and_routing(run):
    for step in (1, 2):
        check_step(run.directory, step)


def test_the_record_tells_of_turns_and_of_the_prefix_cache(run):
    for step in (1, 2):
        batch = load_batch(run.directory / "rollouts", step)
        (record,) = [r for r in records_of(run.directory) if r["step"] == step]
        turns = [t.turns for t in batch]
        assert record["rollout/turns"] == sum(turns) / len(turns)
        assert sum(n == 3 for n in turns) > len(turns) / 4
        # Of later turns all but what was said in between is there, of first ones nothing.
        assert record["rollout/prefix_cached"] > 0.4
        assert record["environment/faults"] == 0
        # A whole episode earns .1 + .2 + .3, as far as it came.
        for t in batch:
            if t.finish_reason == "stop":
                assert (t.turns, t.reward) == (3, pytest.approx(0.6))
            assert t.loss_mask[-1]


def test_a_session_of_openais_client_has_them_too(config, tmp_path):
    """Prompts are the agent's own, of which the seals know."""
    overrides = (
        f"run.directory={tmp_path / 'run'}", "run.steps=1", "checkpoint.export_hf=false",
        "environment.name=agent", "environment.options.agent=tests.unit.planted_agents:talking",
        "environment.max_tokens=300", "environment.max_observation_tokens=48",
    )  # fmt: skip
    with TrainingRun(config, *overrides) as run:
        run.finish()
    check_step(run.directory, 1)
    batch = load_batch(run.directory / "rollouts", 1)
    assert sum(t.turns == 3 for t in batch) > len(batch) / 4
    assert {t.finish_reason for t in batch} <= {"stop", "length"}
    (record,) = records_of(run.directory)
    assert record["environment/faults"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_have_them_too(run, config, tmp_path, layout):
    overrides = (
        f"run.directory={tmp_path / 'again'}", f"rollout.replay_from={run.directory}/rollouts",
        "run.steps=1", "checkpoint.export_hf=false", *LAYOUTS[layout],
    )  # fmt: skip
    with TrainingRun(config, *overrides) as again:
        again.finish()
    check_step(again.directory, 1)
