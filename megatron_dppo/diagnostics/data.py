"""Prepare, generate and inspect problems, and check a reward on worked solutions.

``megatron-dppo data prepare NAME --from SOURCE --out FILE``, ``megatron-dppo data generate TASK --out FILE``,
``megatron-dppo data inspect FILE`` and ``megatron-dppo data check-rewards FILE``; see docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.data.published import SETS, prepare
from megatron_dppo.data.turn_ends import ResponseEnds
from megatron_dppo.diagnostics.reward_checks import check_rewards
from megatron_dppo.logging import fatal
from megatron_dppo.metrics.progress import progress
from megatron_dppo.rewards import find_reward
from megatron_dppo.system.arguments import count_or_zero, finite_number, positive_count
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import folder_fault, write_atomically


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 if a reward fails its check. Exits with 2 if the input cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (RunError, OSError) as error:
        fatal(str(error))


def _prepare(options: argparse.Namespace) -> int:
    prepared = prepare(options.name, options.source, Path(options.out), options.split)
    print(f"{options.out}: {options.name}")
    print("\n".join(prepared.report()))
    return 0


def _generate(options: argparse.Namespace) -> int:
    try:
        from megatron_dppo.rewards import reasoning_gym
    except ImportError as error:
        fatal(str(error))
    out = Path(options.out)
    reason = folder_fault(out.parent)
    if reason:
        fatal(f"{out}: {reason}")
    task_names = reasoning_gym.tasks() if options.tasks == ["all"] else options.tasks
    if options.config and len(task_names) > 1:
        fatal(f"--config: got {len(task_names)} tasks, expected one: each has settings of its own")
    lines = []
    try:
        settings = dict(_setting("--config", word) for word in options.config)
        with progress("generate", options.count * len(task_names)) as bar:
            for task in task_names:
                for record in reasoning_gym.problems(task, options.count, options.seed, settings):
                    lines.append(json.dumps(record, ensure_ascii=False) + "\n")
                    bar.advance(1)
    except ValueError as error:
        fatal(str(error))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(lines))
    print(f"{out}: {len(lines):,} problems of {len(task_names)} tasks of reasoning-gym")
    return 0


def _setting(option: str, word: str) -> tuple[str, Any]:
    """Split ``name=value``; a value in JSON is parsed, any other value stays text. Raises ValueError without ``=``."""
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"{option}: got {word!r}, expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _inspect(options: argparse.Namespace) -> int:
    from megatron_dppo.data.problems import DataKeys, PromptForm, embedding_rows, load_tokenizer
    from megatron_dppo.diagnostics.data_inspection import Inspection, inspect

    _require_reward(options.reward)
    option = "--chat-template-arguments"
    try:
        arguments = dict(_setting(option, word) for word in options.chat_template_arguments)
    except ValueError as error:
        fatal(str(error))
    form = PromptForm(not options.plain, options.system_prompt, options.prompt_template, arguments)
    tokenizer = None
    ends = ResponseEnds({})
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
        ends = ResponseEnds.of(options.tokenizer, tokenizer)
    inspection = Inspection(
        options.file,
        keys=DataKeys(options.prompt_key, options.answer_key),
        form=form,
        tokenizer=tokenizer,
        ends=ends,
        embedding_rows=embedding_rows(options.tokenizer) if options.tokenizer else None,
        reward=RewardConfig(name=options.reward),
        against=options.against,
        similarity=options.similarity,
    )
    for line in inspect(inspection):
        print(line, flush=True)
    return 0


def _check_rewards(options: argparse.Namespace) -> int:
    _require_reward(options.reward)
    return check_rewards(
        options.file, options.reward, options.timeout, options.workers, options.passed_variables
    )


def _require_reward(name: str) -> None:
    try:
        find_reward(name)
    except ValueError as error:
        fatal(f"--reward: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-dppo data", description=__doc__)
    commands = parser.add_subparsers(
        required=True, metavar="prepare|generate|inspect|check-rewards"
    )

    preparing = commands.add_parser("prepare", help="published problems as JSON Lines")
    preparing.set_defaults(run=_prepare)
    names = "; ".join(f"{name}: {s.title} ({s.hub})" for name, s in SETS.items())
    preparing.add_argument("name", choices=SETS, metavar="NAME", help=names)
    preparing.add_argument(
        "--from", dest="source", required=True, help="published file, folder, or name on the hub"
    )
    preparing.add_argument("--out", required=True, help="JSON Lines file to write")
    preparing.add_argument(
        "--split", help="split to read, if there are several; default: the usual one"
    )

    generating = commands.add_parser(
        "generate", help="problems that reasoning-gym's generators make, as JSON Lines"
    )
    generating.set_defaults(run=_generate)
    generating.add_argument("tasks", nargs="+", metavar="TASK", help="such as arc_1d; or all")
    generating.add_argument(
        "--count",
        type=positive_count,
        default=1000,
        help="problems of each task; default %(default)s",
    )
    generating.add_argument("--seed", type=count_or_zero, default=1, help="default %(default)s")
    generating.add_argument(
        "--config", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the one task"
    )
    generating.add_argument("--out", required=True, help="JSON Lines file to write")

    inspecting = commands.add_parser("inspect", help="describe problems as a run would use them")
    inspecting.set_defaults(run=_inspect)
    inspecting.add_argument("file", help="file, folder or glob of problems")
    inspecting.add_argument("--tokenizer", help="folder; without it lengths are characters")
    inspecting.add_argument(
        "--against", nargs="+", default=[], metavar="FILE", help="evaluation files to compare with"
    )
    inspecting.add_argument(
        "--similarity",
        type=finite_number(0, 1),
        default=0.6,
        help="least similarity of near-duplicates, 0 to 1",
    )
    inspecting.add_argument(
        "--reward", default="math_verify", help="reward that checks the answers"
    )
    inspecting.add_argument("--prompt-key", help="as data.train's prompt_key")
    inspecting.add_argument("--answer-key", help="as data.train's answer_key")
    inspecting.add_argument("--system-prompt", help="as data.system_prompt")
    inspecting.add_argument("--prompt-template", help="as data.prompt_template")
    inspecting.add_argument(
        "--chat-template-arguments",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="as data.chat_template_arguments: enable_thinking=false",
    )
    inspecting.add_argument(
        "--plain", action="store_true", help="as data.apply_chat_template=false"
    )

    checking = commands.add_parser(
        "check-rewards",
        help="test a reward: a worked solution must be right for its answer, and wrong for another",
    )
    checking.set_defaults(run=_check_rewards)
    checking.add_argument("file", type=Path, help="JSON Lines with 'solution' and 'answer'")
    checking.add_argument("--reward", default="math_verify", help="default %(default)s")
    checking.add_argument(
        "--timeout", type=finite_number(0.1), default=10.0, help="seconds for one check"
    )
    checking.add_argument(
        "--workers", type=positive_count, default=2, help="processes; default %(default)s"
    )
    checking.add_argument(
        "--pass-variable",
        action="append",
        default=[],
        metavar="NAME",
        dest="passed_variables",
        help="as reward.passed_variables: environment variable for the reward's processes; may be repeated",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
