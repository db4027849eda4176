"""``megatron-dppo evaluate`` with a real server: its figures follow from the responses that it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import fmean

import pytest

from megatron_dppo.metrics.records import read_step_lines
from tests.integration.runs import write_material

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
PROBLEMS, SAMPLES = 4, 4


def test_the_figures_are_of_the_kept_responses(tmp_path):
    config = write_material(tmp_path)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "megatron_dppo", "evaluate", str(config), "--out", str(out)]
    overrides = [
        f"evaluation.samples_per_prompt={SAMPLES}",
        "reward.name=tests.unit.planted_rewards:of_every_character",
    ]
    result = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
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
