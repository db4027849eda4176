"""``megatron-dppo evaluate`` with a real server: its figures follow from the responses that it keeps."""

from __future__ import annotations

import json
import sys
from statistics import fmean

import pytest

from megatron_dppo.metrics.records import read_step_lines
from tests.integration.runs import write_material
from tests.patience import run_patiently

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
PROBLEMS, SAMPLES = 4, 4


def evaluate(config, *words):
    command = [sys.executable, "-m", "megatron_dppo", "evaluate", str(config), *words]
    return run_patiently(command)


def test_alpaca_eval_receives_the_whole_answers_to_its_instructions(tmp_path):
    config = write_material(tmp_path)
    out = tmp_path / "out"
    greedy = ["evaluation.samples_per_prompt=1", "evaluation.temperature=0"]
    words = [f"--out={out}", "--alpaca-eval=sums", *greedy]
    result = evaluate(config, *words)
    assert result.returncode == 0, result.stderr[-4000:]
    outputs = json.loads((out / "model_outputs_0.json").read_text())
    lines = (tmp_path / "held_out.jsonl").read_text().splitlines()
    assert [output["instruction"] for output in outputs] == [
        json.loads(line)["prompt"] for line in lines
    ]
    assert {output["generator"] for output in outputs} == {str(tmp_path / "model")}
    (report,) = json.loads((out / "evaluation.json").read_text()).values()
    # One greedy response to each problem is its own majority.
    assert report["sums"]["consensus"] == report["sums"]["average"]
    samples = read_step_lines(out / "samples.jsonl")
    for output, sample in zip(outputs, samples, strict=True):
        assert output.keys() == {"instruction", "output", "generator"}
        # A sample shows the tokens' text; the judged answer has no special tokens.
        assert output["output"]
        assert sample["response"].startswith(output["output"])


def test_a_set_that_alpaca_eval_cannot_judge_is_refused(tmp_path):
    config = write_material(tmp_path)
    result = evaluate(config, "--alpaca-eval=other", "evaluation.samples_per_prompt=2")
    assert result.returncode == 2
    assert "--alpaca-eval: got other, expected a set of data.evaluation: sums" in result.stderr
    assert "evaluation.samples_per_prompt: got 2, expected 1" in result.stderr


def test_the_figures_are_of_the_kept_responses(tmp_path):
    config = write_material(tmp_path)
    out = tmp_path / "out"
    overrides = [
        f"evaluation.samples_per_prompt={SAMPLES}",
        "reward.name=tests.unit.planted_rewards:of_every_character",
    ]
    result = evaluate(config, "--out", str(out), *overrides)
    assert result.returncode == 0, result.stderr[-4000:]
    (report,) = json.loads((out / "evaluation.json").read_text()).values()
    samples = read_step_lines(out / "samples.jsonl")
    assert len(samples) == PROBLEMS * SAMPLES
    rewards = [sample["reward"] for sample in samples]
    assert len(set(rewards)) > 1
    figures = report["sums"]
    assert figures["problems"] == PROBLEMS
    assert figures["average"] == pytest.approx(fmean(rewards))
    assert figures["pass"]["1"] == pytest.approx(fmean(reward >= 0.5 for reward in rewards))
    assert figures["truncated"] == sum(sample["truncated"] for sample in samples)
    assert figures["mean_tokens"] == pytest.approx(fmean(sample["tokens"] for sample in samples))
