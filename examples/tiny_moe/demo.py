"""``make demo``: make the material, train by DPPO, and say what came of it.

    python -m examples.tiny_moe.demo [--seed N] [--directory runs/demo] [key.path=value ...]

An interrupted demo goes on where it stopped; a finished one is set aside and a new one starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.tiny_moe.prepare import prepare

CONFIG = "examples/tiny_moe/config.yaml"
FLAGS = {"run.directory": "--directory", "run.seed": "--seed"}
CONSOLE = Console(highlight=False)


def main() -> int:
    """Exit code of the training run, or 1 where the summary tells of a broken promise."""
    parser = _parser()
    words = parser.parse_intermixed_args()
    for override in words.overrides:
        flag = FLAGS.get(override.partition("=")[0])
        if flag:
            parser.error(f"{override}: give {flag} instead, which the material depends on too")
    started = time.monotonic()
    material = prepare(seed=words.seed)
    directory = Path(words.directory)
    set_aside_finished(directory)
    command = [
        *(sys.executable, "-m", "megatron_dppo.train", CONFIG),
        f"run.directory={directory}",
        f"run.seed={words.seed}",
        f"model.hf_checkpoint={material.warm_checkpoint}",
        f"data.train={material.train}",
        f"data.evaluation.held_out={material.held_out}",
        *words.overrides,
    ]
    CONSOLE.print(f"[demo] {' '.join(['python', *command[1:]])}", soft_wrap=True, markup=False)
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    summary = json.loads((directory / "summary.json").read_text())
    show(summary, directory, time.monotonic() - started)
    return 0


def set_aside_finished(directory: Path) -> None:
    """Rename the folder of a demo that ran to its end, so that nothing of it is lost."""
    if not (directory / "summary.json").exists():
        return
    kept = directory.with_name(f"{directory.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    directory.rename(kept)
    CONSOLE.print(f"[demo] the finished run in {directory} is now {kept}", markup=False)


def show(summary: dict, directory: Path, seconds: float) -> None:
    """The run in a table: what was measured, and what is expected of it."""
    updates = f"{summary['weight_updates_verified']} of {summary['weight_updates']}"
    rows = [
        ("held-out accuracy", _arrow(summary, "eval_accuracy"), "up by 0.25 or more"),
        ("training reward", _arrow(summary, "train_reward"), "rises"),
        ("mean |pi - mu| at equal weights", _small(summary["mean_abs_prob_gap"]), "1e-4 or less"),
        ("weight updates verified", updates, f"all; {summary['steps'] + 1} or more"),
        (
            "export against trainer, nats",
            _small(summary["hf_export_max_logprob_diff"]),
            "1e-4 or less",
        ),
        ("layout", summary["layout"], ""),
        ("seconds, set-up excluded", f"{seconds:.0f}", "600 or less on two quiet cores"),
    ]
    table = Table(
        "", "measured", "expected", title=f"{summary['algorithm']}, {summary['steps']} steps"
    )
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)
    CONSOLE.print(
        f"figures: {directory}/report.png   model: {directory}/hf   TensorBoard: {directory}/tensorboard"
    )


def _arrow(summary: dict, key: str) -> str:
    start, end = summary[f"{key}_start"], summary[f"{key}_end"]
    return f"{_digits(start)} -> {_digits(end)}"


def _digits(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _small(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_moe.demo",
        description="Train a tiny mixture of experts by DPPO on this machine, without a GPU.",
    )
    parser.add_argument("--seed", type=int, default=1, help="of model, data order and sampling")
    parser.add_argument("--directory", default="runs/demo", help="where the run goes")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="of the recipe's values"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
