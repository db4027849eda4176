#!/usr/bin/env python3
"""Benchmark of waiting trainers and servers: one run synchronous, ahead, interrupted by updates, and colocated.

Each round runs all modes in turn (every second round backwards). It compares seconds per step, the share of time that
trainers waited, and the share of time that servers had nothing to generate. Evaluations are not counted. The first
steps and the last step are not counted either: no batch is ahead in these steps. Run directories are kept for
`megatron-dppo report`.

    python tools/bench_idle.py examples/tiny_moe/config.yaml --rounds 3 --tail run.steps=20

`--tail`: long-tailed lengths instead of the recipe's lengths. The recipe's random model ends a response at one token in
36, so lengths are geometric: mean 36, up to 192; the longest of 128 is about five times the mean. `{round}` in an
override is replaced by the number of the round, from 1: `run.seed={round}` changes the seed.
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

ALONE = ("parallel.world_size=1", "parallel.expert=1")
"""One trainer process and one server, so that each has a core."""
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": ALONE,
    "one ahead": (*ALONE, "rollout.max_staleness=1"),
    "one ahead, interrupted": (*ALONE, "rollout.max_staleness=1", "rollout.interrupt=retract"),
    "two ahead, interrupted": (*ALONE, "rollout.max_staleness=2", "rollout.interrupt=retract"),
    "colocated": ("parallel.world_size=2", "parallel.expert=2", "engine.placement=colocated"),
}
"""Mode -> overrides. The first mode is the reference of all ratios."""
TAIL = (
    "model.hf_checkpoint=runs/tiny_moe/material/seed-1/random",
    "rollout.max_response_tokens=192",
    "rollout.responses_per_call=1",
    "rollout.prompts_per_step=16",
    "training.prompts_per_mini_batch=8",
    "optimizer.lr=1e-9",
    "reward.name=tools.bench_idle:parity",
)
"""Overrides for long-tailed lengths. The learning rate leaves the model as it is. The reward differs within a group:
otherwise all gradients would be 0."""
NOT_COUNTED = frozenset({"start", "evaluate", "export"})
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def parity(response: str, answer: str) -> float:
    """A reward: whether the response has an odd number of characters."""
    return float(len(response) % 2)


@dataclass(frozen=True)
class RunFigures:
    """Means of one run over its middle steps. ``accuracy``: the held-out accuracy at the end."""

    mode: str
    step_s: float
    generation_s: float
    waited_s: float
    train_s: float
    sync_s: float
    switch_s: float
    staleness: float
    interrupted: float
    trainers_waited: float
    servers_idle: float
    accuracy: float | None

    @classmethod
    def of(cls, mode: str, records: Sequence[Record]) -> RunFigures:
        """Build from the records of a run. Raises ValueError if the run has no middle steps."""
        middle = records[4:-1]
        if not middle:
            raise ValueError(
                f"{len(records) - 1} steps hold none after the third and before the last"
            )

        def mean(name: str) -> float:
            return statistics.fmean(record.get(name) or 0.0 for record in middle)

        phases: set[str] = set()
        for record in middle:
            for name in record:
                phase = names.phase_of(name)
                if phase is not None and phase not in NOT_COUNTED:
                    phases.add(name)
        return cls(
            mode=mode,
            step_s=sum(mean(name) for name in phases),
            generation_s=mean(names.GENERATION_SECONDS),
            waited_s=mean(names.GENERATION_WAITED),
            train_s=mean(names.phase_seconds("train")),
            sync_s=mean(names.phase_seconds("sync")),
            switch_s=mean(names.phase_seconds("switch")),
            staleness=mean(names.STALENESS),
            interrupted=mean(names.INTERRUPTED),
            trainers_waited=mean(names.TRAINERS_WAITED),
            servers_idle=mean(names.SERVERS_IDLE),
            accuracy=mean_accuracy(records[-1]),
        )


def run(config: str, mode: str, directory: Path, overrides: Sequence[str]) -> RunFigures:
    """Run one training in a new ``directory``. Exit the program if the training fails."""
    words = (f"run.directory={directory}", "run.resume=never", *MODES[mode])
    command = [sys.executable, "-m", "megatron_dppo.train", config, *words, *overrides]
    directory.mkdir(parents=True)
    with open(directory.with_suffix(".out"), "wb") as out:
        done = subprocess.run(command, check=False, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: see {out.name}")
    return RunFigures.of(mode, read_records(directory))


def show(rounds: Sequence[dict[str, RunFigures]]) -> dict[str, list[float]]:
    """Print one row for each run. Return each mode's ratios by round: a synchronous step's seconds over the mode's."""
    table = Table(
        "round", "mode", "step s", "wait s", "train s", "sync s", "switch s", "stale",
        "interrupted", "trainers wait", "servers idle", "ratio",
    )  # fmt: skip
    first, *others = MODES
    ratios: dict[str, list[float]] = {mode: [] for mode in others}
    for number, by_mode in enumerate(rounds, start=1):
        for mode, m in by_mode.items():
            ratio = by_mode[first].step_s / m.step_s
            ratios.setdefault(mode, []).append(ratio)
            seconds = (m.step_s, m.waited_s, m.train_s, m.sync_s, m.switch_s)
            table.add_row(
                str(number) if mode == first else "",
                mode,
                *(f"{value:.3f}" for value in seconds),
                f"{m.staleness:.2f}",
                *(f"{v:.0%}" for v in (m.interrupted, m.trainers_waited, m.servers_idle)),
                f"{ratio:.2f}",
            )
    CONSOLE.print(table)
    for mode in others:
        of_mode = ratios[mode]
        CONSOLE.print(
            f"a synchronous step takes {statistics.median(of_mode):.2f} times as long as {mode} "
            f"(median of {len(of_mode)} rounds; {min(of_mode):.2f} to {max(of_mode):.2f})"
        )
    return {mode: ratios[mode] for mode in others}


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--rounds", type=int, default=3, help="of all modes (default: 3)")
    parser.add_argument("--tail", action="store_true", help="long-tailed lengths")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_idle"))
    parser.add_argument("--json", type=Path, help="write every figure there, too")
    options = parser.parse_intermixed_args()
    rounds: list[dict[str, RunFigures]] = []
    for number in range(1, options.rounds + 1):
        overrides = [word.replace("{round}", str(number)) for word in options.overrides]
        if options.tail:
            overrides = [*TAIL, *overrides]
        order = list(MODES)
        if number % 2 == 0:
            order.reverse()
        by_mode: dict[str, RunFigures] = {}
        for mode in order:
            directory = options.folder / f"{mode.replace(', ', '-').replace(' ', '-')}-{number}"
            if directory.exists():
                parser.error(f"{directory} is there already; name another --folder")
            load = os.getloadavg()[0]
            CONSOLE.print(f"round {number}, {mode} (load average {load:.1f}) ...")
            by_mode[mode] = run(options.config, mode, directory, overrides)
        rounds.append({mode: by_mode[mode] for mode in MODES})
    ratios = show(rounds)
    if options.json:
        figures = [{mode: asdict(m) for mode, m in by_mode.items()} for by_mode in rounds]
        options.json.write_text(json.dumps({"ratios": ratios, "rounds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
