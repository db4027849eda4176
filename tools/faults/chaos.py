#!/usr/bin/env python3
"""Kills of random processes of a live run, and a check that the run lost nothing and counted nothing twice.

The run trains a tiny model on sums. It has ranks, two servers behind a router, and workers of rewards. Responses are
at most one step old. The supervisor and the processes of all kinds in the table KINDS are
equally likely to be killed (SIGKILL). If the supervisor ends, the same command starts the run again. When the time is
over, a last start ends the run. Then three things must hold:

- the records of steps, samples and batches exist once and in order;
- each batch has the problems that an undisturbed sampler draws, with all of their responses once;
- each step is derived again from its saved batch, and gives weights with the hash in the batch's seal, bit for bit.

    python -m tools.faults.chaos --folder /tmp/chaos [--duration 3600] [--every 15] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_dppo.config import load_config
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.metrics import records
from megatron_dppo.system.processes import is_rank_name
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GROUP, PROBLEMS, SEED = 4, 8, 64, 1
CALM_STEPS = 4
"""Steps before the first kill. Their median is the time of a calm step."""
END_LIMIT_S = 1800.0
_LOOK_S = 0.2
_ENDLESS = 10**6
NO_CHANGES: Mapping[str, Mapping[str, Any]] = {}
SUPERVISOR = "supervisor"
Recognition = Callable[[str, str], bool]
"""Whether a process with this name and this command line is of a kind."""
KINDS: Mapping[str, Recognition] = {
    "rank": lambda name, command: is_rank_name(name),
    "scheduler": lambda name, command: name.startswith("sglang::schedul"),
    "detokenizer": lambda name, command: name.startswith("sglang::detoken"),
    "server": lambda name, command: (
        "megatron_dppo.engine.launch_server" in command and not name.startswith("sglang::")
    ),
    "router": lambda name, command: "router" in command and "fork_server" not in command,
    "worker": lambda name, command: "megatron_dppo.rewards.verifier" in command,
    "parser": lambda name, command: "megatron_dppo.engine.answer_parsing" in command,
}


def make_material(folder: Path, changes: Mapping[str, Mapping[str, Any]] = NO_CHANGES) -> Path:
    """Write a tiny model, sums and a configuration into ``folder``; return the configuration's path.

    ``changes`` has, by section, the values of the configuration that differ.
    """
    save_tiny_model(folder / "model", "qwen3_moe", seed=1)
    generator = random.Random(0)
    rows = []
    for _ in range(PROBLEMS):
        a, b = generator.randrange(10), generator.randrange(10)
        rows.append(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    sections: dict[str, Any] = {
        "run": {
            "directory": str(folder / "run"),
            "steps": _ENDLESS,
            "max_restarts": _ENDLESS,
            "seed": SEED,
        },
        "model": {"hf_checkpoint": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            # Long responses make many answers larger than 32 KiB, so that the ranks start parsers.
            "max_response_tokens": 1024,
            "max_staleness": 1,
            "interrupt": "retract",
            "save": True,
        },
        # Every response has a different reward. So the weights change if a response is left out, or trained on twice.
        "reward": {"name": "tests.unit.planted_rewards:of_every_character"},
        "algorithm": {"name": "pg-is", "truncated_responses": "as-verified"},
        "parallel": {"world_size": 2, "tensor": 2},
        "training": {"prompts_per_mini_batch": 2, "micro_batch_tokens": 1024},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": _ENDLESS},
        "checkpoint": {"every": 4, "verify_export": False},
        "engine": {
            "servers": 2,
            "max_restarts": _ENDLESS,
            "deterministic": True,
            "hang_timeout_s": 60,
            "start_timeout_s": 3600,
        },
    }
    for section, values in changes.items():
        sections[section].update(values)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@dataclass
class Tally:
    """Figures of a run under kills, by kind of the killed process.

    Attributes:
        kills: number of kills.
        lost_s: seconds from a kill to the next kill or the next new step, minus the seconds of a calm step.
        starts: starts of the command.
    """

    kills: Counter[str] = field(default_factory=Counter)
    lost_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    starts: int = 0


class LiveRun:
    """The disturbed run: its command, its processes and its progress."""

    def __init__(self, config: Path, directory: Path, overrides: Sequence[str] = ()) -> None:
        self._config = config
        self._overrides = overrides
        self.directory = directory
        self.output = directory.with_suffix(".out")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *overrides: str) -> None:
        command = [sys.executable, "-m", "megatron_dppo.train", str(self._config)]
        command += [*self._overrides, *overrides]
        with open(self.output, "ab") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def code(self) -> int | None:
        """The exit code of the supervisor; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def interrupt(self) -> None:
        assert self._process is not None
        self._process.terminate()

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the living processes of each kind."""
        assert self._process is not None
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        try:
            supervisor = psutil.Process(self._process.pid)
            descendants = supervisor.children(recursive=True)
        except psutil.NoSuchProcess:
            return found
        found[SUPERVISOR].append(supervisor)
        for process in descendants:
            try:
                name, command = process.name(), " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            for kind, is_of_kind in KINDS.items():
                if is_of_kind(name, command):
                    found[kind].append(process)
                    break
        return found

    def last_step(self) -> int:
        """Return the last recorded step; 0 without one."""
        return max(0, records.last_step(self.directory))

    def kill(self) -> None:
        """Kill all remaining processes of the run."""
        for processes in self.processes().values():
            for process in processes:
                process.kill()

    def wait(self, limit_s: float, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {limit_s:g} s; see {self.output}")
            time.sleep(_LOOK_S)


class Chaos:
    """Disturbs a run by kills whose distances are exponential with the mean ``every_s``."""

    def __init__(self, run: LiveRun, every_s: float, seed: int) -> None:
        self._run = run
        self._every_s = every_s
        self._chance = random.Random(seed)
        self.tally = Tally()
        self.calm_step_s = 0.0
        self.newest_step = 0
        self.survivors: list[psutil.Process] = []

    def measure_calm(self) -> None:
        """Start the run, and measure its first steps without a kill."""
        self._start()
        ends = []
        for step in range(1, CALM_STEPS + 1):
            self._run.wait(END_LIMIT_S, partial(self._has_reached, step))
            ends.append(time.monotonic())
        durations = [end - start for start, end in pairwise(ends)]
        self.calm_step_s = statistics.median(durations)

    def disturb(self, duration_s: float) -> None:
        """Kill processes for ``duration_s`` seconds, and start the command whenever it has ended."""
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            kind = self._kill()
            killed_at = time.monotonic()
            next_kill = killed_at + self._chance.expovariate(1 / self._every_s)
            self._follow(kind, killed_at, min(next_kill, end))

    def _follow(self, kind: str | None, killed_at: float, until: float) -> None:
        """Note how long the run does not advance after a kill, and start the command again if it has ended."""
        step = self.newest_step
        has_advanced = False
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            if self._run.code is not None:
                self._start()
            if not has_advanced and self._read_newest_step() > step:
                has_advanced = True
                self._note_loss(kind, killed_at)
        if not has_advanced:
            self._note_loss(kind, killed_at)

    def _note_loss(self, kind: str | None, killed_at: float) -> None:
        if kind is not None:
            lost_s = time.monotonic() - killed_at - self.calm_step_s
            self.tally.lost_s[kind] += max(0.0, lost_s)

    def _kill(self) -> str | None:
        """Kill a random process; return its kind, or None while the run has no ranks."""
        candidates = []
        living = self._run.processes()
        # Before a start has ranks, it has hardly any process except the supervisor. Kills then would only hit the
        # supervisor, and the run would not advance.
        if not living["rank"]:
            return None
        for kind, processes in living.items():
            candidates += [(kind, process) for process in processes]
        if not candidates:
            return None
        kind, process = self._chance.choice(candidates)
        family = process.children(recursive=True) if kind == SUPERVISOR else []
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return None
        self.tally.kills[kind] += 1
        print(f"step {self.newest_step}: killed a {kind}", flush=True)
        if kind == SUPERVISOR:
            # The kernel ends all other processes with the supervisor.
            _, alive = psutil.wait_procs(family, timeout=30)
            self.survivors += alive
        return kind

    def _start(self) -> None:
        self._run.start()
        self.tally.starts += 1

    def _has_reached(self, step: int) -> bool:
        return self._read_newest_step() >= step

    def _read_newest_step(self) -> int:
        self.newest_step = max(self.newest_step, self._run.last_step())
        return self.newest_step


def faults_of(directory: Path, config: Path) -> Iterator[str]:
    """Yield each difference between the finished run in ``directory`` and an undisturbed run."""
    steps = [records.step_of(row) for row in records.read_records(directory)]
    last_step = steps[-1]
    if steps != list(range(last_step + 1)):
        yield f"records: {steps}"
    for name in (records.SAMPLES_FILE, records.MASKED_TOKENS_FILE):
        lines = records.read_step_lines(directory / name)
        counts = Counter(line["step"] for line in lines)
        if sorted(counts) != list(range(1, last_step + 1)) or len(set(counts.values())) != 1:
            yield f"{name}: lines by step {dict(counts)}"
    data = RunData(load_config(str(config)))
    drawn_indices = iter(data.sampler().next(PROMPTS * last_step))
    for step in range(1, last_step + 1):
        batch = load_batch(directory / records.ROLLOUTS_FOLDER, step)
        keys = [(t.problem_id, t.sample_index) for t in batch]
        problems = [
            data.train.problems[index].problem_id for index in islice(drawn_indices, PROMPTS)
        ]
        if keys != [(problem, i) for problem in problems for i in range(GROUP)]:
            yield f"batch of step {step}: not the drawn problems with each response once"
    command = [sys.executable, "-m", "megatron_dppo", "replay", str(directory), "--derive"]
    derived = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if f"{last_step} of {last_step} steps derived again" not in derived.stdout:
        yield f"derivation: {derived.stdout[-500:]}{derived.stderr[-500:]}"


def empty_folder(path: Path) -> Path:
    """Make an empty folder, in place of an earlier folder if there is one. Return its absolute path."""
    folder = path.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def report_faults(faults: Sequence[str]) -> int:
    """Print ``faults``, and return the exit code of the check: 1 if there are faults."""
    for fault in faults:
        print(f"fault: {fault}")
    return 1 if faults else 0


def table(tally: Tally) -> str:
    """Return kills and seconds lost by kind as a Markdown table."""
    lines = ["| process | kills | seconds lost | a kill |", "|---|---|---|---|"]
    for kind, count in sorted(tally.kills.items()):
        lost_s = tally.lost_s[kind]
        lines.append(f"| {kind} | {count} | {lost_s:.0f} | {lost_s / count:.1f} |")
    count = sum(tally.kills.values())
    lost_s = sum(tally.lost_s.values())
    lines.append(f"| all | {count} | {lost_s:.0f} | {lost_s / max(1, count):.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = _parser().parse_args()
    folder = empty_folder(options.folder)
    config = make_material(folder)
    run = LiveRun(config, folder / "run", options.overrides)
    chaos = Chaos(run, options.every, options.seed)
    try:
        chaos.measure_calm()
        print(f"a calm step takes {chaos.calm_step_s:.1f} s", flush=True)
        began = time.monotonic()
        chaos.disturb(options.duration)
        disturbed_s = time.monotonic() - began
        run.interrupt()
        run.wait(END_LIMIT_S, lambda: run.code is not None)
        last_step = max(chaos.newest_step, run.last_step()) + 1
        run.start(f"run.steps={last_step}")
        run.wait(END_LIMIT_S, lambda: run.code is not None)
    finally:
        run.kill()
    faults = [f"{process} outlived its supervisor" for process in chaos.survivors]
    if run.code != 0:
        faults.append(f"the last start ended with exit code {run.code}; see {run.output}")
    else:
        faults += faults_of(run.directory, config)
    text = table(chaos.tally)
    (folder / "table.md").write_text(text)
    print(text)
    print(
        f"{disturbed_s:.0f} s, {sum(chaos.tally.kills.values())} kills, {chaos.tally.starts} starts, "
        f"{last_step} steps, {len(faults)} faults"
    )
    return report_faults(faults)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of the run's configuration, key=value")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="of the run")
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds of kills (3600)")
    parser.add_argument("--every", type=float, default=15.0, help="mean seconds of a kill (15)")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    return parser


if __name__ == "__main__":
    sys.exit(main())
