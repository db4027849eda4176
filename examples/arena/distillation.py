"""On-policy distillation with and without a trust region: claims, runs and page.

    python -m examples.arena.distillation [--only-findings] [--processes 1]

The question: does DPPO's mask help a policy that imitates a teacher, if old weights, FP8 or another routing sampled its
responses? The claims and the numbers of seeds and steps below were in the repository before any reported run was made.
Tests and verdicts have the rules of claims.py; Holm's family are the primary tests of this file. Pilots, one run of
PG-IS with seed 100 in each of ``taught-stale`` (also at a rate of 5e-4), ``taught-flips``, ``taught-fp8`` and the same
task without a mismatch, chose the rates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.arena.claims import TV, Claim, Comparison, Side, loss_of_best
from examples.arena.run import cells_of, make_runs
from examples.arena.study import Study
from megatron_dppo.metrics import table as names

RESULTS = Path("runs/arena/distillation.jsonl")
SEEDS = tuple(range(1, 9))
UNMASKED = "pg-is"
"""Importance sampling without mask and cap. With ``distillation.loss: reverse`` it has neither mask nor weight."""


def _claim(name: str, text: str, *tests: Comparison) -> Claim:
    return Claim(name, "ours", text, tests, seeds=SEEDS)


def _masked_above(setting: str) -> tuple[Comparison, Comparison]:
    """Return the tests that the mask ends above, and that it loses less of what was learnt."""
    masked, unmasked = Side(setting, TV), Side(setting, UNMASKED)
    return (
        Comparison(masked, unmasked),
        Comparison(Side(setting, UNMASKED, loss_of_best), Side(setting, TV, loss_of_best)),
    )


CLAIMS = (
    _claim(
        "taught-stale",
        "if weights that are eight batches old sample, distillation ends higher with DPPO's mask than without",
        *_masked_above("taught-stale"),
    ),
    _claim(
        "taught-flips",
        "the same if half of the tokens are routed otherwise",
        *_masked_above("taught-flips"),
    ),
    _claim("taught-fp8", "the same under FP8 rollouts", *_masked_above("taught-fp8")),
    _claim(
        "taught-reverse",
        "the same as the first claim, with the KL at each token in place of the sampled token's advantage",
        *_masked_above("taught-reverse"),
    ),
    _claim(
        "reverse-above",
        "of old weights, the KL at each token ends higher than the sampled token's advantage, both masked",
        Comparison(Side("taught-reverse", TV), Side("taught-stale", TV)),
    ),
)
INTRODUCTION = """\
# Distillation with and without a trust region

Does DPPO's mask help a policy that imitates a teacher ([distillation.md](../../distillation.md))? The claims were \
registered in `examples/arena/distillation.py` before the runs. Tests and words are those of \
[findings.md](../findings.md), with eight seeds; Holm's family are the primary tests of this page. The policy and the \
teacher are those of `make demo-distil`; rewards are measured, and not learned from. Runs have 40 steps, under FP8 \
24. All runs were made, in the lab. Every test with both p values: \
[distillation_tests.csv](distillation_tests.csv).
"""


STUDY = Study(
    results=RESULTS,
    claims=CLAIMS,
    seeds=SEEDS,
    introduction=INTRODUCTION,
    drawn=tuple(
        (setting, rule)
        for setting in ("taught-stale", "taught-flips", "taught-fp8", "taught-reverse")
        for rule in (TV, UNMASKED)
    ),
    metrics=(names.REWARD, names.TEACHER_GAP),
    caption="reward and distance to the teacher, with and without a mask",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.arena.distillation", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--only-findings", action="store_true", help="only write the page and its figure"
    )
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder of the page")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at a time, of one core each (default: 1)"
    )
    options = parser.parse_args(arguments)
    if not options.only_findings:
        make_runs(cells_of(CLAIMS), RESULTS, options.processes)
    STUDY.write_page(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
