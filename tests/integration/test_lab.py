"""The arena's lab: a copy of the policy replaces the engine. Learner, trainer and rules are the real ones."""

from __future__ import annotations

import gzip
import io
import json
import math
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from examples.arena import claims, findings, run
from examples.arena.claims import Claim, Comparison, Setting, Side
from examples.arena.lab import PROB_ERROR, RATIO_ERROR, Lab, configured
from examples.arena.mismatches import MISMATCHES
from examples.arena.tasks import TASKS, Task
from megatron_dppo.metrics import table as names
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

PROMPTS = torch.tensor([[5, 7, 9], [6, 8, 10]])


def worker(folder: str, runs: list[tuple[str, list[str]]]) -> list[dict[str, list[float]]]:
    """For each (mismatch, changes) train three steps, with a reward for even ids. Return the steps' metrics, and the
    errors of ratios and probabilities afterwards."""
    from megatron_dppo.trainer.topology import destroy_topology

    task = Task(
        "even", Path(folder), PROMPTS, 6, lambda _, ids: float((ids % 2 == 0).mean()),
        settings=(
            "rollout.max_response_tokens=6",
            "rollout.prompts_per_step=4",
            "training.prompts_per_mini_batch=2",
            "optimizer.lr=1e-3",
        ),
    )  # fmt: skip
    metric_names = (
        names.REWARD,
        names.GAP_ON_POLICY,
        names.GAP_STALE,
        names.STALENESS_MAX,
        names.ROUTING_AGREEMENT_FIRST,
    )
    results = []
    for mismatch, changes in runs:
        lab = Lab(configured(task, MISMATCHES[mismatch], changes), task, MISMATCHES[mismatch])
        steps = [lab.step() for _ in range(3)]
        errors = {
            name: [value for value in values if not math.isnan(value)]
            for name, values in lab.mismatch().items()
        }
        results.append({n: [s[n] for s in steps if n in s] for n in metric_names} | errors)
        destroy_topology()
    return results


def test_a_copy_of_the_policy_samples_with_a_mismatch_that_is_measured(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "qwen3_moe"))
    variants = [
        ("none", ["run.seed=3"]),
        ("none", ["run.seed=3"]),
        ("none", ["run.seed=4"]),
        ("int4", []),
        ("stale-1", []),
        ("flips", []),
        ("flips-r3", ["algorithm.name=dppo-topk-tv"]),
        ("decode", []),
        ("bf16", []),
    ]
    (results,) = run_ranks("tests.integration.test_lab:worker", 1, folder, variants)
    first, repeated, other_seed, int4, stale, flips, flips_replayed, decode, bf16 = results

    # Without a mismatch the copy is the trainer's policy, and a run is the same bit for bit each time.
    assert first == repeated
    assert max(first[names.GAP_ON_POLICY] + first[PROB_ERROR]) < 1e-6
    assert other_seed[names.REWARD] != first[names.REWARD]

    # A step's first mini-batch is at the weights that the copy was made from: the whole gap comes from rounding.
    assert min(int4[names.GAP_ON_POLICY]) > 1e-4
    assert max(int4[RATIO_ERROR]) > 1e-2

    # The first batch was sampled by the trainer's weights, later batches by weights that are one update older.
    assert stale[names.STALENESS_MAX] == [0, 1, 1]
    assert len(stale[names.GAP_ON_POLICY]) == 1
    assert stale[names.GAP_ON_POLICY][0] < 1e-6
    assert len(stale[names.GAP_STALE]) == 2
    assert min(stale[names.GAP_STALE]) > 1e-6

    # For half of the tokens, one of the two experts is not the trainer's choice, unless the trainer replays them.
    assert min(flips[names.GAP_ON_POLICY]) > 1e-6
    assert 0.4 < flips_replayed[names.ROUTING_AGREEMENT_FIRST][0] < 0.6
    assert max(flips_replayed[names.GAP_ON_POLICY]) < 1e-7

    # Decoding reads keys and values in bfloat16, while the trainer's single pass has them in float32. This is a part of
    # the effect of bfloat16.
    assert min(decode[names.GAP_ON_POLICY]) > 1e-6
    assert max(decode[names.GAP_ON_POLICY]) < min(bf16[names.GAP_ON_POLICY])


def run_small_arena(folder: Path) -> None:
    """Run an arena of one claim with two seeds: interrupt it, continue it, and draw its page from the kept results."""
    results = folder / "results.jsonl"
    checkpoint = save_tiny_model(folder / "model", "qwen3")

    def reward(_: int, ids: np.ndarray) -> float:
        if (folder / "interrupt").exists() and results.read_text().count("\n") == 2:
            if (folder / "raised").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / "raised").touch()
            raise RuntimeError("interrupted")
        return float((ids % 2 == 0).mean())

    TASKS["even"] = lambda: Task(
        "even", checkpoint, PROMPTS, 3, reward,
        settings=(
            "rollout.max_response_tokens=3",
            "rollout.prompts_per_step=2",
            "training.prompts_per_mini_batch=1",
        ),
    )  # fmt: skip
    claims.SETTINGS["even"] = Setting("even", "stale-1", ("run.steps=2",), "small")
    sides = Side("even", "dppo-binary-tv tv_threshold=0.1"), Side("even", "pg-is")
    run_module, findings_module = cast(Any, run), cast(Any, findings)
    claim = Claim("even", "nobody", "all do well", (Comparison(*sides),))
    run_module.CLAIMS = findings_module.CLAIMS = (claim,)
    run_module.QUICK_CLAIMS, run_module.QUICK_SEEDS, findings_module.SEEDS = (
        ("even",),
        (1, 2),
        (1, 2),
    )
    quick = ["--quick", "--processes", "1", "--results", str(results), "--out", str(folder / "out")]

    (folder / "interrupt").touch()
    # A run that fails or is killed is reported, and ends no other run. Here all runs after the second one fail.
    with redirect_stderr(io.StringIO()) as errors:
        assert run.main(quick) == 0
    assert "RuntimeError('interrupted')" in errors.getvalue()
    assert "was killed by SIGKILL" in errors.getvalue()
    interrupted = results.read_text()
    assert interrupted.count("\n") == 2
    (folder / "interrupt").unlink()
    results.write_text(interrupted + '{"key": "even/st')

    assert run.main(quick) == 0
    assert results.read_text().startswith(interrupted)
    lines = results.read_text().splitlines()
    assert lines.pop(2) == '{"key": "even/st'
    assert [json.loads(line)["key"] for line in lines] == [
        side.key(seed) for seed in (1, 2) for side in sides
    ]
    page = (folder / "out" / "findings.md").read_text()
    assert (folder / "out" / "findings" / "even.png").is_file()
    assert "| [even](#even) | nobody | all do well | undecided |" in page

    # No run is repeated, and the kept results draw the same page.
    assert run.main(quick) == 0
    assert results.read_text().splitlines()[3:] == lines[2:]
    kept = folder / "kept.jsonl.gz"
    kept.write_bytes(gzip.compress(results.read_bytes()))
    again = folder / "again"
    redraw = ["--quick", "--only-findings", "--results", str(kept), "--out", str(again)]
    assert run.main(redraw) == 0
    assert (again / "findings.md").read_text() == page


def test_an_arena_that_was_interrupted_goes_on_and_is_drawn_again(tmp_path: Path) -> None:
    # Run in a process without threads, because each run is a fork of the process.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(run_small_arena, tmp_path).result()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--only-findings", "--results", "none.jsonl"], "none.jsonl: no such file; those that are kept"),
        (["--results", "kept.jsonl.gz"], "kept.jsonl.gz: runs are added to lines of JSON, not to .gz"),
    ],
)  # fmt: skip
def test_results_that_cannot_be_read_or_added_to_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert error in capsys.readouterr().err
