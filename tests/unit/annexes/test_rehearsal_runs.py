"""The two runs of a rehearsal, with small programs in place of a training run, and how a supervised one is prepared."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import pytest
import yaml

from megatron_dppo.cluster.known_models import KNOWN_MODELS
from megatron_dppo.cluster.rehearsal.__main__ import Rehearsal, RehearsalPhases, main
from megatron_dppo.cluster.rehearsal.attempts import PlannedRun, RehearsalRun, RunForm

PROGRAM = """
import json, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1]).parent / "run"
folder.mkdir(exist_ok=True)
metrics = folder / "metrics.jsonl"
step = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
signal.signal(signal.SIGINT, lambda *_: sys.exit({code}))
while step < {steps}:
    step += 1
    with metrics.open("a") as file:
        file.write(json.dumps({{"step": step}}) + "\\n")
    time.sleep({pause})
# A signal after the last step comes too late: the program ends as it would without one.
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""
"""Writes a record of each step, and ends with the exit code ``code`` after SIGINT."""
STOPPED_AND_RESUMED = (
    PlannedRun("first", lambda step: "first", 1),
    PlannedRun("second", lambda step: "second"),
)


def runs_of(folder: Path, *, code: int = 130, pause: float = 0.0) -> list[RehearsalRun]:
    """Run the program until it is stopped after its first step, and then until its third step."""
    program = PROGRAM.format(code=code, steps=3, pause=pause)
    form = RunForm((sys.executable, "-c", program), signal.SIGINT, {})
    options = argparse.Namespace(recipe="recipe.yaml", directory=folder)
    return Rehearsal(options, RehearsalPhases(2), form).run_planned(STOPPED_AND_RESUMED, 3)


@pytest.mark.parametrize(
    ("code", "was_stopped", "has_failed"),
    [(0, False, False), (0, True, False), (130, True, False), (1, True, True), (1, False, True)],
)
def test_a_run_that_crashes_after_the_stop_has_failed(code, was_stopped, has_failed):
    assert RehearsalRun(code, 0.0, 0.0, was_stopped, "").has_failed == has_failed


def test_a_stopped_run_is_followed_by_a_second_one(tmp_path: Path) -> None:
    first, second = runs_of(tmp_path, pause=2.0)
    assert first.was_stopped
    assert first.code == 130
    assert (second.code, second.was_stopped) == (0, False)


def test_a_run_that_ends_before_its_stop_is_the_only_one(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path)
    assert run.code == 0


def test_a_run_that_crashes_while_it_stops_is_the_last_one(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, code=3, pause=30.0)
    assert run.was_stopped
    assert run.has_failed


def test_a_held_out_set_of_a_supervised_recipe_may_have_a_dot_in_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--dry-run`` starts nothing."""
    recipe = {
        "run": {"directory": str(tmp_path / "real"), "steps": 9},
        "model": {"hf_checkpoint": "checkpoints/Qwen3-1.7B-Base"},
        "data": {"train": "absent.jsonl", "evaluation": {"v1.5": "absent.jsonl"}},
        "training": {"sequences_per_step": 8, "micro_batch_tokens": 4096},
        "optimizer": {"lr": 1e-5},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    folder = tmp_path / "rehearsal"
    assert main([str(path), "--dry-run", f"--directory={folder}"]) == 0
    written = yaml.safe_load((folder / "rehearsal.yaml").read_text())
    assert list(written["data"]["evaluation"]) == ["v1.5"]
    assert Path(written["data"]["evaluation"]["v1.5"]).is_file()
    assert "megatron-dppo supervised" in capsys.readouterr().out
    here = f"model.hf_checkpoint={KNOWN_MODELS / 'qwen3-8b-base'}"
    assert main([str(path), here, "--dry-run", "--strict", f"--directory={folder}"]) == 2
    assert "data.train: absent.jsonl is not here" in capsys.readouterr().err
