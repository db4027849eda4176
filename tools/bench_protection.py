#!/usr/bin/env python3
"""Processor time of a calm step with memory checks and kept responses, and without both.

The demo's recipe runs in pairs, with (``memory_checks`` at their defaults, ``checkpoint.keep_responses``) and without.
The time is that of all processes of the run between two recorded steps, so that neither the start nor other work of the
machine counts.

    python -m megatron_dppo.demo.material        # once: model and data of the recipe
    python tools/bench_protection.py [--steps 20] [--pairs 2]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatron_dppo.metrics import records

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples" / "tiny_moe" / "config.yaml"
FIRST_STEP = 3
"""The measurement begins with the end of this step: earlier ones fill caches and pools."""
COMMON = ("evaluation.every=1000", "checkpoint.export_hf=false")
WITHOUT = (
    *("memory_checks.optimizer=false", "memory_checks.engines_every=0"),
    "checkpoint.keep_responses=false",
)
_LOOK_S = 0.02


def step_seconds(overrides: Sequence[str], steps: int) -> float:
    """Run the recipe; return the processor seconds of a step of all of the run's processes."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        last_step = FIRST_STEP + steps
        words = [f"run.directory={directory}", f"run.steps={last_step + 1}", *COMMON, *overrides]
        command = [sys.executable, "-m", "megatron_dppo.train", str(RECIPE), *words]
        with open(Path(folder) / "output", "wb") as output:
            run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            before_s = _processor_seconds_at(run, directory, FIRST_STEP)
            after_s = _processor_seconds_at(run, directory, last_step)
        finally:
            run.terminate()
            run.wait()
            shutil.rmtree(directory, ignore_errors=True)
    return (after_s - before_s) / steps


def _processor_seconds_at(run: subprocess.Popen[bytes], directory: Path, step: int) -> float:
    """Wait for the record of ``step``; return the processor seconds that the run's living processes have used."""
    while not _is_recorded(directory, step):
        if run.poll() is not None:
            raise SystemExit(f"the run ended with exit code {run.returncode} before step {step}")
        time.sleep(_LOOK_S)
    total_s = 0.0
    supervisor = psutil.Process(run.pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        times = process.cpu_times()
        total_s += times.user + times.system
    return total_s


def _is_recorded(directory: Path, step: int) -> bool:
    if not (directory / records.RECORDS_FILE).exists():
        return False
    return any(records.step_of(row) >= step for row in records.read_records(directory))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a run (20)")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each kind (2)")
    options = parser.parse_args()
    protected: list[float] = []
    bare: list[float] = []
    for pair in range(options.pairs):
        order = [((), protected), (WITHOUT, bare)]
        # Each kind is first in every other pair.
        for overrides, seconds in order if pair % 2 == 0 else reversed(order):
            seconds.append(step_seconds(overrides, options.steps))
        print(f"pair {pair + 1}: {protected[-1]:.3f} s with, {bare[-1]:.3f} s without", flush=True)
    with_s, without_s = statistics.mean(protected), statistics.mean(bare)
    print(
        f"processor seconds of a step: {with_s:.3f} with memory checks and kept responses, {without_s:.3f} without: "
        f"{100 * (with_s / without_s - 1):+.1f}%"
    )


if __name__ == "__main__":
    main()
