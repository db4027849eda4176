"""Report on the mismatch of one saved batch: mean |pi - mu| of engine and trainer, by cause.

    megatron-dppo mismatch runs/demo --step 1 --json gap.json --png gap.png

The run must have been started with ``rollout.save=true``. mu are the probabilities that the engine
returned with the batch; pi is recomputed by the run's trainer in this process, with one more cause
fixed in each pass:

    nothing fixed        the weights of --policy, logits as they are, natural routing
    sampling transform   logits divided by rollout.temperature, as the engine does
    staleness            the weights that sampled the batch (--rollout-policy)
    routing              experts as the engine recorded them (needs rollout.router_replay=true)
    precision            the trainer in float32 (where the run is not, and not with --no-precision)

The decrease of mean |pi - mu| by a fix is that cause's part; the rest before ``precision`` is
numerics. A cause that is not possible in this run has no row.

The batch of step N was sampled by the weights after step N - 1 (or N - 2 with
rollout.max_staleness=1); of step 1 by the model that the run began with, which is the default there.
Both policies are Hugging Face folders; of a run's checkpoint this makes one:

    megatron-dppo convert megatron-to-hf --megatron RUN/checkpoints/step_000003 \\
        --hf-config MODEL --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from megatron_dppo.config.loading import load_config
from megatron_dppo.data.batch_commands import batch_parser, run_batch_command, show_facts

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.mismatch.ladder import Measured


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = batch_parser("mismatch", str(__doc__), step="first", limit=256)
    parser.add_argument(
        "--rollout-policy", type=Path, metavar="FOLDER",
        help="the weights that sampled the batch; default for step 1: model.hf_checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--policy", type=Path, metavar="FOLDER",
        help="the trainer's weights now; default: RUN/hf, or the rollout policy where that lacks",
    )  # fmt: skip
    parser.add_argument(
        "--no-precision", dest="precision", action="store_false",
        help="no pass in float32, for which Transformer Engine has no attention of packed sequences",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--png", type=Path, help="draw parts, ratio and TV against mu here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns 0, or 2 if the input cannot be used."""
    options = parse(arguments)
    # Read when torch is imported, which is later.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_batch_command(report, options)


def report(options: argparse.Namespace) -> None:
    """Read the batch, measure every pass, write the requested files."""
    from megatron_dppo.data.batch_file import saved_step
    from megatron_dppo.metrics.progress import progress
    from megatron_dppo.mismatch.figure import draw
    from megatron_dppo.mismatch.ladder import measure, parts, rollout_log_probs, rungs, trainer_of

    config = load_config(options.run / "config.yaml")
    folder = options.run / "rollouts"
    step = saved_step(folder, options.step, default=0)
    batch, whole = chosen_responses(folder, step, options.limit)
    rollout_policy, policy = policies(options, Path(config.model.hf_checkpoint), step)
    recorded = any("routed_experts" in t.columns for t in batch)
    ladder = rungs(
        config.model.dtype,
        config.temperature,
        rollout_policy=rollout_policy,
        policy=policy,
        recorded=recorded,
        precision=options.precision,
    )
    measured = []
    with progress("measuring", len(ladder)) as bar:
        build = partial(trainer_of, config, batch)
        for rung in measure(ladder, build, config.training.micro_batch_tokens, batch):
            measured.append(rung)
            bar.advance()
    split = parts(measured)
    log_mu = rollout_log_probs(batch)
    title = f"Mismatch of {options.run}, batch of step {step}"
    facts = [
        f"{len(batch)} of {whole} responses, {len(log_mu)} tokens; {config.model.dtype}, "
        f"temperature {config.temperature:g}",
        f"sampled by {rollout_policy}, now {policy}",
        routing_fact(measured, recorded=recorded),
    ]
    show(title, facts, measured, split)
    if options.json:
        figures = {
            "step": step, "responses": len(batch), "tokens": len(log_mu), "parts": split,
            "rungs": [m.as_json() for m in measured],
        }  # fmt: skip
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"{options.json}: every figure")
    if options.png:
        draw(options.png, title, split, measured, log_mu.numpy())
        print(f"{options.png}: the parts, and ratio and TV against mu")


def chosen_responses(folder: Path, step: int, limit: int) -> tuple[list[Trajectory], int]:
    """The first ``limit`` responses (0: all) with a token, and the size of the batch."""
    from megatron_dppo.data.batch_file import load_batch

    batch = load_batch(folder, step)
    useful = [trajectory for trajectory in batch if trajectory.sampled]
    if not useful:
        raise ValueError(f"{folder}: the batch of step {step} has no response token")
    return (useful[:limit] if limit else useful), len(batch)


def policies(options: argparse.Namespace, start: Path, step: int) -> tuple[Path, Path]:
    """The folders of the weights that sampled the batch and of the trainer's weights now. ``start``: of the model that
    the run began with.
    """
    rollout_policy = options.rollout_policy
    if rollout_policy is None:
        if step != 1:
            raise ValueError(
                f"--rollout-policy is missing: only the batch of step 1 was sampled by the model "
                f"that the run began with, and this one is of step {step}"
            )
        rollout_policy = start
    exported = options.run / "hf"
    policy = options.policy or (exported if exported.is_dir() else rollout_policy)
    for folder in (rollout_policy, policy):
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: expected a Hugging Face folder, found no config.json")
    return rollout_policy, policy


def routing_fact(measured: Sequence[Measured], *, recorded: bool) -> str:
    if not recorded:
        return "no recorded routing in this batch: what routing does is part of the numerics"
    agreement = next(m.agreement for m in measured if m.agreement is not None)
    return f"at the rollout's weights {100 * agreement:.2f}% of tokens x layers route as the engine"


def show(
    title: str, facts: Sequence[str], measured: Sequence[Measured], split: dict[str, float]
) -> None:
    """Print facts and both tables."""
    console = show_facts(title, facts, width=120)
    ladder = Table(title="pi with one more cause fixed in each row", title_justify="left")
    ladder.add_column("fixed")
    for name in ("mean |pi-mu|", "99%", "max", "pi/mu 1% .. 99%", "moved pi by"):
        ladder.add_column(name, justify="right")
    for i, m in enumerate(measured):
        ladder.add_row(
            m.rung.fixes, _small(m.gap), _small(m.gap_p99), _small(m.gap_max),
            f"{m.ratio_low:.4f} .. {m.ratio_high:.4f}", _small(m.moved) if i else "",
        )  # fmt: skip
    console.print(ladder)
    table = Table(title="What mean |pi-mu| is made of", title_justify="left")
    table.add_column("cause")
    table.add_column("part", justify="right")
    table.add_column("share", justify="right")
    total = measured[0].gap
    for cause, part in split.items():
        table.add_row(cause, _small(part), _share(part, total))
    table.add_row("all", _small(total), _share(total, total), style="bold")
    console.print(table)


def _small(value: float) -> str:
    return f"{value:.2e}"


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f}%" if total else ""


if __name__ == "__main__":
    sys.exit(main())
