"""``make why``: the same tiny model under four algorithms where the trust region matters.

    python -m examples.why.run [--algorithm NAME] [--seed N] [--only-figure] [--directory runs/why]

Makes the demo's material, once; trains every algorithm with every seed, one run after the other;
draws ``why.png`` and writes ``table.md``. A finished run is never made again, an interrupted one
goes on. config.yaml beside this file holds the conditions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.why.figure import write_figure
from examples.why.plan import MATERIAL_SEED, PlanError, PlannedRun, plan_runs
from examples.why.table import write_table
from megatron_dppo.demo.material import INTERRUPTED, prepare, run_to_the_end

FIGURE, TABLE = "why.png", "table.md"
CONSOLE = Console(highlight=False, markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 where every run that was asked for is finished."""
    parser = _parser()
    words = parser.parse_args(arguments)
    root = Path(words.directory)
    try:
        runs = plan_runs(root, words.algorithm, words.seed)
        code = 0 if words.only_figure else make_runs(runs)
    except PlanError as error:
        parser.error(str(error))
    if code in INTERRUPTED:
        return code
    finished = [run for run in plan_runs(root) if run.finished]
    if not finished:
        CONSOLE.print(f"[why] no run in {root} is finished, so there is nothing to draw")
        return code or 1
    CONSOLE.print(f"[why] figure: {write_figure(finished, root / FIGURE)}")
    CONSOLE.print(f"[why] table: {write_table(finished, root / TABLE)}")
    CONSOLE.print((root / TABLE).read_text(encoding="utf-8"))
    return code


def make_runs(runs: Sequence[PlannedRun]) -> int:
    """Train what is not finished yet; 0, or the exit code of the last run that failed.

    A run that fails does not keep the others from being made; Ctrl-C does. PlanError where a folder
    holds a run of other conditions.
    """
    for run in runs:
        run.refuse_other_conditions()
    prepare(MATERIAL_SEED)
    failed = 0
    for number, run in enumerate(runs, start=1):
        name = f"run {number} of {len(runs)}, {run.algorithm}, seed {run.seed}"
        if run.finished:
            CONSOLE.print(f"[why] {name}: finished before")
            continue
        CONSOLE.print(f"[why] {name}: in {run.directory}")
        started = time.monotonic()
        code = run_to_the_end(run.command)
        if code in INTERRUPTED:
            return code
        ending = f"failed with exit code {code}" if code else "done"
        CONSOLE.print(f"[why] {name}: {ending} in {time.monotonic() - started:.0f} s")
        failed = code or failed
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.why.run",
        description="Compare four algorithms on a tiny model where the trust region matters.",
    )
    parser.add_argument("--algorithm", help="only this one's runs (default: all)")
    parser.add_argument("--seed", type=int, help="only this seed's runs (default: all)")
    parser.add_argument("--only-figure", action="store_true", help="draw what is finished")
    parser.add_argument("--directory", default="runs/why", help="where the runs go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
