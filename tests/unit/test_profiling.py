"""The profiler traces the configured steps of rank 0, and nothing else."""

from __future__ import annotations

import gzip
import json
from typing import Any

import torch

from megatron_dppo.config.schema import ProfileConfig
from megatron_dppo.loop.profiling import StepProfiler


def run_steps(folder, rank: int, **config: Any) -> None:
    """Run three steps, the second of which the configuration selects for a trace."""
    profiler = StepProfiler(ProfileConfig(steps=[2], **config), folder, rank)
    for step in (1, 2, 3):
        with profiler.of(step):
            torch.ones(3, 3) @ torch.ones(3, 3)


def test_the_step_that_was_asked_for_has_a_trace(tmp_path):
    run_steps(tmp_path, 0, memory=True)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step2-rank0.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("aten::mm") == 1
    assert "[memory]" in names


def test_other_ranks_trace_nothing(tmp_path):
    run_steps(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_costs_the_trace_only(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file")
    run_steps(tmp_path, 0)
    assert "no trace of step 2" in caplog.text
