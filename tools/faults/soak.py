#!/usr/bin/env python3
"""A long run with kills of servers, and a check that memory and descriptors of its processes stay flat.

The run trains a tiny model on sums with two ranks, two servers behind a router and responses one step old at most. A
step is short: two groups of two responses of eight tokens. Every few hundred steps a random server is killed, and the
run starts it again. Private memory (USS: pages that no other process has) and open descriptors of each process are
measured at regular steps. The growth of a process is that of its high values: the 90th percentile of the last third of
its life, less that of the first third. So a process that switches between two sizes does not grow. The first part of a
process's life does not count, because caches fill then.

    python -m tools.faults.soak --folder /tmp/soak [--steps 5000] [--kill-every 250]

The folder has `soak.jsonl` (a line for each measurement), `table.md` and `soak.png`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megatron_dppo.metrics import records
from tools.faults.chaos import LiveRun, empty_folder, make_material, report_faults

SHORT_STEPS = {
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 8, "save": False},
    "training": {"prompts_per_mini_batch": 2},
    "checkpoint": {"every": 100},
}
"""Changes to the configuration of ``chaos`` that make steps short."""
SERVER = "server"
WARM_STEPS = 500
"""Steps at the beginning of a process's life that do not count."""
MOST_MIB_PER_1000_STEPS = 5.0
MOST_DESCRIPTORS_PER_1000_STEPS = 1.0
NOISE_MIB = 10.0
NOISE_DESCRIPTORS = 5.0
"""Growth over a process's whole life up to these values counts as flat: open connections, for example, come and go."""
_LOOK_S = 0.5
_STALLED_S = 1800.0


@dataclass(frozen=True)
class Measurement:
    """Private memory and descriptors of one process when the run had done ``step`` steps."""

    step: int
    kind: str
    pid: int
    private_bytes: int
    descriptors: int


@dataclass(frozen=True)
class Growth:
    """Growth of one process between its warm-up and its end.

    Attributes:
        steps: steps between the first and the last measurement that count.
        mib: growth of private memory in MiB for 1,000 steps.
        descriptors: growth of open descriptors for 1,000 steps.
        last_mib: private memory at the last measurement in MiB.
    """

    kind: str
    pid: int
    steps: int
    mib: float
    descriptors: float
    last_mib: float

    @property
    def is_flat(self) -> bool:
        thousands = self.steps / 1000
        most_mib = max(NOISE_MIB, MOST_MIB_PER_1000_STEPS * thousands)
        most_descriptors = max(NOISE_DESCRIPTORS, MOST_DESCRIPTORS_PER_1000_STEPS * thousands)
        is_memory_flat = self.mib * thousands <= most_mib
        return is_memory_flat and self.descriptors * thousands <= most_descriptors


def measure(run: LiveRun, step: int) -> list[Measurement]:
    """Measure the living processes of ``run``."""
    found = []
    for kind, processes in run.processes().items():
        for process in processes:
            try:
                private_bytes = process.memory_full_info().uss
                descriptors = process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            found.append(Measurement(step, kind, process.pid, private_bytes, descriptors))
    return found


def growths(measurements: list[Measurement]) -> list[Growth]:
    """Return the growth of each process that has lived for at least twice its warm-up."""
    by_process: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    for each in measurements:
        by_process[each.kind, each.pid].append(each)
    found = []
    for (kind, pid), series in by_process.items():
        begin = series[0].step + WARM_STEPS
        counted = [each for each in series if each.step >= begin]
        if len(counted) < 6 or counted[-1].step - begin < WARM_STEPS:
            continue
        growth = Growth(
            kind,
            pid,
            counted[-1].step - counted[0].step,
            growth_of(counted, [each.private_bytes / 2**20 for each in counted]),
            growth_of(counted, [float(each.descriptors) for each in counted]),
            counted[-1].private_bytes / 2**20,
        )
        found.append(growth)
    return found


def growth_of(counted: list[Measurement], values: list[float]) -> float:
    """Return how much the high ``values`` of the measurements grow in 1,000 steps."""
    third = len(values) // 3
    first_high = statistics.quantiles(values[:third], n=10, method="inclusive")[-1]
    last_high = statistics.quantiles(values[-third:], n=10, method="inclusive")[-1]
    steps_between = counted[-third].step - counted[0].step
    return 1000 * (last_high - first_high) / steps_between


def table(found: list[Growth]) -> str:
    """Return the largest growth of each kind of process as a Markdown table."""
    lines = [
        "| process | lives measured | longest, steps | private MiB at its end "
        "| MiB for 1,000 steps | descriptors for 1,000 steps |",
        "|---|---|---|---|---|---|",
    ]
    by_kind: dict[str, list[Growth]] = defaultdict(list)
    for growth in found:
        by_kind[growth.kind].append(growth)
    for kind, lives in sorted(by_kind.items()):
        longest = max(lives, key=lambda growth: growth.steps)
        mib = max(growth.mib for growth in lives)
        descriptors = max(growth.descriptors for growth in lives)
        lines.append(
            f"| {kind} | {len(lives)} | {longest.steps} | {longest.last_mib:.0f} | {mib:+.2f} "
            f"| {descriptors:+.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(measurements: list[Measurement], kills: list[int], path: Path) -> None:
    """Draw private memory and descriptors of each process against the step, with a mark for each kill."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    kinds = sorted({each.kind for each in measurements})
    colours = {kind: f"C{index}" for index, kind in enumerate(kinds)}
    by_process: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    for each in measurements:
        by_process[each.kind, each.pid].append(each)
    labelled: set[str] = set()
    for (kind, _), series in sorted(by_process.items()):
        steps = [each.step for each in series]
        label = None if kind in labelled else kind
        labelled.add(kind)
        memory = [each.private_bytes / 2**20 for each in series]
        upper.plot(steps, memory, color=colours[kind], linewidth=1, label=label)
        lower.plot(steps, [each.descriptors for each in series], color=colours[kind], linewidth=1)
    for axes in (upper, lower):
        for step in kills:
            axes.axvline(step, color="0.8", linewidth=0.5, zorder=0)
        axes.set_ylim(bottom=0)
    upper.set_ylabel("private memory, MiB")
    lower.set_ylabel("open descriptors")
    lower.set_xlabel("step (grey: kill of a server)")
    upper.legend(ncols=3, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


class Soak:
    """Follows a run to its end, measures its processes and kills its servers."""

    def __init__(self, run: LiveRun, options: argparse.Namespace) -> None:
        self._run = run
        self._steps: int = options.steps
        self._measure_every: int = options.measure_every
        self._kill_every: int = options.kill_every
        self._chance = random.Random(options.seed)
        self._journal: Path = options.folder / "soak.jsonl"
        self.measurements: list[Measurement] = []
        self.kills: list[int] = []

    def follow(self) -> None:
        """Return when the run has ended. Raises TimeoutError if it does not advance."""
        next_measurement = self._measure_every
        next_kill = self._kill_every
        step, advanced_at = 0, time.monotonic()
        while self._run.code is None:
            time.sleep(_LOOK_S)
            newest_step = self._run.last_step()
            if newest_step > step:
                step, advanced_at = newest_step, time.monotonic()
            if time.monotonic() - advanced_at > _STALLED_S:
                raise TimeoutError(f"no step within {_STALLED_S:g} s after step {step}")
            if step >= next_measurement:
                self._measure(step)
                next_measurement = step + self._measure_every
            if step >= next_kill and step < self._steps:
                self._kill_server(step)
                next_kill = step + self._kill_every

    def _measure(self, step: int) -> None:
        found = measure(self._run, step)
        self.measurements += found
        with open(self._journal, "a") as file:
            for each in found:
                file.write(json.dumps(asdict(each)) + "\n")
        print(f"step {step}: {len(found)} processes", flush=True)

    def _kill_server(self, step: int) -> None:
        servers = self._run.processes()[SERVER]
        if not servers:
            return
        process = self._chance.choice(servers)
        process.kill()
        self.kills.append(step)
        print(f"step {step}: killed a server", flush=True)


def main() -> int:
    options = _parser().parse_args()
    folder = options.folder = empty_folder(options.folder)
    config = make_material(folder, SHORT_STEPS)
    run = LiveRun(config, folder / "run")
    soak = Soak(run, options)
    began = time.monotonic()
    try:
        run.start(f"run.steps={options.steps}")
        soak.follow()
    finally:
        run.kill()
    seconds = time.monotonic() - began
    found = growths(soak.measurements)
    text = table(found)
    (folder / "table.md").write_text(text)
    draw(soak.measurements, soak.kills, folder / "soak.png")
    print(text)
    faults = [f"{growth.kind} {growth.pid} grows" for growth in found if not growth.is_flat]
    steps = [records.step_of(row) for row in records.read_records(run.directory)]
    if run.code != 0:
        faults.append(f"the run ended with exit code {run.code}; see {run.output}")
    if steps != list(range(options.steps + 1)):
        faults.append(f"records of {len(steps)} steps, expected 0 to {options.steps} once each")
    print(f"{seconds:.0f} s, {options.steps} steps, {len(soak.kills)} kills, {len(faults)} faults")
    return report_faults(faults)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="of the run")
    parser.add_argument("--steps", type=int, default=5000, help="steps of the run (5000)")
    parser.add_argument(
        "--kill-every", type=int, default=250, help="steps between kills of a server (250)"
    )
    parser.add_argument(
        "--measure-every", type=int, default=25, help="steps between measurements (25)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the choice of servers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
