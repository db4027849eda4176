"""Rules under FP8 rollouts, with and without router replay (R3) and truncated importance sampling (TIS): claims, runs
and page.

    python -m examples.arena.fp8 [--lab | --real | --only-findings] [--processes 1]

The claims and the numbers of seeds and steps below were in the repository before any reported run was made. Tests and
verdicts have the rules of claims.py; Holm's family are the primary tests of this file. The machine was too slow for
longer runs: 24 steps show how a rule begins to learn, but not a collapse that needs longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.arena.claims import (
    CLIP,
    SETTINGS,
    TV,
    Claim,
    Comparison,
    Side,
    above,
    alike,
    blocked,
    final,
    first_gap,
    loss_of_best,
)
from examples.arena.lab import Cell
from examples.arena.run import cells_of, make_real_runs, make_runs
from examples.arena.study import Study
from megatron_dppo.metrics import table as names

RESULTS = Path("runs/arena/fp8.jsonl")
SEEDS = tuple(range(1, 7))
"""Six seeds: with fewer seeds the exact sign-flip test cannot reach 5%, two-sided."""
REAL_SEEDS = (1, 2)
CISPO, WITHOUT_TIS = "cispo", "pg-is"
"""CISPO is importance sampling with truncated weights and no mask. Without the truncation, CISPO is PG-IS."""
TIS = "ratio_cap=3"
TV_TIS, CLIP_TIS = f"{TV} {TIS}", f"{CLIP} {TIS}"


def _claim(name: str, text: str, *tests: Comparison) -> Claim:
    return Claim(name, "ours", text, tests, seeds=SEEDS)


CLAIMS = (
    _claim(
        "gap-r3",
        "under FP8 R3 leaves a smaller gap at equal weights, whatever the rule",
        *(
            Comparison(Side("w8a8", rule, first_gap), Side("w8a8-r3", rule, first_gap))
            for rule in (TV, CLIP, CISPO)
        ),
    ),
    _claim(
        "dppo-fp8",
        "DPPO under FP8 without R3 ends where it ends without FP8",
        Comparison(Side("w8a8", TV), Side("w8a8-unquantised", TV), margin=0.05),
    ),
    _claim(
        "r3-lifts",
        "under FP8 R3 lifts Clip-Higher, and CISPO",
        *(Comparison(Side("w8a8-r3", rule), Side("w8a8", rule)) for rule in (CLIP, CISPO)),
    ),
    _claim(
        "r3-dppo",
        "under FP8 DPPO ends alike with R3 and without",
        Comparison(Side("w8a8-r3", TV), Side("w8a8", TV), margin=0.05),
    ),
    _claim(
        "without-r3",
        "under FP8 DPPO without R3 ends above Clip-Higher with it, and above CISPO with it",
        *(Comparison(Side("w8a8", TV, final), Side("w8a8-r3", rule)) for rule in (CLIP, CISPO)),
    ),
    _claim(
        "blocked",
        "under FP8 without R3 Clip-Higher blocks more than DPPO",
        *above(("w8a8",), (CLIP,), (TV,), blocked),
    ),
    _claim(
        "blocked-r3",
        "under FP8 Clip-Higher blocks less with R3 than without",
        Comparison(Side("w8a8", CLIP, blocked), Side("w8a8-r3", CLIP, blocked)),
    ),
    _claim(
        "tis-masked",
        "where a mask bounds the ratio or the divergence, TIS changes nothing: DPPO and Clip-Higher end alike",
        *alike(("w8a8",), (TV,), (TV_TIS,)),
        *alike(("w8a8",), (CLIP,), (CLIP_TIS,)),
    ),
    _claim(
        "tis-unmasked",
        "without a mask TIS helps: CISPO loses less of what it learnt than PG-IS, and ends above it",
        # The first rule, PG-IS, loses more.
        *above(("w8a8",), (WITHOUT_TIS,), (CISPO,), loss_of_best),
        *above(("w8a8",), (CISPO,), (WITHOUT_TIS,)),
    ),
    _claim(
        "collapse",
        "under FP8 without R3 CISPO loses more of what it learnt than DPPO",
        *above(("w8a8",), (CISPO,), (TV,), loss_of_best),
    ),
)  # fmt: skip
REAL_SIDES = (("w8a8", TV), ("w8a8-r3", TV), ("w8a8-unquantised", TV))
"""Settings and rules of the runs in the real loop, whose engine has ``engine.quantization: fp8``."""


def real_cells() -> list[Cell]:
    """Return the runs in the real loop, ordered by seed."""
    cells = []
    for seed in REAL_SEEDS:
        for setting, rule in REAL_SIDES:
            cells.append(SETTINGS[setting].cell(rule, seed))
    return cells


INTRODUCTION = """\
# Rules under FP8 rollouts

The claims were registered in `examples/arena/fp8.py` before the runs. Tests and words are those of \
[findings.md](../findings.md), with six seeds; Holm's family are the primary tests of this page. In the lab a copy of \
the policy quantises as an engine with `engine.quantization: fp8` does, beside a trainer in float32; in the real loop \
SGLang's CPU server does so, beside a trainer in bfloat16. Runs have 24 steps, which show how a rule begins to \
learn and no collapse that needs longer. The learning rate was chosen without a sweep: one run of PG-IS \
came before, six steps with seed 100. All runs in the lab were made. Every test with both p values: \
[fp8_tests.csv](fp8_tests.csv).
"""


STUDY = Study(
    results=RESULTS,
    claims=CLAIMS,
    seeds=SEEDS,
    introduction=INTRODUCTION,
    drawn=tuple(
        (setting, rule)
        for setting in ("w8a8-unquantised", "w8a8", "w8a8-r3")
        for rule in (TV, CLIP, CISPO)
    ),
    metrics=(names.REWARD, names.GAP),
    caption="reward and gap with and without FP8 and R3",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.arena.fp8", description=__doc__.partition("\n")[0]
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--lab", action="store_true", help="the runs in the lab alone")
    parts.add_argument("--real", action="store_true", help="the runs in the real loop alone")
    parts.add_argument(
        "--only-findings", action="store_true", help="only write the page and its figure"
    )
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder of fp8.md")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at a time, of one core each (default: 1)"
    )
    options = parser.parse_args(arguments)
    if options.only_findings:
        STUDY.write_page(options.out)
        return 0
    if not options.real:
        make_runs(cells_of(CLAIMS), RESULTS, options.processes)
    if not options.lab:
        make_real_runs(real_cells(), RESULTS)
    STUDY.write_page(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
