"""Explanation of a mask: which tokens of a saved rollout batch are blocked, which train, and why.

    megatron-dppo explain runs/demo --step 3 --csv tokens.csv --html tokens.html

The run must have been started with ``rollout.save=true``: then every batch holds log pi, the divergence
and the mask of each token as the loss saw them, which are shown here. They are compared with
``metrics.jsonl`` and ``masked_tokens.jsonl`` first; where they disagree nothing is shown.

``--policy FOLDER`` computes pi anew with a Hugging Face folder instead: the mask of the next update on this
batch under those weights. ``--rollout-policy``, beside it: the weights that sampled the batch (of step
1: the model that the run began with); from them pi', TopK(mu) and the exact divergences are computed
if the batch lacks them. Both models run in transformers, in float32 on the CPU, one response at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_dppo.algorithms.table import Settings
from megatron_dppo.config.loading import load_config, parse_scalar
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from megatron_dppo.algorithms.policy_loss import Algorithm
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.explain.explanation import Place, Response


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's directory (run.directory)")
    parser.add_argument("--step", type=int, help="whose batch; default: the last saved one")
    parser.add_argument("--policy", type=Path, help="Hugging Face folder; default: as the step was")
    parser.add_argument("--rollout-policy", type=Path, help="Hugging Face folder of mu's weights")
    parser.add_argument("--algorithm", help="a preset's name; default: the run's")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a preset's number"
    )
    parser.add_argument("--limit", type=int, default=64, help="responses at most (64); 0: all")
    parser.add_argument("--rows", type=int, default=30, help="token rows on the console (30)")
    parser.add_argument("--csv", type=Path, help="write every token here")
    parser.add_argument("--html", type=Path, help="write a page with coloured tokens here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain, print and write; returns 0, or 2 if the input cannot be used."""
    options = parse(arguments)
    try:
        explain(options, load_config(options.run / "config.yaml"))
    except (OSError, RunError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def explain(options: argparse.Namespace, config: TrainConfig) -> None:
    """Read the batch, explain its tokens, write the requested files."""
    from megatron_dppo.algorithms.policy_loss import build_algorithm
    from megatron_dppo.data.batch_file import load_batch, saved_step
    from megatron_dppo.explain import page, summary_tables

    algorithm = build_algorithm(*chosen_algorithm(options, config))
    step = saved_step(options.run / "rollouts", options.step, default=-1)
    batch = load_batch(options.run / "rollouts", step)
    chosen, skipped = chosen_responses(batch, config, options.limit)
    explain_chosen = as_trained if options.policy is None else under_policy
    responses, source = explain_chosen(options, config, step, algorithm, batch, chosen)
    numbers = ", ".join(f"{k} {v:g}" for k, v in algorithm.numbers.items())
    facts = [
        f"{algorithm.name}: {numbers}",
        f"{source}; temperature {config.temperature:g}",
        f"{len(chosen)} of {len(batch)} responses; {skipped}",
    ]
    title = f"Masks of {options.run}, batch of step {step}"
    tables = summary_tables.sheets(algorithm.name, responses)
    rows = summary_tables.notable(
        algorithm.name, summary_tables.all_tokens(responses), options.rows
    )
    show(title, facts, [*tables, rows] if options.rows else tables)
    if options.csv:
        summary_tables.write_csv(options.csv, responses)
        print(f"{options.csv}: every token")
    if options.html:
        html = page.render(title, facts, tables, algorithm.name, responses)
        options.html.write_text(html, encoding="utf-8")
        print(f"{options.html}: every response, tokens coloured")


def as_trained(
    options: argparse.Namespace,
    config: TrainConfig,
    step: int,
    algorithm: Algorithm,
    batch: list[Trajectory],
    chosen: list[int],
) -> tuple[list[Response], str]:
    """The responses ``chosen`` as the loss of ``step`` saw them, and where the numbers are from.

    Raises ValueError where the batch does not say, or says what the run's records do not.
    """
    from megatron_dppo.algorithms.policy_loss import build_algorithm
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.explain.explanation import TokenTexts
    from megatron_dppo.explain.seen import SeenStep, check_agreement, explain_seen

    if options.rollout_policy is not None:
        raise ValueError(
            "--rollout-policy: the step's own numbers are shown; it goes with --policy"
        )
    settings = config.algorithm
    own = build_algorithm(settings.name, settings.options, settings.settings)
    seen = SeenStep.of(batch, settings)
    source = check_agreement(seen, own, options.run, step)
    decisions = seen.decisions(own)
    if algorithm.numbers != own.numbers or algorithm.name != own.name:
        decisions = seen.others_decisions(algorithm)
        source += f" for {own.name}, which the run trained with"
    texts = TokenTexts(load_tokenizer(config.model.hf_checkpoint))
    rows = {position: row for row, position in enumerate(seen.positions)}
    responses = [
        explain_seen(seen, rows[i], place_of(i, config), batch[i], algorithm, decisions, texts)
        for i in chosen
    ]
    return responses, source


def under_policy(
    options: argparse.Namespace,
    config: TrainConfig,
    step: int,
    algorithm: Algorithm,
    batch: list[Trajectory],
    chosen: list[int],
) -> tuple[list[Response], str]:
    """As :func:`as_trained`, under the weights of ``--policy``."""
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.explain.explanation import TokenTexts
    from megatron_dppo.explain.recomputed import Policy, explain_response
    from megatron_dppo.metrics.progress import progress

    policy = Policy(options.policy)
    rollout_policy = Policy(options.rollout_policy) if options.rollout_policy else None
    texts = TokenTexts(load_tokenizer(options.policy))
    responses = []
    with progress("explaining", len(chosen)) as bar:
        for index in chosen:
            logits = policy.logits(batch[index])
            rollout_logits = rollout_policy.logits(batch[index]) if rollout_policy else None
            responses.append(
                explain_response(
                    place_of(index, config), batch[index], algorithm, logits, rollout_logits,
                    temperature=config.temperature, texts=texts,
                )
            )  # fmt: skip
            bar.advance()
    source = (
        f"NOT as step {step} trained, but under the weights in {options.policy}, rollout policy "
        f"{options.rollout_policy or 'not given'}"
    )
    return responses, source


def place_of(index: int, config: TrainConfig) -> Place:
    """Where the response at ``index`` of a batch stands."""
    from megatron_dppo.explain.explanation import Place

    size = config.training.prompts_per_mini_batch * config.rollout.group_size
    return Place(index, index // size + 1)


def chosen_algorithm(
    options: argparse.Namespace, config: TrainConfig
) -> tuple[str, dict[str, Any], Settings]:
    """Name, numbers and settings of the algorithm: the run's unless ``--algorithm`` names another;
    ``--option`` overrides numbers.
    """
    name = options.algorithm or config.algorithm.name
    numbers = dict(config.algorithm.options) if name == config.algorithm.name else {}
    for option in options.option:
        key, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"--option {option}: expected KEY=VALUE")
        try:
            numbers[key] = parse_scalar(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--option {option}: the value can't be read: {error}") from error
    return name, numbers, config.algorithm.settings


def chosen_responses(batch: list, config: TrainConfig, limit: int) -> tuple[list[int], str]:
    """Indices of the first ``limit`` responses with a gradient, and a line about the others."""
    from megatron_dppo.loop.learning import trains

    if limit < 0:
        raise ValueError(f"--limit {limit}: expected 0 (all) or more")
    training = [i for i, t in enumerate(batch) if t.sampled and trains(t, config.algorithm)]
    useful = [i for i in training if batch[i].advantage != 0]
    if not useful:
        raise ValueError(f"none of the {len(batch)} responses has a gradient: nothing to explain")
    chosen = useful[:limit] if limit else useful
    return chosen, (
        f"left out: {len(batch) - len(training)} dropped, {len(training) - len(useful)} without "
        f"advantage, {len(useful) - len(chosen)} beyond --limit"
    )


def show(title: str, facts: Sequence[str], tables: Sequence[Any]) -> None:
    """Print title, facts and tables; 200 columns wide if the output is not a terminal."""
    from megatron_dppo.explain.summary_tables import LEFT_ALIGNED

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    console.print(title, style="bold")
    for fact in facts:
        console.print(fact)
    for sheet in tables:
        if not sheet.rows:
            console.print(sheet.title)
            continue
        table = Table(title=sheet.title, title_justify="left")
        for name in sheet.columns:
            table.add_column(name, justify="left" if name in LEFT_ALIGNED else "right")
        for row in sheet.rows:
            table.add_row(*map(Text, row))
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
