"""Show which tokens of a saved batch the mask blocks, and why.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megatron_dppo.algorithms.table import Settings
from megatron_dppo.config.loading import load_config, parse_scalar
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.diagnostics.pages import SummaryTable
from megatron_dppo.metrics.records import CONFIG_FILE, ROLLOUTS_FOLDER, saved_step
from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from megatron_dppo.algorithms.policy_loss import Algorithm
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.diagnostics.explain.explanation import Response


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = batch_parser("explain", str(__doc__))
    parser.add_argument("--policy", type=Path, help="Hugging Face folder; default: as the step was")
    parser.add_argument("--rollout-policy", type=Path, help="Hugging Face folder of mu's weights")
    algorithm_arguments(parser)
    parser.add_argument("--rows", type=int, default=30, help="token rows on the console (30)")
    parser.add_argument("--csv", type=Path, help="write every token here")
    parser.add_argument("--html", type=Path, help="write a page with coloured tokens here")
    return parser.parse_args(arguments)


def algorithm_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that ``chosen_algorithm`` reads."""
    parser.add_argument("--algorithm", help="a preset's name; default: the run's")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="a preset's number"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain, print and write; returns 0, or 2 if the input cannot be used."""
    return run_batch_command(explain, parse(arguments))


def explain(options: argparse.Namespace) -> None:
    """Read the batch, explain its tokens, write the requested files."""
    config = load_config(options.run / CONFIG_FILE)
    # Before torch is imported, which takes seconds.
    step = saved_step(options.run / ROLLOUTS_FOLDER, options.step)
    from megatron_dppo.algorithms.policy_loss import build_algorithm
    from megatron_dppo.data.batch_file import load_batch
    from megatron_dppo.diagnostics.explain import page

    algorithm = build_algorithm(*chosen_algorithm(options, config.algorithm))
    batch = load_batch(options.run / ROLLOUTS_FOLDER, step)
    chosen, skipped = chosen_responses(batch, config.algorithm, options.limit)
    mini_batch_size = config.training.prompts_per_mini_batch * config.rollout.group_size
    mini_batches = {i: i // mini_batch_size + 1 for i in chosen}
    if options.policy is None:
        checkpoint = config.model.hf_checkpoint
        responses, source = as_trained(
            options, config.algorithm, step, algorithm, batch, mini_batches, checkpoint
        )
    else:
        responses = under_policy(options, config.temperature, algorithm, batch, mini_batches)
        source = (
            f"NOT as step {step} trained, but under the weights in {options.policy}, rollout "
            f"policy {options.rollout_policy or 'not given'}"
        )
    numbers = ", ".join(f"{k} {v:g}" for k, v in algorithm.numbers.items())
    facts = [
        f"{algorithm.name}: {numbers}",
        f"{source}; temperature {config.temperature:g}",
        f"{len(chosen)} of {len(batch)} responses; {skipped}",
    ]
    title = f"Masks of {options.run}, batch of step {step}"
    tables = page.summary_tables(algorithm.name, responses)
    rows = page.notable(algorithm.name, page.all_tokens(responses), options.rows)
    console = show_facts(title, facts, width=200)
    for table in [*tables, rows] if options.rows else tables:
        show(console, table)
    if options.csv:
        page.write_csv(options.csv, responses)
        print(f"{options.csv}: every token")
    if options.html:
        html = page.render(title, facts, tables, algorithm.name, responses)
        options.html.write_text(html, encoding="utf-8")
        print(f"{options.html}: every response, tokens coloured")


def as_trained(
    options: argparse.Namespace,
    trained_with: AlgorithmConfig,
    step: int,
    algorithm: Algorithm,
    batch: list[Trajectory],
    mini_batches: Mapping[int, int],
    checkpoint: str,
) -> tuple[list[Response], str]:
    """The responses at the positions in ``mini_batches`` as the loss of ``step`` saw them, and where the numbers are
    from. ``checkpoint``: whose tokenizer says them.

    Raises ValueError where the batch does not say, or says what the run's records do not.
    """
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.diagnostics.explain.explanation import TokenTexts
    from megatron_dppo.diagnostics.explain.seen_step import SeenStep, check_agreement, explain_seen

    if options.rollout_policy is not None:
        raise ValueError(
            "--rollout-policy: the step's own numbers are shown; it goes with --policy"
        )
    saved = SeenStep.of(batch, trained_with)
    source = check_agreement(saved, options.run, step)
    decisions = saved.decisions(algorithm)
    if not saved.is_of(algorithm):
        source += f" for {trained_with.name}, which the run trained with"
    texts = TokenTexts(load_tokenizer(checkpoint))
    responses = [
        explain_seen(saved, i, number, algorithm, decisions, texts)
        for i, number in mini_batches.items()
    ]
    return responses, source


def under_policy(
    options: argparse.Namespace,
    temperature: float,
    algorithm: Algorithm,
    batch: list[Trajectory],
    mini_batches: Mapping[int, int],
) -> list[Response]:
    """As :func:`as_trained`, under the weights of ``--policy``."""
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.diagnostics.explain.explanation import Policy, TokenTexts, explain_response
    from megatron_dppo.metrics.progress import progress

    policy = Policy(options.policy)
    rollout_policy = Policy(options.rollout_policy) if options.rollout_policy else None
    texts = TokenTexts(load_tokenizer(options.policy))
    responses = []
    with progress("explaining", len(mini_batches)) as bar:
        for index, number in mini_batches.items():
            logits = policy.logits(batch[index])
            rollout_logits = rollout_policy.logits(batch[index]) if rollout_policy else None
            responses.append(
                explain_response(
                    index, number, batch[index], algorithm, logits, rollout_logits,
                    temperature=temperature, texts=texts,
                )
            )  # fmt: skip
            bar.advance()
    return responses


def chosen_algorithm(
    options: argparse.Namespace, trained_with: AlgorithmConfig
) -> tuple[str, dict[str, Any], Settings]:
    """Name, numbers and settings of the algorithm: the run's unless ``--algorithm`` names another;
    ``--option`` overrides numbers.
    """
    name = options.algorithm or trained_with.name
    numbers = dict(trained_with.options) if name == trained_with.name else {}
    for option in options.option:
        key, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"--option {option}: expected KEY=VALUE")
        try:
            numbers[key] = parse_scalar(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--option {option}: the value can't be read: {error}") from error
    return name, numbers, trained_with.settings


def chosen_responses(
    batch: Sequence[Trajectory], algorithm: AlgorithmConfig, limit: int
) -> tuple[list[int], str]:
    """Indices of the first ``limit`` responses with a gradient, and a line about the others."""
    from megatron_dppo.loop.learning import trains

    training = [i for i, t in enumerate(batch) if t.sampled and trains(t, algorithm)]
    useful = [i for i in training if batch[i].has_advantage]
    if not useful:
        raise ValueError(f"none of the {len(batch)} responses has a gradient: nothing to explain")
    chosen = useful[:limit] if limit else useful
    return chosen, (
        f"left out: {len(batch) - len(training)} dropped, {len(training) - len(useful)} without "
        f"advantage, {len(useful) - len(chosen)} beyond --limit"
    )


def show(console: Console, summary: SummaryTable) -> None:
    """Print a table."""
    from megatron_dppo.diagnostics.explain.page import LEFT_ALIGNED

    if not summary.rows:
        console.print(summary.shown_title)
        return
    columns = [
        Column(name, justify="left" if name in LEFT_ALIGNED else "right")
        for name in summary.columns
    ]
    table = Table(
        *columns,
        title=summary.title,
        title_justify="left",
        caption=summary.note or None,
        caption_justify="left",
    )
    for row in summary.rows:
        table.add_row(*map(Text, row))
    console.print(table)


# --- what the commands on one saved batch have in common: arguments, errors, how facts are shown


def batch_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser of RUN, ``--step`` and ``--limit``."""
    parser = argparse.ArgumentParser(
        prog=f"megatron-dppo {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's directory (run.directory)")
    parser.add_argument("--step", type=int, help="whose batch; default: the last saved one")
    parser.add_argument("--limit", type=int, default=64, help="responses at most (64); 0: all")
    return parser


def run_batch_command(
    act: Callable[[argparse.Namespace], None], options: argparse.Namespace
) -> int:
    """Do ``act``; returns 0, or 2 with a message if the input cannot be used."""
    try:
        if options.limit < 0:
            raise ValueError(f"--limit {options.limit}: expected 0 (all) or more")
        act(options)
    except (OSError, RunError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show_facts(title: str, facts: Sequence[str], *, width: int) -> Console:
    """Print title and facts; ``width`` in columns if the output is not a terminal. For the tables below them."""
    console = Console(width=None if sys.stdout.isatty() else width, markup=False, highlight=False)
    console.print(title, style="bold")
    for fact in facts:
        console.print(fact)
    return console


if __name__ == "__main__":
    sys.exit(main())
