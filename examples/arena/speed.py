"""How much faster than the demo the lab is: core seconds of a step, start and end of the runs left out.

    python -m examples.arena.speed

Both train the demo's model on its problems by DPPO, 16 prompts of 8 responses and four optimiser steps each; the demo's
recipe has its server, ranks and supervisor on one core. What a step costs is the difference between a run of many steps
and one of few, in seconds of user and system time of all processes, which other work on the machine hardly changes.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from examples.arena import lab, real_loop
from examples.arena.lab import Cell
from examples.arena.tasks import TASKS
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import read_records

FEW, MANY = 10, 50
RESPONSES = 16 * 8
RUNS = Path("runs/arena/speed")


def cell_of(steps: int) -> Cell:
    changes = (f"run.steps={steps}", "optimizer.lr=2e-4")
    return Cell("moe", "none", "dppo-binary-tv", real_loop.SEED, changes)


def of_lab(steps: int) -> tuple[float, float]:
    """Core seconds of a run, and its tokens a response."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_lab, (steps,))


def _lab(steps: int) -> tuple[float, float]:
    began = time.process_time()
    record = lab.run(cell_of(steps))
    return time.process_time() - began, _mean(record[names.RESPONSE_LENGTH])


def of_demo(steps: int) -> tuple[float, float]:
    """The same of the demo's recipe with the lab's batch."""
    directory = RUNS / f"demo-{steps}"
    shutil.rmtree(directory, ignore_errors=True)
    cell = cell_of(steps)
    overrides = [
        f"run.directory={directory}", f"run.seed={cell.seed}", f"algorithm.name={cell.algorithm}",
        *cell.changes, "data.evaluation={}", f"checkpoint.every={steps}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "megatron_dppo", "train", str(real_loop.CONFIG), *overrides]
    before = _of_children()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    seconds = _of_children() - before
    lengths = [
        x for r in read_records(directory) if (x := r.get(names.RESPONSE_LENGTH)) is not None
    ]
    return seconds, _mean(lengths)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(runs: Mapping[str, Mapping[int, tuple[float, float]]]) -> list[str]:
    """Rows by name, from (core seconds, tokens a response) by number of steps; the first is how often as fast."""
    lines = [
        "| | core seconds a step | of 1,000 responses | of 1,000 trained tokens |",
        "|---|---|---|---|",
    ]
    (first, second), steps = runs, []
    for name, of in runs.items():
        few, many = min(of), max(of)
        step = (of[many][0] - of[few][0]) / (many - few)
        responses = 1000 * step / RESPONSES
        steps.append(step)
        lines.append(f"| {name} | {step:.2f} | {responses:.1f} | {responses / of[many][1]:.2f} |")
    return [
        *lines,
        f"\n{first}: {steps[1] / steps[0]:.1f} times as fast as {second}",
    ]


def main() -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    TASKS["moe"]()
    runs = {
        name: {steps: measured(steps) for steps in (FEW, MANY)}
        for name, measured in (("lab", of_lab), ("demo's recipe", of_demo))
    }
    print("\n".join(table(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
