"""Submit runs to a Slurm cluster, and supervise them there."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.logging import INTERRUPTED, fatal
from megatron_dppo.system.arguments import positive_count
from megatron_dppo.system.errors import RunError

_PROGRAM = "megatron-dppo slurm"
Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = _parser().parse_args(words[:1]).command
    if name in _COMMANDS_OF_EVERY_RUN:
        module, options = _COMMANDS_OF_EVERY_RUN[name]
        code: int = importlib.import_module(module).main([*options, *words[1:]])
        return code
    add_arguments, execute = _COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"{_PROGRAM} {name}", description=execute.__doc__)
    add_arguments(parser)
    try:
        return execute(parser.parse_intermixed_args(words[1:]))
    except RunError as error:
        fatal(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _supervise(options: argparse.Namespace) -> int:
    """Runs the recipe inside this job; the last command of a batch script."""
    from megatron_dppo.cluster.slurm.supervise import supervise

    if options.rehearse is not None:
        from megatron_dppo.cluster.slurm.rehearse import rehearse_in_job

        return rehearse_in_job(options.recipe, options.site, options.rehearse)
    return supervise(
        options.recipe,
        options.overrides,
        options.site,
        once=options.once,
        roles_of=options.roles_of,
    )


def _submit(options: argparse.Namespace) -> int:
    """Checks a recipe, prints the job, and submits it with sbatch."""
    from megatron_dppo.cluster.slurm.submit import submit

    return submit(options)


def _add_submission_arguments(parser: argparse.ArgumentParser) -> None:
    _add_recipe_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show the job and its faults, and submit nothing"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="also print the resolved configuration and site"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run a tiny model of the recipe on the job's nodes, and wait for the verdict; docs/rehearsal.md",
    )
    parser.add_argument("--detach", action="store_true", help="with --rehearse: do not wait")
    parser.add_argument("--nodes", type=positive_count, help="by default as many as the roles fill")
    parser.add_argument(
        "--set",
        metavar="key=value",
        action="append",
        default=[],
        help="replaces one value of the site file, such as time=04:00:00",
    )
    parser.add_argument(
        "--sbatch",
        metavar="FLAG",
        action="append",
        default=[],
        help="a further flag of sbatch, written --sbatch=FLAG",
    )


def _add_supervision_arguments(parser: argparse.ArgumentParser) -> None:
    _add_recipe_arguments(parser)
    # The job of `submit --rehearse` sets the next options; users do not. The value of --rehearse is the recipe with its
    # overrides, as the user wrote them.
    parser.add_argument("--rehearse", metavar="RECIPE", help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--roles-of", metavar="FILE", help=argparse.SUPPRESS)


def _add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "recipe")
    parser.add_argument(
        "--site", metavar="FILE", help="settings of this cluster; see docs/slurm.md"
    )


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Command]] = {
    "submit": (_add_submission_arguments, _submit),
    "supervise": (_add_supervision_arguments, _supervise),
}
"""The commands by name: a function that adds the arguments to a parser, and a function that executes the command."""
_COMMANDS_OF_EVERY_RUN: dict[str, tuple[str, list[str]]] = {
    "status": ("megatron_dppo.launch.status", []),
    "watch": ("megatron_dppo.launch.status", ["--follow"]),
    "stop": ("megatron_dppo.launch.stop_run", []),
    "logs": ("megatron_dppo.launch.logs", []),
}
"""Commands for runs with and without Slurm, by name: the module that executes the command, and the options that the
module gets in addition to the user's."""


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:10} {execute.__doc__}" for name, (_, execute) in _COMMANDS.items()]
    commands_help = "\n".join(lines)
    names = ", ".join(_COMMANDS_OF_EVERY_RUN)
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Runs on a Slurm cluster.",
        epilog=f"commands:\n{commands_help}\n  {names}: for every run, with or without Slurm\n"
        f"`{_PROGRAM} COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=[*_COMMANDS, *_COMMANDS_OF_EVERY_RUN], metavar="COMMAND")
    return parser


if __name__ == "__main__":
    sys.exit(main())
