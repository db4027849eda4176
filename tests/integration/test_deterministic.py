"""``engine.deterministic``: the same samples in every run of the same seed and weights."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.data.batch_file import SavedBatch, load_batch, save_batch
from megatron_dppo.diagnostics.doctor.__main__ import main as doctor
from megatron_dppo.diagnostics.explain import replay
from tests.integration.runs import TrainingRun, records_of, write_material

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

SECOND_RUN = (
    *("engine.router=true", "rollout.max_concurrent_requests=5"),
    "engine.placement=colocated",
)
"""The second run sends few requests at a time through the router, so that the engine's batches differ. Its servers take
turns with the trainer, whose weights and optimizer state leave the devices and return at each step."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deterministic")
    config = write_material(folder)
    run_folders = []
    for name, overrides in {"one": (), "two": SECOND_RUN}.items():
        common = (
            "engine.deterministic=true",
            "run.steps=2",
            "evaluation.every=1",
            "reward.name=tests.unit.planted_rewards:of_every_character",
        )
        directory = folder / name
        with TrainingRun(config, *common, f"run.directory={directory}", *overrides) as run:
            run.finish(timeout=800)
        run_folders.append(directory)
    return run_folders


@pytest.mark.parametrize("step", [1, 2])
def test_both_runs_draw_the_same_batch_to_the_last_bit(directories, step):
    first, second = (load_batch(d / "rollouts", step) for d in directories)
    distinct = {tuple(t.token_ids.tolist()) for t in first}
    assert len(distinct) > len(first) // 2  # Requests do not share a seed.
    for one, other in zip(first, second, strict=True):
        assert (one.problem_id, one.sample_index) == (other.problem_id, other.sample_index)
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.column("rollout_log_probs"), other.column("rollout_log_probs"))
        assert (one.reward, one.advantage) == (other.reward, other.advantage)


def test_both_runs_evaluate_and_learn_alike(directories):
    records = [records_of(d) for d in directories]
    for one, other in zip(*records, strict=True):
        for name in ("evaluation/sums/accuracy", "policy/abs_prob_gap", "optimizer/grad_norm"):
            assert one.get(name) == other.get(name)
    accuracies = [r["evaluation/sums/accuracy"] for r in records[0]]
    assert len(set(accuracies)) == 3  # the weights change, so the samples change


def test_each_step_is_derived_again_bit_for_bit(directories, capfd):
    """``replay --derive`` repeats the steps of both runs from the start model and the saved batches, without an engine.
    The second run is colocated."""
    for directory in directories:
        assert replay.main([str(directory), "--derive"]) == 0
        assert "2 of 2 steps derived again, bit for bit" in capfd.readouterr().out
        assert [r.get("replay/rederived") for r in records_of(directory / "derived")] == [
            None,
            1.0,
            1.0,
        ]


def test_a_batch_that_is_not_what_was_sampled_is_not_trained_on(directories, tmp_path, capfd):
    """The test changes one token of the second batch, and saves the batch under its old seal."""
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(directories[0] / name, tmp_path)
    shutil.copytree(directories[0] / "rollouts", tmp_path / "rollouts")
    saved, batch = SavedBatch(tmp_path / "rollouts", 2), load_batch(tmp_path / "rollouts", 2)
    tokens = batch[3].token_ids.copy()
    tokens[-1] ^= 1
    changed = [replace(t, token_ids=tokens) if i == 3 else t for i, t in enumerate(batch)]
    save_batch(tmp_path / "rollouts", 2, changed, saved.seal)
    assert replay.main([str(tmp_path), "--derive"]) == 2
    out, error = capfd.readouterr()
    assert "SealError: the batch of step 2 is not what its seal says" in out + error
    assert f"{changed[3]}: token_ids: got" in out + error
    assert [r["step"] for r in records_of(tmp_path / "derived")] == [0, 1]


@pytest.mark.parametrize("step", [1, 2])
def test_the_doctor_finds_nothing(directories, tmp_path, step):
    """The doctor compares a server and a trainer of two ranks, with the weights of each step."""
    file = tmp_path / "figures.json"
    assert doctor([str(directories[1]), "--step", str(step), "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["findings"] == []
    assert [side["side"] for side in figures["sides"]] == ["engine", "trainer"]
    assert all(side["gap"] < 1e-6 for side in figures["sides"])
    assert figures["draws"]["tokens"] > 100


def test_the_doctor_names_a_temperature_that_both_sides_forgot(directories, tmp_path):
    run, file = tmp_path / "run", tmp_path / "figures.json"
    shutil.copytree(directories[0], run, ignore=shutil.ignore_patterns("tensorboard", "logs"))
    seal, settings = (run / "config.yaml").read_text().split("\n", 1)
    assert seal.startswith("#")
    assert settings.count("\n  temperature: 1.0\n") == 1
    (run / "config.yaml").write_text(
        settings.replace("\n  temperature: 1.0\n", "\n  temperature: 0.8\n")
    )
    assert doctor([str(run), "--step", "2", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    causes = {side["side"]: side["cause"] for side in figures["sides"]}
    assert causes == {"engine": "temperature 1, not 0.8", "trainer": "temperature 1, not 0.8"}
