"""Compute what another rule would have blocked in a run, or derive each step again.

    megatron-dppo replay runs/demo --algorithm cppo-binary-tv --json blocked.json --html blocked.html
    megatron-dppo replay runs/demo --derive

Both need the batches that ``rollout.save=true`` keeps. The first holds every token against another row of the table of
algorithms, with log pi and log mu as the loss of its step saw them. The responses are the run's own, and so is pi:
had the other rule trained the run, both would be others from the second optimiser step on.

``--derive`` trains anew from the first step on the saved batches, under the run's own configuration, into the folder
``derived`` beside them, and compares the hash of the weights after each step with the one in the batch's seal. It takes
the run's layout, and a device that computes alike each time: a CPU does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.loading import load_config
from megatron_dppo.diagnostics.explain.__main__ import (
    algorithm_arguments,
    chosen_algorithm,
    run_batch_command,
    show,
    show_facts,
)
from megatron_dppo.diagnostics.pages import SummaryTable
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import ROLLOUTS_FOLDER, read_records, saved_steps, step_of

if TYPE_CHECKING:
    from megatron_dppo.algorithms.policy_loss import Algorithm
DERIVED = "derived"
"""Folder under the run's."""


@dataclass(frozen=True)
class OtherToken:
    """A token that at least one of two rules blocks. ``mu``, ``pi``: probabilities. ``response``: in the batch."""

    response: int
    position: int
    token_id: int
    advantage: float
    mu: float
    pi: float
    run_blocks: bool
    other_blocks: bool


@dataclass(frozen=True)
class OtherStep:
    """Two rules on the tokens of ``step``; ``tokens``: those that a rule blocks. ``trained``: all of them."""

    step: int
    trained: int
    tokens: Sequence[OtherToken]

    def count(self, *, run: bool, other: bool) -> int:
        """Blocked tokens of these two verdicts."""
        return sum((t.run_blocks, t.other_blocks) == (run, other) for t in self.tokens)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's directory (run.directory)")
    parser.add_argument("--step", type=int, help="of this batch; with --derive: up to it")
    algorithm_arguments(parser)
    parser.add_argument("--json", type=Path, help="write every blocked token here")
    parser.add_argument("--html", type=Path, help="write a page here")
    parser.add_argument("--derive", action="store_true", help="derive each step again")
    parser.set_defaults(limit=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print; returns 0, 1 if a step was not derived alike, 2 if the input cannot be used."""
    options = parse(arguments)
    return run_batch_command(derive if options.derive else compare, options)


# --- another rule on the run's own tokens


def compare(options: argparse.Namespace) -> None:
    """Read the batches, decide anew, print and write."""
    trained_with = load_config(options.run / "config.yaml").algorithm
    # Before torch is imported, which takes seconds.
    saved = trained_steps(options.run, saved_steps(options.run / ROLLOUTS_FOLDER))
    if options.step is not None and options.step not in saved:
        raise ValueError(
            f"--step {options.step}: saved and trained on are {saved[0]} to {saved[-1]}"
        )
    from megatron_dppo.algorithms.policy_loss import build_algorithm
    from megatron_dppo.diagnostics.explain import page

    algorithm = build_algorithm(*chosen_algorithm(options, trained_with))
    steps = [
        other_step(options.run, step, algorithm)
        for step in ([options.step] if options.step is not None else saved)
    ]
    title = f"{options.run}: {trained_with.name} trained, {algorithm.name} replayed"
    numbers = ", ".join(f"{name} {value:g}" for name, value in algorithm.numbers.items())
    facts = [
        f"{algorithm.name}: {numbers}",
        "Of the run's own responses, with pi and mu as the loss of each step saw them.",
    ]
    tables = [by_step(steps, trained_with.name, algorithm.name), *by_sign(steps)]
    console = show_facts(title, facts, width=160)
    for table in tables:
        show(console, table)
    if options.json:
        content = {
            "run": str(options.run),
            "trained": trained_with.name,
            "replayed": algorithm.name,
            "numbers": {name: f"{value:g}" for name, value in algorithm.numbers.items()},
            "steps": [asdict(step) for step in steps],
        }
        options.json.write_text(json.dumps(content), encoding="utf-8")
        print(f"{options.json}: every blocked token")
    if options.html:
        options.html.write_text(page.tables_page(title, facts, tables), encoding="utf-8")
        print(f"{options.html}: the tables as a page")


def trained_steps(run: Path, saved: Sequence[int]) -> list[int]:
    """Those of ``saved`` that the run has a record of: a batch that ended it was kept and not trained on, and so were
    those of an earlier attempt. Raises ValueError where there is none."""
    recorded = {step_of(record) for record in read_records(run)}
    if not (trained := [step for step in saved if step in recorded]):
        raise ValueError(f"{run / ROLLOUTS_FOLDER}: no step was trained on a batch that is in it")
    return trained


def other_step(run: Path, step: int, algorithm: Algorithm) -> OtherStep:
    """What ``algorithm`` blocks of the saved batch of ``step``, beside the run's own.

    Raises ValueError where the batch lacks what its mask reads, or is not what the run recorded of the step.
    """
    from megatron_dppo.data.batch_file import load_batch
    from megatron_dppo.diagnostics.explain.seen_step import SeenStep, check_agreement

    trained_with = load_config(run / "config.yaml").algorithm
    seen = SeenStep.of(load_batch(run / ROLLOUTS_FOLDER, step), trained_with)
    check_agreement(seen, run, step)
    decided = seen.decisions(algorithm)
    by_run, by_other = ~seen.trains, ~decided.trains
    places = [
        (response, position)
        for response, count in zip(seen.positions, seen.counts, strict=True)
        for position in range(count)
    ]
    inputs = seen.inputs
    tokens = [
        OtherToken(
            response=places[row][0],
            position=places[row][1],
            token_id=int(seen.token_ids[row]),
            advantage=float(inputs.advantages[row]),
            mu=float(inputs.rollout_log_probs[row].exp()),
            pi=float(inputs.log_probs[row].exp()),
            run_blocks=bool(by_run[row]),
            other_blocks=bool(by_other[row]),
        )
        for row in (by_run | by_other).nonzero().flatten().tolist()
    ]
    return OtherStep(step, len(places), tokens)


def by_step(steps: Sequence[OtherStep], run: str, other: str) -> SummaryTable:
    """A row a step, and one of all."""

    def row(name: str, of: Sequence[OtherStep]) -> tuple[str, ...]:
        trained = sum(step.trained for step in of)
        both, only_run, only_other = (
            sum(step.count(run=by_run, other=by_other) for step in of)
            for by_run, by_other in ((True, True), (True, False), (False, True))
        )
        shares = [f"{count / trained:.3%}" for count in (both + only_run, both + only_other)]
        return name, str(trained), *shares, str(both), str(only_run), str(only_other)

    if run == other:
        # With other numbers.
        run, other = f"{run} (run)", f"{other} (replayed)"
    columns = ("step", "tokens", run, other, "both block", f"only {run}", f"only {other}")
    rows = [row(str(step.step), [step]) for step in steps]
    note = (
        f"tokens: trained ones of the step; {run}, {other}: share that each rule blocks; then how many both block, and "
        "how many one alone."
    )
    return SummaryTable("Blocked tokens", columns, [*rows, row("all", steps)], note)


def by_sign(steps: Sequence[OtherStep]) -> Iterator[SummaryTable]:
    """Of the tokens that one rule alone blocks: how many, how likely they were and became, by sign of A."""
    tokens = [token for step in steps for token in step.tokens]
    for title, by_run in (("Only the run's rule blocks", True), ("Only the other blocks", False)):
        rows = []
        # Where A = 0 nothing is lost: there is no gradient.
        for title_of_sign, sign in (("A > 0", 1), ("A < 0", -1), ("A = 0", 0)):
            alone = [
                t
                for t in tokens
                if (t.run_blocks, t.other_blocks) == (by_run, not by_run)
                and (t.advantage > 0) - (t.advantage < 0) == sign
            ]
            if alone:
                means = [
                    sum(v) / len(alone) for v in zip(*((t.mu, t.pi) for t in alone), strict=True)
                ]
                rows.append((title_of_sign, str(len(alone)), *(f"{mean:.4f}" for mean in means)))
        note = (
            "by the sign of the advantage A; mean mu, mean pi: the tokens' mean probability by engine and trainer. "
            "A token of A = 0 has no gradient, so nothing is lost."
        )
        yield SummaryTable(title, ("", "tokens", "mean mu", "mean pi"), rows, note)


# --- each step again, from the first weights on


def derive(options: argparse.Namespace) -> None:
    """Train on the saved batches and compare. Exits with 1 where a step ends in other weights."""
    config = load_config(options.run / "config.yaml")
    last = sealed_until(options.run, options.step)
    directory = options.run / DERIVED
    command = [
        *(sys.executable, "-m", "megatron_dppo.train", str(options.run / "config.yaml")),
        *derivation(config.data.evaluation, options.run, last),
    ]
    print(f"deriving steps 1 to {last} of {options.run} in {directory}")
    # A checkpoint of the run is in no danger: the derivation has a folder of its own.
    code = subprocess.run(command, check=False).returncode
    if code:
        raise ValueError(f"the derivation ended with exit code {code}; its output is above")
    alike = {step_of(r): r.get(names.REDERIVED) == 1.0 for r in read_records(directory)}
    others = [step for step in range(1, last + 1) if not alike.get(step)]
    print(f"{last - len(others)} of {last} steps derived again, bit for bit")
    if others:
        print(
            f"step {others[0]} is the first that ends in other weights: another layout, machine, number of threads "
            "or version, or a device whose sums have no order"
        )
        sys.exit(1)


def sealed_until(run: Path, step: int | None) -> int:
    """The last step to derive. Raises ValueError unless every batch from the first on was kept with a whole seal."""
    folder = run / ROLLOUTS_FOLDER
    saved = saved_steps(folder)
    from megatron_dppo.data.batch_file import SavedBatch

    last = trained_steps(run, saved)[-1] if step is None else step
    wanted = range(1, last + 1)
    missing = sorted(set(wanted) - set(saved))
    if missing or not wanted:
        first = missing[0] if missing else last
        raise ValueError(
            f"{folder}: no batch of step {first}, expected one of every step from 1 to {last}: a run is derived from "
            "its first step on; start it with rollout.save=true"
        )
    for number in wanted:
        seal = SavedBatch(folder, number).seal
        if seal is None or number not in seal.weights:
            raise ValueError(
                f"{folder}: the batch of step {number} has no seal with the hash of the weights after it: it was not "
                "trained on, or an earlier version saved it"
            )
    return last


def derivation(evaluation_sets: Iterable[str], run: Path, last: int) -> list[str]:
    """Overrides of the run's configuration: its batches in place of an engine, and nothing else is made."""
    values: dict[str, Any] = {
        "run.directory": run / DERIVED,
        "run.resume": "never",
        "run.steps": last,
        "run.show_sample_every": 0,
        "rollout.replay_from": run / ROLLOUTS_FOLDER,
        "rollout.save": "false",
        "rollout.max_staleness": 0,
        "rollout.interrupt": "drain",
        "engine.placement": "separate",
        "checkpoint.every": last,
        "checkpoint.keep": 1,
        "checkpoint.export_hf": "false",
        "checkpoint.upload": "null",
        "profile.steps": "[]",
        "tracking.trackers": "[]",
    }
    # A name in the file stays unless it is taken away.
    evaluation = [f"data.evaluation.{name}=null" for name in evaluation_sets]
    return [*(f"{key}={value}" for key, value in values.items()), *evaluation]


if __name__ == "__main__":
    sys.exit(main())
