#!/usr/bin/env python3
"""Benchmark of one-step-off generation against synchronous generation: the same run in both modes.

Each round runs both modes one after the other (the order alternates) and compares seconds per step, without
evaluations and without the first and last step, which in one-step-off mode wait for two generations and for none.
Run directories are kept, for `megatron-dppo report`.

    python tools/bench_overlap.py examples/tiny_moe/config.yaml --rounds 3 run.steps=20 parallel.world_size=1

`{round}` in an override is replaced by the number of the round, from 1: `run.seed={round}` changes the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import Record, mean_accuracy, read_records

MODES = {"synchronous": 0, "one-step-off": 1}
NOT_COUNTED = frozenset({"start", "evaluate", "export"})
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Measured:
    """Figures of one run: mean seconds over its middle steps; ``accuracy``: held-out, at the end."""

    mode: str
    step_s: float
    generation_s: float
    waited_s: float
    train_s: float
    sync_s: float
    staleness: float
    accuracy: float | None

    @classmethod
    def of(cls, mode: str, records: Sequence[Record]) -> Measured:
        """Build from the records of a run. Raises ValueError if it has no middle steps."""
        middle = records[2:-1]
        if not middle:
            raise ValueError(f"{len(records) - 1} steps hold none between the first and the last")

        def mean(name: str) -> float:
            return statistics.fmean(record.get(name) or 0.0 for record in middle)

        phases = {n for r in middle for n in r if names.phase_of(n) not in NOT_COUNTED | {None}}
        return cls(
            mode=mode,
            step_s=sum(mean(name) for name in phases),
            generation_s=mean(names.GENERATION_SECONDS),
            waited_s=mean(names.GENERATION_WAITED),
            train_s=mean(names.phase_seconds("train")),
            sync_s=mean(names.phase_seconds("sync")),
            staleness=mean(names.STALENESS),
            accuracy=mean_accuracy(records[-1]),
        )


def run(config: str, mode: str, directory: Path, overrides: Sequence[str]) -> Measured:
    """Run one training in a new ``directory``; exits the program if it fails."""
    words = (
        f"run.directory={directory}",
        "run.resume=never",
        f"rollout.max_staleness={MODES[mode]}",
    )
    command = [sys.executable, "-m", "megatron_dppo.train", config, *words, *overrides]
    directory.mkdir(parents=True)
    with open(directory.with_suffix(".out"), "wb") as out:
        done = subprocess.run(command, check=False, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: see {out.name}")
    return Measured.of(mode, read_records(directory))


def show(rounds: Sequence[dict[str, Measured]]) -> list[float]:
    """Print one row for each run; returns the ratio of each round."""
    table = Table(
        *("round", "mode", "step s", "gen s", "wait s", "train s", "sync s", "stale"),
        *("held-out", "ratio"),
    )
    ratios = []
    for number, both in enumerate(rounds, start=1):
        ratios.append(both["synchronous"].step_s / both["one-step-off"].step_s)
        for mode in MODES:
            m = both[mode]
            seconds = (m.step_s, m.generation_s, m.waited_s, m.train_s, m.sync_s)
            table.add_row(
                str(number) if mode == "synchronous" else "",
                mode,
                *(f"{value:.3f}" for value in seconds),
                f"{m.staleness:.2f}",
                "" if m.accuracy is None else f"{m.accuracy:.3f}",
                f"{ratios[-1]:.3f}" if mode == "one-step-off" else "",
            )
    CONSOLE.print(table)
    CONSOLE.print(
        f"a synchronous step takes {statistics.median(ratios):.3f} times as long "
        f"(median of {len(ratios)} rounds; {min(ratios):.3f} to {max(ratios):.3f})"
    )
    return ratios


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_overlap"))
    parser.add_argument("--json", type=Path, help="write every figure there, too")
    options = parser.parse_intermixed_args()
    rounds: list[dict[str, Measured]] = []
    for number in range(1, options.rounds + 1):
        overrides = [word.replace("{round}", str(number)) for word in options.overrides]
        order = list(MODES)[:: 1 if number % 2 else -1]
        both: dict[str, Measured] = {}
        for mode in order:
            directory = options.folder / f"{mode}-{number}"
            if directory.exists():
                parser.error(f"{directory} is there already; name another --folder")
            load = os.getloadavg()[0]
            CONSOLE.print(f"round {number}, {mode} (load average {load:.1f}) ...")
            both[mode] = run(options.config, mode, directory, overrides)
        rounds.append(both)
    ratios = show(rounds)
    if options.json:
        figures = [{mode: asdict(m) for mode, m in both.items()} for both in rounds]
        options.json.write_text(json.dumps({"ratios": ratios, "rounds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
