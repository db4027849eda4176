"""Measure the cost of a step in the lab and in the demo on this machine.

    python -m examples.arena.speed

A step of DPPO has 16 prompts with 8 responses each, and four optimiser steps. The demo's server, ranks and supervisor
use all cores; the lab makes one run on each core. The cost of a step is the difference between runs of many and of few
steps, so start and end of the runs do not count. The cost has two measures: seconds of the machine, and core seconds
(user and system time of all processes). Other work on the machine changes the first measure, so the machine must be
quiet; it hardly changes the core seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from examples.arena import lab, real_loop
from examples.arena.lab import Cell
from examples.arena.run import make_material

FEW, MANY = 10, 50
RUNS = Path("runs/arena/speed")
DEMO, LAB_TASKS = "demo's recipe", ("rare", "moe", "long")


@dataclass(frozen=True)
class Cost:
    """Seconds of the machine, and core seconds."""

    wall: float
    cores: float


def cell_of(task: str, steps: int) -> Cell:
    return Cell(
        task, "none", "dppo-binary-tv", real_loop.SEED, (f"run.steps={steps}", "optimizer.lr=2e-4")
    )


def of_lab(task: str, steps: int) -> Cost:
    """Return the cost of one run of ``steps`` steps, with one run at a time on each core."""
    count = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(count) as pool:
        start_time = time.perf_counter()
        core_seconds = pool.map(_core_seconds, [cell_of(task, steps)] * count, chunksize=1)
        # The runs share the machine, so a run costs 1 / count of the machine's seconds.
        return Cost((time.perf_counter() - start_time) / count, sum(core_seconds) / count)


def _core_seconds(cell: Cell) -> float:
    start_time = time.process_time()
    lab.run(cell)
    return time.process_time() - start_time


def of_demo(steps: int) -> Cost:
    """Return the cost of a run of the demo's recipe with the lab's batch."""
    directory = RUNS / f"demo-{steps}"
    shutil.rmtree(directory, ignore_errors=True)
    cell = cell_of("moe", steps)
    overrides = [
        f"run.directory={directory}", f"run.seed={cell.seed}", f"algorithm.name={cell.algorithm}",
        *cell.changes, "data.evaluation={}", f"checkpoint.every={steps}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "megatron_dppo", "train", str(real_loop.CONFIG), *overrides]
    earlier_core_seconds = _core_seconds_of_children()
    start_time = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    wall_seconds = time.perf_counter() - start_time
    return Cost(wall_seconds, _core_seconds_of_children() - earlier_core_seconds)


def _core_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_step(measured: Callable[[int], Cost]) -> Cost:
    """Return the cost of a step. ``measured`` returns the cost of a run with a number of steps."""
    few = measured(FEW)
    many = measured(MANY)
    steps = MANY - FEW
    return Cost((many.wall - few.wall) / steps, (many.cores - few.cores) / steps)


def table(steps: Mapping[str, Cost]) -> list[str]:
    """Return the lines of the table. ``steps``: cost of a step by name; ``DEMO`` is one of the names."""
    demo = steps[DEMO]
    lines = [
        "| | seconds a step | times the demo | core seconds a step | times the demo |",
        "|---|---|---|---|---|",
    ]
    for name, step in steps.items():
        lines.append(
            f"| {name} | {step.wall:.3f} | {demo.wall / step.wall:.1f} "
            f"| {step.cores:.2f} | {demo.cores / step.cores:.1f} |"
        )
    return lines


def main() -> int:
    make_material(LAB_TASKS)
    lab_tasks = {f"lab, {name}": of_step(partial(of_lab, name)) for name in LAB_TASKS}
    print("\n".join(table({DEMO: of_step(of_demo), **lab_tasks})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
