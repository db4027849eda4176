"""Show which tokens of a saved batch the mask blocks, and why.

    megatron-dppo explain runs/demo --step 3 --csv tokens.csv --html tokens.html

The run must have been started with ``rollout.save=true``: then every batch has log pi, the divergence and the mask of
each token as the loss computed them. The command first compares these values with ``metrics.jsonl`` and
``masked_tokens.jsonl``, and stops if they disagree. Then it shows the values. Responses with blocked tokens come first,
then those with tokens that only PPO's clip would block. Without ``--step`` the command takes the last step with a
blocked token.

With ``--policy FOLDER`` the command computes pi from the weights in a Hugging Face folder instead. It shows what the
mask would block if a policy with these weights trained on the batch. ``--rollout-policy FOLDER`` adds the weights that
sampled the batch; for step 1 these are the model that the run began with. Three values come from these weights: pi'
(the token's probability by transformers), the exact divergences, and TopK(mu) if the batch has none. Both models run in
transformers, in float32 on the CPU, one response at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from megatron_dppo.algorithms.table import Settings
from megatron_dppo.config.loading import load_config
from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.records import (
    CONFIG_FILE,
    ROLLOUTS_FOLDER,
    read_records,
    saved_batch_step,
    saved_batch_steps,
    start_folder,
    step_of,
)
from megatron_dppo.system.arguments import count_or_zero, file_to_write
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.yaml_core import parse_scalar

if TYPE_CHECKING:
    from megatron_dppo.algorithms.algorithm import Algorithm
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.diagnostics.explain.explanation import Response


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    default_step = "the last saved with a blocked token; with --policy: the last saved"
    parser = batch_parser("explain", str(__doc__), default_step)
    parser.add_argument(
        "--policy", type=Path, help="Hugging Face folder of pi's weights; default: the step's pi"
    )
    parser.add_argument("--rollout-policy", type=Path, help="Hugging Face folder of mu's weights")
    algorithm_arguments(parser)
    parser.add_argument(
        "--rows", type=count_or_zero, default=30, help="token rows on the console (30)"
    )
    parser.add_argument("--csv", type=file_to_write, help="write every token here")
    parser.add_argument("--html", type=file_to_write, help="write a page with coloured tokens here")
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
    step, step_line = chosen_step(options)
    metric_names.add_metrics(config.tracking.metrics)
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.data.batch_file import load_batch
    from megatron_dppo.diagnostics.explain import page

    algorithm = build_algorithm(*chosen_algorithm(options, config.algorithm))
    batch = load_batch(options.run / ROLLOUTS_FOLDER, step)
    useful_positions, skip_line = useful_responses(batch, config.algorithm)
    if options.policy is None:
        responses, source = as_trained(options, config, step, algorithm, batch, useful_positions)
    else:
        responses = under_policy(options, config, algorithm, batch, useful_positions)
        source = (
            f"NOT as step {step} trained, but under the weights in {options.policy}, rollout "
            f"policy {options.rollout_policy or 'not given'}"
        )
    numbers = ", ".join(f"{k} {v:g}" for k, v in algorithm.numbers.items())
    facts = [
        f"{algorithm.name}: {numbers}",
        f"{source}; temperature {config.temperature:g}",
        f"{len(responses)} of {len(batch)} responses; {skip_line}, "
        f"{len(useful_positions) - len(responses)} beyond --limit",
    ]
    title = f"Masks of {options.run}, batch of step {step}{step_line}"
    tables = page.summary_tables(algorithm.name, responses)
    shown_tables = list(tables)
    if options.rows:
        tokens = page.all_tokens(responses)
        shown_tables.append(page.notable_table(algorithm.name, tokens, options.rows))
    console = show_facts(title, facts, width=200)
    for table in shown_tables:
        table.show(console)
    if options.csv:
        page.write_csv(options.csv, responses)
        print(f"{options.csv}: every token")
    if options.html:
        html = page.render(title, facts, tables, algorithm.name, responses)
        options.html.write_text(html, encoding="utf-8")
        print(f"{options.html}: every response, tokens coloured")


def chosen_step(options: argparse.Namespace) -> tuple[int, str]:
    """Return the step to explain, and words for the title about its choice; no words if ``--step`` names it.

    Raises ValueError if there is no saved batch of the step.
    """
    folder = options.run / ROLLOUTS_FOLDER
    last_step = saved_batch_step(folder, options.step)
    if options.step is not None or options.policy is not None:
        return last_step, ""
    saved_steps = set(saved_batch_steps(folder))
    blocking_steps: list[int] = []
    for row in read_records(options.run):
        if step_of(row) in saved_steps and row.get(metric_names.MASKED):
            blocking_steps.append(step_of(row))
    if not blocking_steps:
        return last_step, ", the last saved (no saved step has a blocked token)"
    return blocking_steps[-1], ", the last with a blocked token"


def as_trained(
    options: argparse.Namespace,
    config: TrainConfig,
    step: int,
    algorithm: Algorithm,
    batch: list[Trajectory],
    useful_positions: Sequence[int],
) -> tuple[list[Response], str]:
    """Explain responses with the values that the loss of ``step`` computed, those with blocked tokens first.

    Args:
        options: options of the command.
        config: the run's configuration.
        step: step whose batch is explained.
        algorithm: the algorithm to explain: the run's or another algorithm.
        batch: all trajectories of the batch.
        useful_positions: positions of the responses with a gradient.

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
    saved = SeenStep.of(batch, config.algorithm)
    source = check_agreement(saved, options.run, step)
    decisions = saved.decisions(algorithm)
    if not saved.was_trained_with(algorithm):
        source += f" for {config.algorithm.name}, which the run trained with"
    texts = TokenTexts(load_tokenizer(config.model.hf_checkpoint))
    responses: list[Response] = []
    for position in saved.notable_first(useful_positions, decisions)[: options.limit or None]:
        number = position // config.mini_batch_responses + 1
        responses.append(explain_seen(saved, position, number, algorithm, decisions, texts))
    return responses, source


def under_policy(
    options: argparse.Namespace,
    config: TrainConfig,
    algorithm: Algorithm,
    batch: list[Trajectory],
    useful_positions: Sequence[int],
) -> list[Response]:
    """Explain responses as :func:`as_trained` does, but with the weights of ``--policy``."""
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.diagnostics.explain.explanation import Policy, TokenTexts, explain_response

    policy = Policy(options.policy)
    rollout_policy = None
    if options.rollout_policy:
        rollout_policy = Policy(options.rollout_policy)
    texts = TokenTexts(load_tokenizer(options.policy))
    responses = []
    positions = useful_positions[: options.limit or None]
    with progress("explaining", len(positions)) as bar:
        for index in positions:
            trajectory = batch[index]
            response = explain_response(
                index,
                index // config.mini_batch_responses + 1,
                trajectory,
                algorithm,
                policy.logits(trajectory),
                rollout_policy.logits(trajectory) if rollout_policy else None,
                temperature=config.temperature,
                texts=texts,
            )
            responses.append(response)
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


def useful_responses(
    batch: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> tuple[list[int], str]:
    """Return the positions of the responses with a gradient, and words about the responses left out.

    Raises ValueError if no response has a gradient.
    """
    from megatron_dppo.loop.learning import trains

    trained_positions = [i for i, t in enumerate(batch) if t.sampled and trains(t, algorithm)]
    useful_positions = [i for i in trained_positions if batch[i].has_advantage]
    if not useful_positions:
        raise ValueError(f"none of the {len(batch)} responses has a gradient: nothing to explain")
    return useful_positions, (
        f"left out: {len(batch) - len(trained_positions)} dropped, "
        f"{len(trained_positions) - len(useful_positions)} without advantage"
    )


def batch_parser(
    command: str, description: str, default_step: str = "the last saved"
) -> argparse.ArgumentParser:
    """Return a parser of RUN, ``--step`` and ``--limit`` for a command on one saved batch.

    ``default_step``: words for the step that the command takes without ``--step``.
    """
    parser = argparse.ArgumentParser(
        prog=f"megatron-dppo {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's directory (run.directory)")
    parser.add_argument(
        "--step", type=count_or_zero, help=f"step of the batch; default: {default_step}"
    )
    parser.add_argument(
        "--limit", type=count_or_zero, default=64, help="responses at most (64); 0: all"
    )
    return parser


def run_batch_command(
    act: Callable[[argparse.Namespace], None], options: argparse.Namespace
) -> int:
    """Call ``act`` with the options; returns 0, or 2 with a message if the input cannot be used."""
    try:
        enter_start_folder(options)
        act(options)
    except (OSError, RunError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def enter_start_folder(options: argparse.Namespace) -> None:
    """Change to the folder that the run was started in: relative paths of its configuration begin there.

    The paths among ``options`` become absolute first. The current folder stays if the run has not stored a folder, or
    if the stored folder is not on this machine.
    """
    for name, value in vars(options).items():
        if isinstance(value, Path):
            setattr(options, name, value.absolute())
    folder = start_folder(options.run)
    if folder is not None:
        os.chdir(folder)


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
