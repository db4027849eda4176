#!/usr/bin/env python3
"""The doctor's findings in healthy steps: every finding is a false alarm.

    python tools/healthy_steps.py --lab [--steps 64] [--only moe]
    python tools/healthy_steps.py RUN [RUN ...]

``--lab``: steps of the arena's lab. Its engine is a copy of the policy in transformers. RUN: every saved batch of a run
with ``rollout.save=true`` and ``checkpoint.every=1``, and the run's prompts.

Prints for each setting:

- the largest gap of each side, as a share of the healthy bound;
- two largest log-likelihood ratios (a finding at 20): for another sampler, and for more equal responses than by chance;
- log10 of the frequency canary's evidence from tokens at equal weights (a run stops at 6);
- the findings. The exit code is 1 if there is a finding.

The gap, the frequency canary and, for a RUN, the seal are also the run's own checks: their error would end the run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.arena.lab import Lab, configured  # noqa: E402
from examples.arena.mismatches import MISMATCHES, Mismatch  # noqa: E402
from examples.arena.sampler import place_of  # noqa: E402
from examples.arena.tasks import TASKS  # noqa: E402
from megatron_dppo.config.loading import load_config  # noqa: E402
from megatron_dppo.data.batch_file import load_batch  # noqa: E402
from megatron_dppo.diagnostics.doctor.__main__ import weights_by_version  # noqa: E402
from megatron_dppo.diagnostics.doctor.diagnosis import Diagnosis  # noqa: E402
from megatron_dppo.diagnostics.doctor.reference import KnownWeights, Reference  # noqa: E402
from megatron_dppo.diagnostics.doctor.report import Doctor, findings_of  # noqa: E402
from megatron_dppo.diagnostics.doctor.rounding import bfloat16, float8  # noqa: E402
from megatron_dppo.diagnostics.doctor.sampling_evidence import Draws  # noqa: E402
from megatron_dppo.metrics import table as names  # noqa: E402
from megatron_dppo.metrics.progress import progress  # noqa: E402
from megatron_dppo.metrics.records import ROLLOUTS_FOLDER, read_records, saved_batch_steps  # noqa: E402

RESPONSES = 64
"""Number of responses of a batch that ``megatron-dppo doctor`` examines by default."""


@dataclass(frozen=True)
class Setting:
    """Healthy steps of the lab: the configuration accounts for every difference between engine and trainer."""

    task: str
    mismatch: Mismatch = MISMATCHES["none"]
    changes: tuple[str, ...] = ()


HALF = ("model.dtype=bfloat16",)
EIGHT_BITS = (*HALF, "sglang.kv_cache_dtype=fp8_e4m3")
ROUNDED = MISMATCHES["bf16"]
SETTINGS: dict[str, Setting] = {
    "moe": Setting("moe"),
    "moe, seed 2, Top-K": Setting("moe", changes=("run.seed=2", "algorithm.name=dppo-topk-kl")),
    "moe, R3": Setting("moe", Mismatch(replays=True)),
    "moe, one batch late": Setting("moe", MISMATCHES["stale-1"]),
    "moe, one batch late, R3": Setting("moe", Mismatch(age=1, replays=True)),
    "moe, bf16": Setting("moe", ROUNDED, HALF),
    "moe, bf16, R3": Setting("moe", Mismatch(bfloat16, activations=True, replays=True), HALF),
    "moe, bf16, one batch late": Setting("moe", MISMATCHES["bf16-stale-1"], HALF),
    "moe, 8 bits": Setting("moe", Mismatch(float8, activations=True), EIGHT_BITS),
    "rare": Setting("rare"),
    "rare, seed 2, Top-K": Setting("rare", changes=("run.seed=2", "algorithm.name=dppo-topk-tv")),
    "rare, bf16": Setting("rare", ROUNDED, HALF),
    "rare, 8 bits": Setting("rare", Mismatch(float8, activations=True), EIGHT_BITS),
    "long": Setting("long"),
    "long, GRPO, one batch late": Setting(
        "long", MISMATCHES["stale-1"], ("algorithm.name=grpo-clip-higher",)
    ),
    "long, bf16": Setting("long", ROUNDED, HALF),
}
LAB = (
    "rollout.save=true",
    "rollout.largest_gap=null",
    "optimizer.lr=2e-4",
    "rollout.prompts_per_step=8",
    "training.prompts_per_mini_batch=4",
)
"""Overrides of the lab's runs. The doctor's trainer side takes four groups of eight. The lab has no bound of the gap: a
run has its own bound."""


class LiveWeights(KnownWeights):
    """The last three versions of a policy that is being trained, as references."""

    def __init__(self, start: Path) -> None:
        super().__init__({}, start, start)
        self._start_folder = start
        self._references: dict[int, Reference] = {}

    def remember(self, version: int, tensors: dict[str, Tensor]) -> None:
        oldest = self._references.pop(version - 3, None)
        reference = oldest or Reference(self._start_folder)
        for name, values in tensors.items():
            place_of(name, reference.tensors).data.copy_(values)
        self._references[version] = reference
        self.folders = dict.fromkeys(self._references, self._start_folder)

    def reference(self, version: int) -> Reference:
        return self._references[version]


@dataclass
class SettingFigures:
    """The largest figures of a setting's steps, and the findings. A gap is a share of the bound for a finding."""

    steps: int = 0
    tokens: int = 0
    gaps: dict[str, float] = field(default_factory=dict)
    evidence: float = -torch.inf
    copies: float = -torch.inf
    canary: float = -torch.inf
    findings: list[str] = field(default_factory=list)

    def add(
        self, step: int, diagnoses: Sequence[Diagnosis], draws: Draws | None, findings: list[str]
    ) -> None:
        self.steps += 1
        for d in diagnoses:
            self.gaps[d.side] = max(self.gaps.get(d.side, 0.0), d.gap / d.bound)
        if draws is not None:
            self.tokens += draws.tokens
            self.evidence = max(self.evidence, draws.evidence)
            self.copies = max(self.copies, draws.copies_evidence)
        self.findings += [f"step {step}: {finding}" for finding in findings]


def lab_steps(name: str, steps: int) -> SettingFigures:
    """Examine ``steps`` steps of a setting."""
    from megatron_dppo.trainer.topology import destroy_topology

    torch.set_num_threads(1)
    setting = SETTINGS[name]
    seen = SettingFigures()
    task = TASKS[setting.task]()
    config = configured(task, setting.mismatch, [*LAB, *setting.changes, f"run.steps={steps}"])
    lab = Lab(config, task, setting.mismatch)
    weights = LiveWeights(task.checkpoint)
    with progress(name, steps) as bar:
        for step in range(1, steps + 1):
            weights.remember(step - 1, lab.weights())
            figures = lab.step()
            doctor = Doctor(config, lab.batch[:RESPONSES], weights)
            diagnoses, draws = doctor.diagnose(step)
            seen.add(step, diagnoses, draws, findings_of(diagnoses, draws))
            seen.canary = max(seen.canary, figures.get(names.FREQUENCY_EVIDENCE, seen.canary))
            bar.advance()
    destroy_topology()
    return seen


def run_steps(run: Path) -> SettingFigures:
    """Examine every saved batch of a run."""
    config = load_config(run / "config.yaml")
    seen = SettingFigures()
    folder = run / ROLLOUTS_FOLDER
    options = argparse.Namespace(run=run, weights=[])
    folders = weights_by_version(options, config)
    steps = saved_batch_steps(folder)
    with tempfile.TemporaryDirectory() as converted, progress(run.name, len(steps)) as bar:
        known = KnownWeights(folders, Path(config.model.hf_checkpoint), Path(converted))
        for step in steps:
            report = Doctor(config, load_batch(folder, step)[:RESPONSES], known).report(step)
            seen.add(step, report.diagnoses, report.draws, report.findings)
            bar.advance()
    evidence = [r.get(names.FREQUENCY_EVIDENCE) for r in read_records(run)]
    seen.canary = max([e for e in evidence if e is not None], default=-torch.inf)
    return seen


def examine_all(options: argparse.Namespace) -> Iterator[tuple[str, SettingFigures]]:
    """Yield the name and the figures of each run and each setting of the command line."""
    for run in options.runs:
        yield run.name, run_steps(run)
    chosen_settings = [name for name in SETTINGS if options.lab and options.only in name]
    # Each setting has a separate process: the threads of its process groups use cores until the process ends.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield from zip(
            chosen_settings,
            pool.map(lab_steps, chosen_settings, repeat(options.steps)),
            strict=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--lab", action="store_true")
    parser.add_argument("--steps", type=int, default=64, help="of each setting (64)")
    parser.add_argument("--only", default="", help="settings whose names have this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False)
    table = Table(title="The doctor on healthy steps")
    table.add_column("setting")
    sides = "engine", "trainer", "recording"
    for column in ("steps", "tokens", *sides, "sampler", "copies", "canary", "findings"):
        table.add_column(column, justify="right")
    steps, findings = 0, []
    for name, seen in examine_all(options):
        table.add_row(
            name, str(seen.steps), str(seen.tokens), f"{seen.gaps.get('engine', 0):.2f}",
            f"{seen.gaps.get('trainer', 0):.2f}", f"{seen.gaps.get('recording', 0):.2f}",
            f"{seen.evidence:.1f}", f"{seen.copies:.1f}",
            f"{seen.canary:.1f}", str(len(seen.findings)),
        )  # fmt: skip
        steps += seen.steps
        findings += [f"{name}, {finding}" for finding in seen.findings]
        print(f"{name}: {seen}", file=sys.stderr)
    console.print(table)
    for finding in findings:
        console.print(finding)
    console.print(f"{len(findings)} findings in {steps} healthy steps")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
