"""Data sets: ``python -m megatron_dppo.data prepare NAME --from SOURCE --out FILE`` and
``python -m megatron_dppo.data inspect FILE``; docs/data.md tells more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.data.json_lines import DataError
from megatron_dppo.data.prepare import prepare
from megatron_dppo.data.published import SETS
from megatron_dppo.logging import fatal
from megatron_dppo.rewards import VerifierError, find_reward


def main(words: Sequence[str] | None = None) -> None:
    """Do what the words of the command line say."""
    options = _parser().parse_args(words)
    try:
        options.run(options)
    except (DataError, VerifierError, OSError) as error:
        fatal(str(error))


def _prepare(options: argparse.Namespace) -> None:
    prepared = prepare(options.name, options.source, Path(options.out), options.split)
    print(f"{options.out}: {options.name}")
    print("\n".join(prepared.report()))


def _inspect(options: argparse.Namespace) -> None:
    from megatron_dppo.config.schema import RewardConfig
    from megatron_dppo.data.inspection import Inspection, inspect
    from megatron_dppo.data.problems import DataKeys
    from megatron_dppo.data.prompts import PromptForm, load_tokenizer

    try:
        find_reward(options.reward)
    except ValueError as error:
        fatal(f"--reward: {error}")
    asked = Inspection(
        options.file,
        keys=DataKeys(options.prompt_key, options.answer_key),
        form=PromptForm(not options.plain, options.system_prompt, options.prompt_template),
        tokenizer=load_tokenizer(options.tokenizer) if options.tokenizer else None,
        reward=RewardConfig(name=options.reward),
        against=options.against,
        similarity=options.similarity,
    )
    for line in inspect(asked):
        print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_dppo.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="prepare|inspect")
    _add_prepare(commands.add_parser("prepare", help="published problems as JSON Lines"))
    _add_inspect(commands.add_parser("inspect", help="what a run would make of a file of problems"))
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {s.title} ({s.hub})" for name, s in SETS.items())
    parser.set_defaults(run=_prepare)
    parser.add_argument("name", choices=SETS, metavar="NAME", help=names)
    parser.add_argument(
        "--from", dest="source", required=True, help="published file, folder, or name on the hub"
    )
    parser.add_argument("--out", required=True, help="JSON Lines file to write")
    parser.add_argument("--split", help="where files name several; by default the usual one")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_inspect)
    parser.add_argument("file", help="JSON Lines or Parquet file of problems")
    parser.add_argument("--tokenizer", help="folder; without it lengths are characters")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="FILE", help="evaluation files to compare with"
    )
    parser.add_argument("--similarity", type=float, default=0.6, help="of near-duplicates, 0 to 1")
    parser.add_argument("--reward", default="math_verify", help="that checks the answers")
    parser.add_argument("--prompt-key", help="as data.train's prompt_key")
    parser.add_argument("--answer-key", help="as data.train's answer_key")
    parser.add_argument("--system-prompt", help="as data.system_prompt")
    parser.add_argument("--prompt-template", help="as data.prompt_template")
    parser.add_argument("--plain", action="store_true", help="as data.apply_chat_template=false")


if __name__ == "__main__":
    main()
