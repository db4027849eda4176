"""Supervised runs of two expert-parallel ranks: they learn, stop, go on bit for bit, and measure a held-out loss."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron_dppo.data.problems import PromptForm, load_tokenizer, load_turns
from tests.integration.runs import TrainingRun, records_of, steps_of
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.second, pytest.mark.timeout(900)]

RESULTS = ("supervised/nll", "policy/tokens", "optimizer/grad_norm", "evaluation/sums/nll")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    save_tiny_model(folder / "model", seed=1)
    rng = random.Random(0)
    # Of the held-out pairs, the last step of an evaluation has fewer than there are ranks.
    for name, count in (("train", 40), ("held_out", 9)):
        pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
        rows = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    config = {
        "run": {"directory": str(folder / "run"), "steps": 4},
        "model": {"hf_checkpoint": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "evaluation": {"sums": str(folder / "held_out.jsonl")},
        },
        "parallel": {"world_size": 2, "expert": 2},
        "training": {"sequences_per_step": 8, "micro_batch_tokens": 64},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 100},
        "optimizer": {"lr": 1e-3},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def supervised_run(config: Path, directory: Path, *overrides: str) -> TrainingRun:
    own = f"run.directory={directory}"
    return TrainingRun(config, own, *overrides, module="megatron_dppo.supervised")


def results_of(directory: Path) -> list[dict[str, Any]]:
    """Return what each step computed, without times and bytes."""
    return [
        {name: value for name, value in record.items() if name in ("step", *RESULTS)}
        for record in records_of(directory)
    ]


@pytest.fixture(scope="module")
def stopped_run(config) -> tuple[Path, int]:
    """A run that Ctrl-C stopped and a second start continued: its folder, and the step of its end."""
    directory = config.parent / "stopped"
    with supervised_run(config, directory, "run.steps=100000") as run:
        run.wait_for_step(3)
        run.interrupt()
        run.finish(code=130)
    stopped_at = steps_of(directory)[-1]
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [
        f"step_{stopped_at:06d}"
    ]
    end = stopped_at + 3
    with supervised_run(config, directory, f"run.steps={end}", "run.resume=required") as run:
        run.finish()
    return directory, end


def test_a_continued_run_equals_an_uninterrupted_run_bit_for_bit(config, stopped_run, tmp_path):
    directory, end = stopped_run
    whole = tmp_path / "whole"
    with supervised_run(config, whole, f"run.steps={end}") as run:
        run.finish()
    assert results_of(directory) == results_of(whole)
    weights = [(d / "hf" / "model.safetensors").read_bytes() for d in (directory, whole)]
    assert weights[0] == weights[1]
    losses = [record["evaluation/sums/nll"] for record in records_of(whole)[::2]]
    assert losses[1] < losses[0]


def test_the_held_out_loss_is_that_of_transformers(config, stopped_run):
    """The oracle is transformers' model in fp64, one pair at a time."""
    folder = config.parent / "model"
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    total, count = 0.0, 0
    pairs = load_turns(config.parent / "held_out.jsonl", tokenizer, form=PromptForm(True))
    for prompt, response in pairs:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].double()
        log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        total -= log_probs.gather(1, torch.tensor(response)[:, None]).sum().item()
        count += len(response)
    first = records_of(stopped_run[0])[0]
    assert first["step"] == 0
    assert first["evaluation/sums/nll"] == pytest.approx(total / count, abs=1e-5)


def test_a_full_disk_ends_the_run_with_a_checkpoint_that_has_the_unwritten_record(config, tmp_path):
    """The start that resumes writes the record, so that no step lacks one."""
    directory = tmp_path / "run"
    written = tmp_path / "written.jsonl"
    with supervised_run(config, directory, "run.steps=100000") as run:
        run.wait_for_step(2)
        (tmp_path / "full").symlink_to("/dev/full")
        os.link(directory / "metrics.jsonl", written)
        (tmp_path / "full").replace(directory / "metrics.jsonl")
        run.finish(code=1)
    assert "RecordingError: metrics in" in run.text
    written.replace(directory / "metrics.jsonl")
    (checkpoint,) = (directory / "checkpoints").iterdir()
    stopped_at = int(checkpoint.name.removeprefix("step_"))
    assert steps_of(directory) == list(range(stopped_at))
    with supervised_run(config, directory, f"run.steps={stopped_at + 1}") as run:
        run.finish()
    assert steps_of(directory) == list(range(stopped_at + 2))


def test_a_checkpoint_of_other_pairs_is_refused(config, stopped_run, tmp_path):
    directory, _ = stopped_run
    held_out = config.parent / "held_out.jsonl"
    with supervised_run(config, directory, f"data.train={held_out}") as run:
        run.finish(code=1)
        assert "data.train (hash of the token ids)" in run.text


def test_an_export_without_checkpoints_is_kept(config, tmp_path):
    export = tmp_path / "run" / "hf"
    export.mkdir(parents=True)
    with supervised_run(config, tmp_path / "run") as run:
        run.finish(code=1)
        assert f"{export}: there already" in run.text
    assert export.is_dir()
