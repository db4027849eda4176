"""Entry point: ``python -m megatron_dppo.slurm COMMAND ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.logging import fatal
from megatron_dppo.slurm.commands import SlurmError

_PROGRAM = "python -m megatron_dppo.slurm"
Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and obey; the exit code: 2 where something is refused."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = _parser().parse_args(given[:1]).command
    prepare, act = _COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"{_PROGRAM} {name}", description=act.__doc__)
    prepare(parser)
    try:
        return act(parser.parse_intermixed_args(given[1:]))
    except (ConfigError, LaunchError, SlurmError) as error:
        fatal(str(error))


def _supervise(words: argparse.Namespace) -> int:
    """What a batch script ends in: runs the recipe inside this job."""
    from megatron_dppo.slurm.supervise import supervise

    return supervise(words.recipe, words.overrides, words.site)


def _takes_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the run's configuration")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", help="replaces one value of the recipe"
    )
    parser.add_argument("--site", metavar="FILE", help="what this cluster wants; see docs/slurm.md")


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Command]] = {
    "supervise": (_takes_recipe, _supervise),
}


def _parser() -> argparse.ArgumentParser:
    told = "\n".join(f"  {name:10} {act.__doc__}" for name, (_, act) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Runs on a Slurm cluster.",
        epilog=f"commands:\n{told}\n`{_PROGRAM} COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    return parser


if __name__ == "__main__":
    sys.exit(main())
