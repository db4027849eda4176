"""Toy runs of the paper's experiments, in the arena's lab: minutes on two cores.

A toy run has the rules of a figure's runs, on a small model and task of the lab, with a mismatch of trainer and engine.
Its folder has the files of a run that a figure of the paper is drawn from.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.arena.lab import Lab, configured, last_word
from examples.arena.mismatches import MISMATCHES
from examples.arena.run import forked, make_material
from examples.arena.sampler import PolicyCopy
from examples.arena.tasks import TASKS, Task
from examples.recipes.paper import Run
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.records import MASKED_TOKENS_FILE, RECORDS_FILE
from megatron_dppo.metrics.table import accuracy

ROOT = Path("runs/paper")
STEPS = 40
EVALUATED_PROBLEMS = 64
EVALUATION_EVERY = 5
EVALUATION_SETS = ("aime24", "aime25")
"""In a toy run these are two fixed sets of the task's problems. The names are those of the paper's panels."""
TOKENS_FILE = "tokens.csv"
"""Probabilities of the first batch's tokens, as ``megatron-dppo explain --csv`` names them."""


RATES = {"moe": "3e-4", "long": "2e-4", "rare": "1e-3"}
"""Task -> learning rate, as in the arena's claims."""


@dataclass(frozen=True)
class Toy:
    """What stands for an experiment: a task and a mismatch of the lab, and further overrides."""

    task: str
    mismatch: str
    changes: tuple[str, ...] = ()


TOYS: Mapping[str, Toy] = {
    "stability": Toy("long", "stale-8", ("algorithm.settings=stability",)),
    "efficiency": Toy("rare", "stale-8"),
    "clipped-tokens": Toy("moe", "stale-8"),
    "moe-base": Toy("moe", "few-flips"),
    "moe-base-r3": Toy("moe", "few-flips-r3"),
    "moe-thinking": Toy("moe", "bf16-stale-1"),
    "dense-base": Toy("long", "bf16-stale-1"),
    "moe-base-lora": Toy("moe", "bf16", ("lora.rank=8", "lora.alpha=16", "optimizer.lr=2e-3")),
    "sensitivity": Toy("moe", "stale-8"),
    "rlhf-gemma": Toy("long", "bf16"),
    "rlhf-hh": Toy("rare", "bf16"),
    "rlhf-ultrafeedback": Toy("rare", "stale-8"),
    "octothinker": Toy("long", "none"),
    "arc-1d": Toy("rare", "none"),
    "acre": Toy("moe", "none"),
    "sudoku": Toy("long", "stale-1"),
}
"""Experiment of the paper -> its toy."""


@dataclass(frozen=True)
class ToyRun:
    """A toy run: the toy of an experiment under the rule of a figure's run."""

    toy: Toy
    words: tuple[str, ...]

    @classmethod
    def of(cls, run: Run) -> ToyRun:
        """Return the toy run for a run of a figure. It has the run's overrides of the algorithm and of Top-K."""
        kept = [word for word in run.words if word.startswith(("algorithm.", "rollout.topk"))]
        return cls(TOYS[run.experiment], tuple(kept))

    @property
    def directory(self) -> Path:
        """The run's folder. Figures with the same runs share it."""
        words = [last_word(word) for word in (*self.toy.changes, *self.words)]
        return ROOT / "-".join([self.toy.task, self.toy.mismatch, *words])


def make(runs: Sequence[ToyRun], processes: int = 2) -> None:
    """Make the runs that are missing, each in a process of its own. Raises RuntimeError if a run fails."""
    missing = [run for run in dict.fromkeys(runs) if not (run.directory / RECORDS_FILE).is_file()]
    if not missing:
        return
    make_material(dict.fromkeys(run.toy.task for run in missing))
    faults = []
    with progress("toy runs", len(missing)) as bar:
        for run, seconds, fault in forked(_train, missing, processes):
            if fault is not None:
                faults.append(f"{run.directory}: {fault}")
                print(faults[-1], file=sys.stderr)
            bar.update(note=f"{run.directory.name} in {seconds:.0f} s")
            bar.advance()
    if faults:
        raise RuntimeError("; ".join(faults))


def _train(run: ToyRun) -> None:
    """Train, and write the run's files. The metrics come last: with them the run counts as made."""
    torch.set_num_threads(1)
    task, mismatch = TASKS[run.toy.task](), MISMATCHES[run.toy.mismatch]
    rate = f"optimizer.lr={RATES[run.toy.task]}"
    changes = [f"run.steps={STEPS}", rate, *run.toy.changes, *run.words]
    lab = Lab(configured(task, mismatch, changes), task, mismatch)
    run.directory.mkdir(parents=True, exist_ok=True)
    _write_tokens(lab, run.directory / TOKENS_FILE)
    metrics, masked = [], []
    policy = PolicyCopy(task.checkpoint, MISMATCHES["none"])
    for step in range(STEPS):
        row: dict[str, float] = {"step": step}
        if step % EVALUATION_EVERY == 0:
            policy.update(lab.weights())
            row |= _accuracies(policy, task)
        metrics.append({**row, **lab.step()})
        masked.append({"step": step, "tokens": lab.learner.most_masked})
    _write_lines(run.directory / MASKED_TOKENS_FILE, masked)
    _write_lines(run.directory / RECORDS_FILE, metrics)


def _accuracies(policy: PolicyCopy, task: Task) -> dict[str, float]:
    """Return the mean reward of each evaluation set, with one response to each of its problems."""
    accuracies = {}
    generator = torch.Generator().manual_seed(0)
    prompt_length = task.prompts.shape[1]
    for number, name in enumerate(EVALUATION_SETS):
        first = number * EVALUATED_PROBLEMS
        problems = torch.arange(first, first + EVALUATED_PROBLEMS) % len(task.prompts)
        sampled = policy.sample(task.prompts[problems], task.tokens, task.end, 0, generator)
        rewards = []
        for problem, ids in zip(problems.tolist(), sampled.ids, strict=True):
            response = ids[prompt_length:]
            ends = (response == task.end).nonzero()[0]
            length = int(ends[0]) + 1 if len(ends) else len(response)
            rewards.append(task.reward(problem, response[:length]))
        accuracies[accuracy(name)] = sum(rewards) / len(rewards)
    return accuracies


def _write_tokens(lab: Lab, path: Path) -> None:
    pi, mu = lab.probabilities()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["mu", "ratio", "binary_tv"])
        for pi_value, mu_value in zip(pi.tolist(), mu.tolist(), strict=True):
            writer.writerow([mu_value, pi_value / mu_value, abs(pi_value - mu_value)])


def _write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
