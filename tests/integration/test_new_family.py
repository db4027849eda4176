"""A model family is a folder: with docs/extending.md's package installed, Mixtral is converted and trained."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.runs import ROOT, TrainingRun, records_of, summary_of, write_material
from tests.patience import run_patiently
from tests.unit.repository.test_extending import run, walks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

COIN = '''"""A reward that a random policy earns every other time, so that there is something to learn from."""


def even_length(response: str, answer: str) -> float:
    """1 where the response's number of characters is even."""
    return float(len(response) % 2 == 0)
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with the family's installed package."""
    folder = tmp_path_factory.mktemp("package")
    (walk,) = (walk for walk in walks() if walk.title.startswith("A model family"))
    walk.follow(folder)
    installed = run(walk.checks()[0], folder)
    assert installed.returncode == 0, installed.stderr
    return folder


def python_path(package: Path) -> str:
    return os.pathsep.join([str(ROOT), str(package)])


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_material(tmp_path_factory.mktemp("mixtral"), "mixtral")


def convert(package: Path, *words: str | Path) -> str:
    completed = run_patiently(
        [sys.executable, "-m", "megatron_dppo.convert", *map(str, words)],
        cwd=package,
        env=os.environ | {"PYTHONPATH": python_path(package)},
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_the_package_itself_does_not_know_it(config):
    command = [sys.executable, "-m", "megatron_dppo.convert", "plan", "--hf-config"]
    completed = run_patiently([*command, config.parent / "model"], cwd=ROOT)
    assert completed.returncode == 2
    assert "model_type 'mixtral'; supported families: " in completed.stderr
    assert "'mixtral'" not in completed.stderr.partition("supported families: ")[2]


def test_it_converts_both_ways(package, config, tmp_path):
    hf, converted, back = config.parent / "model", tmp_path / "converted", tmp_path / "back"
    layout = ("--tp", "2", "--pp", "2", "--ep", "4")
    assert "Proved" in convert(package, "plan", "--hf-config", hf, *layout, "--engine-tp", "4")
    convert(package, "hf-to-megatron", "--hf", hf, "--out", converted)
    convert(package, "megatron-to-hf", "--megatron", converted, "--out", back)
    original, again = (load_file(folder / "model.safetensors") for folder in (hf, back))
    assert "model.layers.1.block_sparse_moe.experts.7.w3.weight" in original
    assert original.keys() == again.keys()
    assert all(torch.equal(original[name], again[name]) for name in original)


@pytest.mark.slow
def test_it_trains_and_serves(package, config):
    """One step on two ranks: engine and trainer agree, updates are verified, and transformers agrees with the
    export."""
    overrides = (
        "run.steps=1", "evaluation.every=100", "data.evaluation={}", "rollout.router_replay=true",
        "parallel.expert=2", "reward.name=coin:even_length",
    )  # fmt: skip
    (package / "coin.py").write_text(COIN)
    variables = {"PYTHONPATH": python_path(package)}
    with TrainingRun(config, *overrides, variables=variables, shares_imports=False) as training:
        training.finish()
    summary = summary_of(training.directory)
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 2
    assert summary["mean_abs_prob_gap"] <= 1e-4
    assert summary["hf_export_max_logprob_diff"] <= 1e-4
    (record,) = (r for r in records_of(training.directory) if r["step"] == 1)
    assert record["r3/agreement_first"] >= 0.99
    assert record["optimizer/grad_norm"] > 1e-3
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (config.parent / "model", training.directory / "hf")
    )
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in moved
    assert "model.layers.1.block_sparse_moe.gate.weight" in moved
