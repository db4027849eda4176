"""Compute what another algorithm would have blocked in a run, or train on its saved batches again and compare.

    megatron-dppo replay runs/demo --algorithm cppo-binary-tv --json blocked.json --html blocked.html
    megatron-dppo replay runs/demo --derive

Both commands need the batches that ``rollout.save=true`` keeps. Without ``--derive``, the command applies the mask of
another algorithm to every token, with the log pi and log mu that the loss of the token's step used. The responses and
pi stay the run's own. This is a limit of the comparison: if the other algorithm had trained the run, responses and pi
would differ from the second optimiser step on.

With ``--derive``, the command trains on the saved batches again from the first step, with the run's own configuration,
in the folder ``derived`` of the run. It compares the hash of the weights after each step with the hash in the batch's
seal. This needs the run's parallel layout, and a deterministic device, such as a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.loading import load_config
from megatron_dppo.diagnostics.explain.__main__ import (
    algorithm_arguments,
    chosen_algorithm,
    run_batch_command,
    show_facts,
)
from megatron_dppo.diagnostics.pages import SummaryTable
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import (
    CONFIG_FILE,
    ROLLOUTS_FOLDER,
    read_records,
    saved_batch_steps,
    step_of,
)
from megatron_dppo.system.arguments import count_or_zero, file_to_write

if TYPE_CHECKING:
    from megatron_dppo.algorithms.algorithm import Algorithm
DERIVED = "derived"
"""Name of the derivation's folder in the run's folder."""


@dataclass(frozen=True)
class BlockedToken:
    """A token that at least one of two algorithms blocks: the run's algorithm or the other algorithm.

    ``response`` is the response's position in the batch; ``mu`` and ``pi`` are probabilities.
    """

    response: int
    position: int
    token_id: int
    advantage: float
    mu: float
    pi: float
    run_blocks: bool
    other_blocks: bool


@dataclass(frozen=True)
class ComparedStep:
    """The decisions of two algorithms about the tokens of ``step``: the run's algorithm and the other algorithm.

    ``trained`` is the number of tokens of the responses that were trained on. ``tokens`` has only the tokens that at
    least one of the two algorithms blocks.
    """

    step: int
    trained: int
    tokens: Sequence[BlockedToken]

    def count(self, *, run: bool, other: bool) -> int:
        """Count the tokens whose ``run_blocks`` equals ``run`` and whose ``other_blocks`` equals ``other``."""
        return sum((t.run_blocks, t.other_blocks) == (run, other) for t in self.tokens)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's directory (run.directory)")
    parser.add_argument(
        "--step", type=count_or_zero, help="only this step; with --derive: the last step"
    )
    algorithm_arguments(parser)
    parser.add_argument("--json", type=file_to_write, help="write every blocked token here")
    parser.add_argument("--html", type=file_to_write, help="write a page here")
    parser.add_argument("--derive", action="store_true", help="train on the saved batches again")
    parser.set_defaults(limit=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if a derived step has other weights, or 2 if the input cannot be used."""
    options = parse(arguments)
    return run_batch_command(derive if options.derive else compare, options)


def compare(options: argparse.Namespace) -> None:
    """Apply the other algorithm to the saved batches, and print and write the result."""
    config = load_config(options.run / CONFIG_FILE)
    metric_names.add_metrics(config.tracking.metrics)
    trained_with = config.algorithm
    # Check the steps before torch is imported: the import takes seconds.
    replayable_steps = trained_steps(options.run, saved_batch_steps(options.run / ROLLOUTS_FOLDER))
    if options.step is not None and options.step not in replayable_steps:
        raise ValueError(
            f"--step {options.step}: saved and trained on are {replayable_steps[0]} to {replayable_steps[-1]}"
        )
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.diagnostics.explain import page

    algorithm = build_algorithm(*chosen_algorithm(options, trained_with))
    chosen_steps = replayable_steps
    if options.step is not None:
        chosen_steps = [options.step]
    compared_steps = [compare_step(options.run, step, algorithm) for step in chosen_steps]
    title = f"{options.run}: {trained_with.name} trained, {algorithm.name} replayed"
    numbers = ", ".join(f"{name} {value:g}" for name, value in algorithm.numbers.items())
    facts = [
        f"{algorithm.name}: {numbers}",
        "The tokens are the run's own responses, with pi and mu as each step's loss computed them.",
    ]
    tables = [
        step_table(compared_steps, trained_with.name, algorithm.name),
        *sign_tables(compared_steps),
    ]
    console = show_facts(title, facts, width=160)
    for table in tables:
        table.show(console)
    if options.json:
        content = {
            "run": str(options.run),
            "trained": trained_with.name,
            "replayed": algorithm.name,
            "numbers": {name: f"{value:g}" for name, value in algorithm.numbers.items()},
            "steps": [asdict(step) for step in compared_steps],
        }
        options.json.write_text(json.dumps(content), encoding="utf-8")
        print(f"{options.json}: every blocked token")
    if options.html:
        options.html.write_text(page.tables_page(title, facts, tables), encoding="utf-8")
        print(f"{options.html}: the tables as a page")


def trained_steps(run: Path, saved: Sequence[int]) -> list[int]:
    """Return the ``saved`` steps that have a row in the run's metrics: only their batches were trained on.

    A batch that ended the run was saved but not trained on, and batches of an earlier attempt may be in the folder too.
    Raises ValueError if no saved step has a row.
    """
    recorded_steps = {step_of(row) for row in read_records(run)}
    steps = [step for step in saved if step in recorded_steps]
    if not steps:
        raise ValueError(f"{run / ROLLOUTS_FOLDER}: the run trained on none of the batches in it")
    return steps


def compare_step(run: Path, step: int, algorithm: Algorithm) -> ComparedStep:
    """Compare the masks of two algorithms on the saved batch of ``step``: ``algorithm``, and the run's own algorithm.

    Raises ValueError if the batch lacks a value that the mask reads, or disagrees with the run's records of the step.
    """
    from megatron_dppo.data.batch_file import load_batch
    from megatron_dppo.diagnostics.explain.seen_step import SeenStep, check_agreement

    trained_with = load_config(run / CONFIG_FILE).algorithm
    seen_step = SeenStep.of(load_batch(run / ROLLOUTS_FOLDER, step), trained_with)
    check_agreement(seen_step, run, step)
    decisions = seen_step.decisions(algorithm)
    is_blocked_by_run = ~seen_step.trains
    is_blocked_by_other = ~decisions.trains
    # Response and position of each trained token, in the order of the rows of ``seen_step``.
    token_positions: list[tuple[int, int]] = []
    for response, count in zip(seen_step.positions, seen_step.counts, strict=True):
        token_positions += [(response, position) for position in range(count)]
    inputs = seen_step.inputs
    tokens: list[BlockedToken] = []
    for row in (is_blocked_by_run | is_blocked_by_other).nonzero().flatten().tolist():
        response, position = token_positions[row]
        token = BlockedToken(
            response=response,
            position=position,
            token_id=int(seen_step.token_ids[row]),
            advantage=float(inputs.advantages[row]),
            mu=float(inputs.rollout_log_probs[row].exp()),
            pi=float(inputs.log_probs[row].exp()),
            run_blocks=bool(is_blocked_by_run[row]),
            other_blocks=bool(is_blocked_by_other[row]),
        )
        tokens.append(token)
    return ComparedStep(step, len(token_positions), tokens)


def step_table(steps: Sequence[ComparedStep], run: str, other: str) -> SummaryTable:
    """Return the table of blocked tokens, with a row for each step and one for all steps.

    ``run`` and ``other`` are the names of the two algorithms.
    """

    def row(name: str, row_steps: Sequence[ComparedStep]) -> tuple[str, ...]:
        trained = sum(step.trained for step in row_steps)
        both = sum(step.count(run=True, other=True) for step in row_steps)
        only_run = sum(step.count(run=True, other=False) for step in row_steps)
        only_other = sum(step.count(run=False, other=True) for step in row_steps)
        run_share = f"{(both + only_run) / trained:.3%}"
        other_share = f"{(both + only_other) / trained:.3%}"
        counts = (str(both), str(only_run), str(only_other))
        return name, str(trained), run_share, other_share, *counts

    if run == other:
        # The same algorithm is replayed with other numbers: make the names different.
        run = f"{run} (run)"
        other = f"{other} (replayed)"
    columns = ("step", "tokens", run, other, "both block", f"only {run}", f"only {other}")
    rows = [row(str(step.step), [step]) for step in steps]
    note = (
        f"tokens: trained tokens of the step; {run}, {other}: share that each rule blocks; then how many tokens both "
        "rules block, and how many one rule alone."
    )
    return SummaryTable("Blocked tokens", columns, [*rows, row("all", steps)], note)


_POSITIVE, _NEGATIVE, _ZERO = "A > 0", "A < 0", "A = 0"


def sign_tables(steps: Sequence[ComparedStep]) -> Iterator[SummaryTable]:
    """Yield a table for each of the two algorithms, about the tokens that only this algorithm blocks.

    A row has the number of tokens with one sign of A, their mean mu and their mean pi.
    """
    tokens: list[BlockedToken] = []
    for step in steps:
        tokens += step.tokens
    for title, by_run in (
        ("Only the run's rule blocks", True),
        ("Only the other rule blocks", False),
    ):
        tokens_by_sign: dict[str, list[BlockedToken]] = {_POSITIVE: [], _NEGATIVE: [], _ZERO: []}
        for t in tokens:
            if (t.run_blocks, t.other_blocks) == (by_run, not by_run):
                tokens_by_sign[_sign_text(t.advantage)].append(t)
        rows: list[tuple[str, ...]] = []
        for sign_text, group in tokens_by_sign.items():
            if group:
                mean_mu = fmean(t.mu for t in group)
                mean_pi = fmean(t.pi for t in group)
                rows.append((sign_text, str(len(group)), f"{mean_mu:.4f}", f"{mean_pi:.4f}"))
        note = (
            "by the sign of the advantage A; mean mu, mean pi: the tokens' mean probability by engine and trainer. "
            "A token of A = 0 has no gradient, so nothing is lost."
        )
        yield SummaryTable(title, ("", "tokens", "mean mu", "mean pi"), rows, note)


def _sign_text(advantage: float) -> str:
    if advantage > 0:
        return _POSITIVE
    if advantage < 0:
        return _NEGATIVE
    return _ZERO


def derive(options: argparse.Namespace) -> None:
    """Train on the saved batches again and compare the weights. Exit with 1 if a step ends in other weights."""
    config = load_config(options.run / CONFIG_FILE)
    last_step = last_step_to_derive(options.run, options.step)
    directory = options.run / DERIVED
    command = [
        *(sys.executable, "-m", "megatron_dppo.train", str(options.run / CONFIG_FILE)),
        *derivation_overrides(config.data.evaluation, options.run, last_step),
    ]
    print(f"deriving steps 1 to {last_step} of {options.run} in {directory}")
    # The derivation writes into its own folder, and leaves the run's checkpoints as they are.
    code = subprocess.run(command, check=False).returncode
    if code:
        raise ValueError(f"the derivation ended with exit code {code}; its output is above")
    equal_steps: set[int] = set()
    for row in read_records(directory):
        if row.get(metric_names.REDERIVED) == 1.0:
            equal_steps.add(step_of(row))
    different_steps = [step for step in range(1, last_step + 1) if step not in equal_steps]
    print(f"{last_step - len(different_steps)} of {last_step} steps derived again, bit for bit")
    if different_steps:
        print(
            f"step {different_steps[0]} is the first that ends in other weights: another layout, machine, number of "
            "threads or version, or a device that sums in no fixed order"
        )
        sys.exit(1)


def last_step_to_derive(run: Path, step: int | None) -> int:
    """Return the last step to derive: ``step``, or the last step that was trained on.

    Raises ValueError unless the batch of every step up to this step was saved, with the hash of the weights after the
    step.
    """
    folder = run / ROLLOUTS_FOLDER
    saved = saved_batch_steps(folder)
    from megatron_dppo.data.batch_file import SavedBatch

    last_step = trained_steps(run, saved)[-1] if step is None else step
    needed_steps = range(1, last_step + 1)
    missing_steps = sorted(set(needed_steps) - set(saved))
    # ``--step 0`` needs no step: it is refused too.
    if missing_steps or not needed_steps:
        missing_step = last_step
        if missing_steps:
            missing_step = missing_steps[0]
        raise ValueError(
            f"{folder}: no batch of step {missing_step}, expected one of every step from 1 to {last_step}: a run is "
            "derived from its first step on; start it with rollout.save=true"
        )
    for number in needed_steps:
        seal = SavedBatch(folder, number).seal
        if seal is None or number not in seal.weights:
            raise ValueError(
                f"{folder}: the batch of step {number} has no seal with the hash of the weights after it: it was not "
                "trained on, or an earlier version saved it"
            )
    return last_step


def derivation_overrides(evaluation_sets: Iterable[str], run: Path, last_step: int) -> list[str]:
    """Return overrides of the run's configuration that let the batches of steps 1 to ``last_step`` replace the engine.

    The overrides turn off evaluation, samples, exports, uploads, profiles and trackers.
    """
    values: dict[str, Any] = {
        "run.directory": run / DERIVED,
        "run.resume": "never",
        "run.steps": last_step,
        "run.show_sample_every": 0,
        "rollout.replay_from": run / ROLLOUTS_FOLDER,
        "rollout.save": "false",
        "rollout.max_staleness": 0,
        "rollout.interrupt": "drain",
        "engine.placement": "separate",
        "checkpoint.every": last_step,
        "checkpoint.keep": 1,
        "checkpoint.export_hf": "false",
        "checkpoint.upload": "null",
        "profile.steps": "[]",
        "tracking.trackers": "[]",
    }
    # Set each evaluation set of the configuration file to null: only null removes it.
    evaluation = [f"data.evaluation.{name}=null" for name in evaluation_sets]
    return [*(f"{key}={value}" for key, value in values.items()), *evaluation]


if __name__ == "__main__":
    sys.exit(main())
