"""Figures that the benchmarks of generation and of idle time compute from measurements."""

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def idle() -> ModuleType:
    return tool("bench_idle")


@pytest.fixture(scope="module")
def generation() -> ModuleType:
    return tool("bench_generation")


def test_a_step_is_timed_by_its_phases_in_the_middle_of_the_run(idle):
    phases = {"time/generate_s": 1.0, "time/train_s": 2.0, "time/sync_s": 0.5}
    middle = {
        **phases,
        "time/evaluate_s": 9.0,
        "rollout/generation_s": 3.0,
        "rollout/servers_idle": 0.5,
    }
    records = [
        {"step": 0, "time/start_s": 99.0},
        *({"step": step, "time/generate_s": 50.0} for step in (1, 2, 3)),
        {"step": 4, **middle},
        {"step": 5, **middle, "time/train_s": 4.0, "rollout/servers_idle": 0.25},
        {"step": 6, "time/train_s": 70.0, "evaluation/sums/accuracy": 0.75},
    ]
    figures = idle.RunFigures.of("one ahead", records)
    assert figures.step_s == pytest.approx(4.5)
    assert (figures.train_s, figures.generation_s) == (3.0, 3.0)
    assert figures.accuracy == 0.75
    assert figures.servers_idle == 0.375
    with pytest.raises(ValueError, match="4 steps hold none"):
        idle.RunFigures.of("one ahead", records[:5])


def test_ratios_are_paired_by_round(generation):
    ours = [generation.Turn(2.0, 0.5, 1.5), generation.Turn(3.0, 1.0, 2.0)]
    theirs = [generation.Turn(1.0, 1.0, 3.0), generation.Turn(6.0, 1.0, 5.0)]
    assert generation.ratios(ours, theirs, "seconds") == [2.0, 0.5]
    assert generation.ratios(ours, theirs, "cpu_s") == [0.5, 0.5]


def test_prompts_are_runs_of_ids_in_the_vocabulary(generation, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    work = generation.Work(
        str(tmp_path), prompts=3, concurrency=1, prompt_tokens=4, response_tokens=5, topk=0, per_call=1
    )  # fmt: skip
    id_lists = generation.prompts(work, seed=0)
    assert len(id_lists) == 3
    assert all((b - a) % 10 == 1 for ids in id_lists for a, b in pairwise(ids))
    assert work.tokens == 15
    assert work.sampling.ignore_eos
