"""Show which tokens of a saved batch the mask blocks, and why.

    megatron-dppo explain runs/demo --step 3 --csv tokens.csv --html tokens.html

The run must have been started with ``rollout.save=true``: then every batch has log pi, the divergence and the mask of
each token as the loss computed them. The command first compares these values with ``metrics.jsonl`` and
``masked_tokens.jsonl``, and stops if they disagree. Then it shows the values.

With ``--policy FOLDER`` the command computes pi from the weights in a Hugging Face folder instead. It shows what the
mask would block if a policy with these weights trained on the batch. ``--rollout-policy FOLDER`` adds the weights that
sampled the batch; for step 1 these are the model that the run began with. Three values come from these weights: pi'
(the token's probability by transformers), the exact divergences, and TopK(mu) if the batch has none. Both models run in
transformers, in float32 on the CPU, one response at a time.
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
from megatron_dppo.metrics.records import CONFIG_FILE, ROLLOUTS_FOLDER, saved_batch_step
from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from megatron_dppo.algorithms.algorithm import Algorithm
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.diagnostics.explain.explanation import Response


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = batch_parser("explain", str(__doc__))
    parser.add_argument(
        "--policy", type=Path, help="Hugging Face folder of pi's weights; default: the step's pi"
    )
    parser.add_argument("--rollout-policy", type=Path, help="Hugging Face folder of mu's weights")
    algorithm_arguments(parser)
    parser.add_argument("--rows", type=int, default=30, help="token rows on the console (30)")
    parser.add_argument("--csv", type=Path, help="write every token here")
    parser.add_argument("--html", type=Path, help="write a page with coloured tokens here")
    return parser.parse_args(arguments)


def algorithm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``chosen_algorithm`` reads."""
    parser.add_argument("--algorithm", help="a preset's name; default: the run's")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a number of the preset",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 if the input cannot be used."""
    return run_batch_command(explain, parse(arguments))


def explain(options: argparse.Namespace) -> None:
    """Read the batch, explain its tokens, and write the requested files."""
    config = load_config(options.run / CONFIG_FILE)
    # Check the step before torch is imported: the import takes seconds.
    step = saved_batch_step(options.run / ROLLOUTS_FOLDER, options.step)
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.data.batch_file import load_batch
    from megatron_dppo.diagnostics.explain import page

    algorithm = build_algorithm(*chosen_algorithm(options, config.algorithm))
    batch = load_batch(options.run / ROLLOUTS_FOLDER, step)
    positions, skip_line = chosen_responses(batch, config.algorithm, options.limit)
    mini_batch_size = config.training.prompts_per_mini_batch * config.rollout.group_size
    mini_batches = {i: i // mini_batch_size + 1 for i in positions}
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
        f"{len(positions)} of {len(batch)} responses; {skip_line}",
    ]
    title = f"Masks of {options.run}, batch of step {step}"
    tables = page.summary_tables(algorithm.name, responses)
    shown_tables = list(tables)
    if options.rows:
        tokens = page.all_tokens(responses)
        shown_tables.append(page.notable_table(algorithm.name, tokens, options.rows))
    console = show_facts(title, facts, width=200)
    for table in shown_tables:
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
    """Explain responses with the values that the loss of ``step`` computed.

    Args:
        options: options of the command.
        trained_with: the run's algorithm.
        step: step whose batch is explained.
        algorithm: the algorithm to explain: the run's or another algorithm.
        batch: all trajectories of the batch.
        mini_batches: the responses to explain: position in the batch -> number of the mini-batch, from 1.
        checkpoint: Hugging Face folder with the tokenizer.

    Returns:
        The explained responses, and a line about the source of the numbers.

    Raises:
        ValueError: The batch lacks the values, or the run's records disagree with them.
    """
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.diagnostics.explain.explanation import TokenTexts
    from megatron_dppo.diagnostics.explain.seen_step import SeenStep, check_agreement, explain_seen

    if options.rollout_policy is not None:
        raise ValueError(
            "--rollout-policy: expected with --policy only; without it, the step's own numbers are shown"
        )
    saved = SeenStep.of(batch, trained_with)
    source = check_agreement(saved, options.run, step)
    decisions = saved.decisions(algorithm)
    if not saved.was_trained_with(algorithm):
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
    """Explain responses as :func:`as_trained` does, but with the weights of ``--policy``."""
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.diagnostics.explain.explanation import Policy, TokenTexts, explain_response
    from megatron_dppo.metrics.progress import progress

    policy = Policy(options.policy)
    rollout_policy = None
    if options.rollout_policy:
        rollout_policy = Policy(options.rollout_policy)
    texts = TokenTexts(load_tokenizer(options.policy))
    responses = []
    with progress("explaining", len(mini_batches)) as bar:
        for index, number in mini_batches.items():
            logits = policy.logits(batch[index])
            rollout_logits = None
            if rollout_policy:
                rollout_logits = rollout_policy.logits(batch[index])
            responses.append(
                explain_response(
                    index,
                    number,
                    batch[index],
                    algorithm,
                    logits,
                    rollout_logits,
                    temperature=temperature,
                    texts=texts,
                )
            )
            bar.advance()
    return responses


def chosen_algorithm(
    options: argparse.Namespace, trained_with: AlgorithmConfig
) -> tuple[str, dict[str, Any], Settings]:
    """Return name, numbers and settings of the algorithm to explain.

    ``--algorithm`` names the algorithm; the default is the run's algorithm. ``--option`` overrides its numbers.
    """
    name = options.algorithm or trained_with.name
    numbers = {}
    if name == trained_with.name:
        numbers = dict(trained_with.options)
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
    batch: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    limit: int,
) -> tuple[list[int], str]:
    """Return the positions of the first ``limit`` responses with a gradient, and a line about the responses left out.

    ``limit`` 0: all responses with a gradient. Raises ValueError if no response has a gradient.
    """
    from megatron_dppo.loop.learning import trains

    trained_positions = [i for i, t in enumerate(batch) if t.sampled and trains(t, algorithm)]
    useful_positions = [i for i in trained_positions if batch[i].has_advantage]
    if not useful_positions:
        raise ValueError(f"none of the {len(batch)} responses has a gradient: nothing to explain")
    positions = useful_positions
    if limit:
        positions = useful_positions[:limit]
    return positions, (
        f"left out: {len(batch) - len(trained_positions)} dropped, "
        f"{len(trained_positions) - len(useful_positions)} without "
        f"advantage, {len(useful_positions) - len(positions)} beyond --limit"
    )


def show(console: Console, summary: SummaryTable) -> None:
    """Print a table."""
    from megatron_dppo.diagnostics.pages import LEFT_ALIGNED

    if not summary.rows:
        console.print(summary.shown_title)
        return
    columns: list[Column] = []
    for name in summary.columns:
        columns.append(Column(name, justify="left" if name in LEFT_ALIGNED else "right"))
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


def batch_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of RUN, ``--step`` and ``--limit`` for a command on one saved batch."""
    parser = argparse.ArgumentParser(
        prog=f"megatron-dppo {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's directory (run.directory)")
    parser.add_argument("--step", type=int, help="step of the batch; default: the last saved")
    parser.add_argument("--limit", type=int, default=64, help="responses at most (64); 0: all")
    return parser


def run_batch_command(
    act: Callable[[argparse.Namespace], None], options: argparse.Namespace
) -> int:
    """Call ``act`` with the options; returns 0, or 2 with a message if the input cannot be used."""
    try:
        if options.limit < 0:
            raise ValueError(f"--limit {options.limit}: expected 0 (all) or more")
        act(options)
    except (OSError, RunError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show_facts(title: str, facts: Sequence[str], *, width: int) -> Console:
    """Print title and facts, and return the console for the tables below them.

    ``width`` is the number of columns if the output is not a terminal.
    """
    console = Console(width=None if sys.stdout.isatty() else width, markup=False, highlight=False)
    console.print(title, style="bold")
    for fact in facts:
        console.print(fact)
    return console


if __name__ == "__main__":
    sys.exit(main())
