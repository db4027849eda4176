"""Train a tiny mixture of experts on this machine.

The demo prepares model and data, trains with DPPO and compares the results with targets. ``make demo`` runs this
command::

    megatron-dppo demo [--task sums|distillation|calculator|python] [--seed N] [--directory runs/demo] \\
        [key.path=value ...]

An interrupted demo resumes. The folder of a finished demo is renamed, and a new demo starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_dppo import EXAMPLES
from megatron_dppo.config import load_config
from megatron_dppo.config.machine import this_machine
from megatron_dppo.demo.material import (
    EXPORT_BOUNDS,
    TASKS,
    engine_overrides,
    prepare,
    run_to_the_end,
    trainer_overrides,
)
from megatron_dppo.environments import check_environment
from megatron_dppo.launch.arguments import add_overrides
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import (
    BATCH_FILES,
    CONFIG_FILE,
    ROLLOUTS_FOLDER,
    SUMMARY_FILE,
    read_records,
    series,
)
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.metrics.samples import TRAINING, console_lines, read_samples
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.metrics.verdict import VerdictRow, verdict_table
from megatron_dppo.system.arguments import count_or_zero
from megatron_dppo.system.files import rename_with_time
from megatron_dppo.system.secret_variables import hide_secrets
from megatron_dppo.system.yaml_core import parse_yaml

RECIPES = EXAMPLES / "tiny_moe"
FLAGS = {"run.directory": "--directory", "run.seed": "--seed"}
CONSOLE = Console(highlight=False)
KEPT_BATCHES = "rollout.save=true"
"""Setting that saves batches for ``explain``, ``doctor`` and ``replay``: 16 MB in 40 steps."""
SECONDS = "seconds, installation excluded"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code of the training, or 1 if a result misses its target."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    hide_secrets()
    for override in options.overrides:
        flag = FLAGS.get(override.partition("=")[0])
        if flag:
            parser.error(f"{override}: give {flag} instead, because the material depends on it too")
    start_time = time.monotonic()
    task = TASKS[options.task]
    recipe = RECIPES / task.recipe
    gpus = this_machine().gpus
    overrides = [
        KEPT_BATCHES,
        *trainer_overrides(gpus),
        *engine_overrides(gpus),
        *options.overrides,
    ]
    try:
        # Check the overrides first: making the material takes minutes.
        config = load_config(recipe, overrides)
        check_environment(config.environment.name, config.environment.options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    material = prepare(options.seed, overrides=trainer_overrides(gpus), task=options.task)
    directory = Path(options.directory)
    set_aside(directory, options.seed, options.overrides, recipe)
    teacher = []
    if task.has_teacher:
        teacher = [f"distillation.teachers.dense.hf_checkpoint={material.teacher}"]
    command = [
        sys.executable,
        "-m",
        "megatron_dppo.train",
        str(recipe),
        f"run.directory={directory}",
        f"run.seed={options.seed}",
        f"model.hf_checkpoint={material.warm_checkpoint}",
        f"data.train={material.train}",
        f"data.evaluation.held_out={material.held_out}",
        *teacher,
        *overrides,
    ]
    shown_command = " ".join(["python", *command[1:]])
    CONSOLE.print(f"[demo] {shown_command}", soft_wrap=True, markup=False)
    code = run_to_the_end(command)
    if code:
        return code
    summary = json.loads((directory / SUMMARY_FILE).read_text())
    dtype = parse_yaml((directory / CONFIG_FILE).read_text())["model"]["dtype"]
    results = judge(summary, load_config(recipe, ()).run.steps, dtype, task.gain)
    target = f"{task.longest_s} or less on two quiet cores"
    seconds = VerdictRow(SECONDS, f"{time.monotonic() - start_time:.0f}", target)
    show([*results, seconds], summary, directory)
    CONSOLE.print(verdict(results), soft_wrap=True, markup=False)
    CONSOLE.print("\n".join(next_commands(directory)), soft_wrap=True, markup=False)
    return int(any(result.holds is False for result in results))


def set_aside(
    directory: Path, seed: int, overrides: Sequence[str], recipe: Path = RECIPES / "config.yaml"
) -> None:
    """Rename the folder of a demo that is finished, or that has another seed, algorithm or task."""
    config = directory / CONFIG_FILE
    if not config.exists():
        return
    earlier_config = parse_yaml(config.read_text())
    new_config = load_config(recipe, overrides)
    is_same_demo = _identity(earlier_config) == (
        seed,
        new_config.algorithm.name,
        new_config.environment.name,
    )
    is_finished = (directory / SUMMARY_FILE).exists()
    if is_same_demo and not is_finished:
        return
    renamed = rename_with_time(directory)
    old_run = "run of another seed, algorithm or task"
    if is_finished:
        old_run = "finished run"
    CONSOLE.print(f"[demo] the {old_run} in {directory} is now {renamed}", markup=False)


def _identity(config: Mapping[str, Any]) -> tuple[int, str, str | None]:
    """Return the seed, the algorithm and the environment. (The task determines the environment.)"""
    environment = config.get("environment", {}).get("name")
    return config["run"]["seed"], config["algorithm"]["name"], environment


def judge(
    summary: Mapping[str, Any], recipe_steps: int, dtype: Dtype = "float32", gain: float = 0.25
) -> list[VerdictRow]:
    """Compare the run with the demo's targets; accuracy is judged only after all recipe steps."""
    gap_bound = BY_METRIC[metric_names.GAP_ON_POLICY].upper(dtype)
    export_bound = EXPORT_BOUNDS[dtype]
    gap = summary["mean_abs_prob_gap"]
    difference = summary["hf_export_max_logprob_diff"]
    updates = summary["weight_updates"]
    verified = summary["weight_updates_verified"]
    start = summary["eval_accuracy_start"]
    end = summary["eval_accuracy_end"]
    steps = summary["steps"]
    is_measured = start is not None and end is not None
    has_learned = None
    if is_measured and steps >= recipe_steps:
        has_learned = end - start >= gain
    # The engine gets the weights before the first step and after each step.
    are_all_verified = verified == updates and updates >= steps + 1
    return [
        VerdictRow(
            "held-out accuracy",
            _change(summary, "eval_accuracy"),
            f"up by {gain} or more",
            has_learned,
        ),
        VerdictRow("training reward", _change(summary, "train_reward"), "rises"),
        VerdictRow(
            "|pi - mu| at equal weights",
            _scientific(gap),
            f"{gap_bound:.0e} or less",
            _at_most(gap, gap_bound),
        ),
        VerdictRow(
            "weight updates verified",
            f"{verified} of {updates}",
            f"all; {steps + 1} or more",
            are_all_verified,
        ),
        VerdictRow(
            "export against trainer, nats",
            _scientific(difference),
            f"{export_bound:.0e} or less",
            _at_most(difference, export_bound),
        ),
    ]


def verdict(results: Sequence[VerdictRow]) -> str:
    """Return one line: whether the policy has learned and every target is met."""
    missed = [_comparison(result) for result in results if result.holds is False]
    if missed:
        return f"FAILED: {'; '.join(missed)}"
    accuracy = results[0]
    if accuracy.holds is None:
        return f"not judged, because evaluations or steps are missing: {_comparison(accuracy)}"
    return f"learned: {_comparison(accuracy)}"


def _comparison(result: VerdictRow) -> str:
    return f"{result.label} {result.measured}, expected {result.expected}"


def show(results: Sequence[VerdictRow], summary: Mapping[str, Any], directory: Path) -> None:
    """Print the results as a table, and the paths of the run's files."""
    steps, turns = series(read_records(directory), metric_names.TURNS)
    has_turns = max(turns, default=1.0) > 1
    turns_text = "1"
    if has_turns:
        turns_text = f"{turns[0]:.2f} -> {turns[-1]:.2f}"
    rows = [
        *results,
        VerdictRow("turns of an episode", turns_text, ""),
        VerdictRow("layout", summary["layout"], ""),
    ]
    title = f"{summary['algorithm']}, {summary['steps']} steps"
    CONSOLE.print(verdict_table(title, rows))
    if has_turns:
        show_conversations(directory, steps[0], steps[-1])
    results_of_run = {"figures": "report.png", "model": "hf", "events": "tensorboard"}
    for label, name in results_of_run.items():
        CONSOLE.print(f"{label}: {directory / name}", soft_wrap=True)


def next_commands(directory: Path) -> list[str]:
    """Return a line for each command that shows more of the run in ``directory``.

    Without saved batches, commands that read them are left out.
    """
    program = Path(sys.executable).with_name("megatron-dppo")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    commands = {
        f"samples {directory} --wrong": "what the model says",
        f"watch {directory}": "the run in the browser",
    }
    if list((directory / ROLLOUTS_FOLDER).glob(BATCH_FILES)):
        commands |= {
            f"explain {directory}": "which tokens of the last batch the mask blocks, and why",
            f"doctor {directory}": "whether engine and trainer agree about that batch, and if not, why",
            f"replay {directory} --algorithm grpo-clip-higher": "what another rule would have blocked",
        }
    width = max(map(len, commands))
    lines = ["next:"]
    for command, purpose in commands.items():
        lines.append(f"  {program} {command:{width}}  {purpose}")
    return lines


def show_conversations(directory: Path, *steps: int) -> None:
    """Print two whole training samples of each step."""
    training_samples = [sample for sample in read_samples(directory) if sample.set == TRAINING]
    for step in steps:
        samples_of_step = [sample for sample in training_samples if sample.step == step]
        for sample in samples_of_step[:2]:
            CONSOLE.print("\n".join(console_lines(sample)), markup=False)


def _at_most(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound


def _change(summary: Mapping[str, Any], key: str) -> str:
    """Return the values of ``key`` at the start and at the end of the run, as text."""
    start = summary[f"{key}_start"]
    end = summary[f"{key}_end"]
    return f"{_digits(start)} -> {_digits(end)}"


def _digits(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3f}"


def _scientific(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.1e}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo demo",
        description="Train a tiny mixture of experts by DPPO on this machine, on its GPUs if it has any.",
    )
    parser.add_argument(
        "--task", choices=TASKS, default="sums", help="what the model learns (sums)"
    )
    parser.add_argument(
        "--seed", type=count_or_zero, default=1, help="seed of model, data order and sampling (1)"
    )
    parser.add_argument("--directory", default="runs/demo", help="folder of the run (runs/demo)")
    add_overrides(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
