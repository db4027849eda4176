"""How much faster than the demo the lab is: what a step costs this machine, start and end of the runs left out.

    python -m examples.arena.speed

Steps of DPPO of 16 prompts with 8 responses each and four optimiser steps: the demo's recipe, whose server, ranks and
supervisor have all cores, and the lab's tasks, one run on each core. What a step costs is the difference between runs
of many steps and of few: in seconds of the machine, which must be quiet, and of its cores (user and system time of all
processes), which other work hardly changes.
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
    """Seconds of the machine and of its cores."""

    wall: float
    cores: float


def cell_of(task: str, steps: int) -> Cell:
    return Cell(
        task, "none", "dppo-binary-tv", real_loop.SEED, (f"run.steps={steps}", "optimizer.lr=2e-4")
    )


def of_lab(task: str, steps: int) -> Cost:
    """Of a step, of as many runs at a time as there are cores."""
    count = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(count) as pool:
        began = time.perf_counter()
        cores = pool.map(_lab, [cell_of(task, steps)] * count, chunksize=1)
        return Cost((time.perf_counter() - began) / count, sum(cores) / count)


def _lab(cell: Cell) -> float:
    began = time.process_time()
    lab.run(cell)
    return time.process_time() - began


def of_demo(steps: int) -> Cost:
    """The same of the demo's recipe with the lab's batch."""
    directory = RUNS / f"demo-{steps}"
    shutil.rmtree(directory, ignore_errors=True)
    cell = cell_of("moe", steps)
    overrides = [
        f"run.directory={directory}", f"run.seed={cell.seed}", f"algorithm.name={cell.algorithm}",
        *cell.changes, "data.evaluation={}", f"checkpoint.every={steps}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "megatron_dppo", "train", str(real_loop.CONFIG), *overrides]
    before, began = _of_children(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return Cost(time.perf_counter() - began, _of_children() - before)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_step(measured: Callable[[int], Cost]) -> Cost:
    """``measured``: of runs, by their number of steps."""
    few, many = measured(FEW), measured(MANY)
    return Cost(
        *((b - a) / (MANY - FEW) for a, b in ((few.wall, many.wall), (few.cores, many.cores)))
    )


def table(steps: Mapping[str, Cost]) -> list[str]:
    """Rows by name, one of which is ``DEMO``."""
    demo = steps[DEMO]
    return [
        "| | seconds a step | times the demo | core seconds a step | times the demo |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {step.wall:.3f} | {demo.wall / step.wall:.1f} "
            f"| {step.cores:.2f} | {demo.cores / step.cores:.1f} |"
            for name, step in steps.items()
        ),
    ]


def main() -> int:
    make_material(LAB_TASKS)
    lab_tasks = {f"lab, {name}": of_step(partial(of_lab, name)) for name in LAB_TASKS}
    print("\n".join(table({DEMO: of_step(of_demo), **lab_tasks})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
