"""A real run whose ranks die, and whose kept responses are harmed before the ranks start again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.metrics.records import read_step_lines
from tests.integration.runs import GROUP, PROMPTS, TrainingRun, records_of, steps_of, write_material

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = (
    *("checkpoint.every=100", "checkpoint.export_hf=false", "evaluation.every=100"),
    *("engine.deterministic=true", "run.steps=100", "run.max_restarts=9"),
    *("parallel.tensor=1", "reward.name=tests.unit.planted_rewards:of_every_character"),
)


def damage_frame(spool: Path, step: int) -> None:
    frames = spool / f"step_{step:06d}" / "rank1.frames"
    content = bytearray(frames.read_bytes())
    content[-1] ^= 1
    frames.write_bytes(content)


def remove_folder(spool: Path, step: int) -> None:
    shutil.rmtree(spool / f"step_{step:06d}")


def draw_others(spool: Path, step: int) -> None:
    draws = spool / f"step_{step:06d}" / "draws.jsonl"
    line = json.loads(draws.read_text())
    draws.write_text(json.dumps({**line, "problems": line["problems"][::-1]}) + "\n")


def leave_whole(spool: Path, step: int) -> None:
    """Harm nothing."""


HARMS: tuple[Callable[[Path, int], None], ...] = (
    damage_frame,
    remove_folder,
    draw_others,
    leave_whole,
)


def kill_ranks(run: TrainingRun, harm: Callable[[Path], None]) -> None:
    """Kill both ranks, and call ``harm`` with the spool before. Return when new ranks have begun."""
    ranks = [run.rank(0), run.rank(1)]
    for rank in ranks:
        rank.suspend()
    harm(run.directory / "spool")
    output = run.directory / "logs" / "rank0.out"
    first_output = output.stat().st_ino
    for rank in ranks:
        rank.kill()
    run.wait_for(lambda: output.exists() and output.stat().st_ino != first_output)
    run.wait_for(lambda: "joins the fleet" in output.read_text())


def trained_steps(run: TrainingRun) -> list[int]:
    return [line["step"] for line in read_step_lines(run.directory / "spool" / "trained.jsonl")]


def rows_until(run: TrainingRun, step: int) -> list[dict[str, Any]]:
    return [row for row in records_of(run.directory) if row["step"] <= step]


def test_a_run_goes_on_whatever_its_spool_has_lost(tmp_path: Path) -> None:
    with TrainingRun(write_material(tmp_path), *WORDS) as run:
        run.wait_for_step(3)
        for harm in HARMS:
            harmed_step = trained_steps(run)[-1] - 1
            rows = rows_until(run, harmed_step - 1)
            kill_ranks(run, lambda spool, harm=harm, step=harmed_step: harm(spool, step))  # type: ignore[misc]
            if harm in (damage_frame, leave_whole):
                # A second death comes before all steps are repeated. After ``damage_frame``, one response is generated.
                kill_ranks(run, lambda spool: None)
            run.wait_for_step(harmed_step + 2)
            # Repeated steps keep their rows, with the times of their generation.
            assert rows_until(run, harmed_step - 1) == rows
        # One rank can't write the responses of a step to come.
        last_kept = steps_of(run.directory)[-1] + 2
        (run.directory / "spool" / f"step_{last_kept + 1:06d}" / "rank1.frames").mkdir(parents=True)
        run.wait_for_step(last_kept + 2)
        assert trained_steps(run)[-1] == last_kept
        kill_ranks(run, lambda spool: None)
        run.wait_for_step(last_kept + 3)
        run.interrupt()
        run.finish(code=130)
    for name in ("rank1.frames has 15 of 16", "lacks the problems", "rank 1 can't write"):
        assert name in run.text, name
    assert "Traceback" not in run.text
    steps = steps_of(run.directory)
    assert steps == list(range(len(steps)))
    for step in steps[1:]:
        batch = load_batch(run.directory / "rollouts", step)
        keys = [(response.problem_id, response.sample_index) for response in batch]
        assert len(keys) == len(set(keys)) == PROMPTS * GROUP
        # The engine had the weights of the step before, also where only one response was missing.
        assert {s.weight_version for t in batch for s in t.version_spans} == {step - 1}
    gaps = [row["mismatch/mean_abs_prob_gap"] for row in records_of(run.directory)[1:]]
    assert max(gaps) <= 1e-4
