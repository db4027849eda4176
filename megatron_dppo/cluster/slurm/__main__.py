"""Submit, watch and stop runs on a Slurm cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from megatron_dppo.logging import INTERRUPTED, fatal
from megatron_dppo.system.errors import RunError

_PROGRAM = "megatron-dppo slurm"
Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = _parser().parse_args(words[:1]).command
    prepare, act = _COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"{_PROGRAM} {name}", description=act.__doc__)
    prepare(parser)
    try:
        return act(parser.parse_intermixed_args(words[1:]))
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


def _status(options: argparse.Namespace) -> int:
    """Prints the state of a run: step, metrics, servers, starts and why each ended."""
    from megatron_dppo.cluster.slurm.status import require_run, status_lines

    print("\n".join(status_lines(require_run(options.run))))
    return 0


def _watch(options: argparse.Namespace) -> int:
    """Prints the status until the run has ended."""
    from megatron_dppo.cluster.slurm.status import require_run, watch

    watch(require_run(options.run), options.every)
    return 0


def _stop(options: argparse.Namespace) -> int:
    """Asks a run to save a checkpoint and end."""
    from megatron_dppo.cluster.slurm.status import require_run, stop

    print(stop(require_run(options.run)))
    return 0


def _logs(options: argparse.Namespace) -> int:
    """Prints the end of a run's logs."""
    from megatron_dppo.cluster.slurm.status import log_lines, require_run

    print("\n".join(log_lines(require_run(options.run), options.name, options.lines)))
    return 0


def _takes_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder (run.directory)")


def _takes_pace(parser: argparse.ArgumentParser) -> None:
    _takes_run(parser)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")


def _takes_log(parser: argparse.ArgumentParser) -> None:
    _takes_run(parser)
    parser.add_argument(
        "name",
        nargs="?",
        help="such as rank3, engine0, router, slurm; by default supervisor and rank 0",
    )
    parser.add_argument("--lines", type=int, default=40, help="how many (default: 40)")


def _takes_submission(parser: argparse.ArgumentParser) -> None:
    _takes_recipe(parser)
    parser.add_argument("--dry-run", action="store_true", help="show everything and submit nothing")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run a tiny model of the recipe on the job's nodes, and wait for the verdict; docs/rehearsal.md",
    )
    parser.add_argument("--detach", action="store_true", help="with --rehearse: do not wait")
    parser.add_argument("--nodes", type=int, help="how many; by default what the roles fill")
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
        help="--sbatch=FLAG: one more of sbatch",
    )


def _takes_supervision(parser: argparse.ArgumentParser) -> None:
    _takes_recipe(parser)
    # For the job of `submit --rehearse`.
    parser.add_argument("--rehearse", metavar="CALLED", help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--roles-of", metavar="FILE", help=argparse.SUPPRESS)


def _takes_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the run's configuration")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", help="replaces one value of the recipe"
    )
    parser.add_argument("--site", metavar="FILE", help="what this cluster wants; see docs/slurm.md")


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Command]] = {
    "submit": (_takes_submission, _submit),
    "status": (_takes_run, _status),
    "watch": (_takes_pace, _watch),
    "stop": (_takes_run, _stop),
    "logs": (_takes_log, _logs),
    "supervise": (_takes_supervision, _supervise),
}


def _parser() -> argparse.ArgumentParser:
    commands_help = "\n".join(f"  {name:10} {act.__doc__}" for name, (_, act) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Runs on a Slurm cluster; status, watch, stop and logs also of runs on this machine.",
        epilog=f"commands:\n{commands_help}\n`{_PROGRAM} COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    return parser


if __name__ == "__main__":
    sys.exit(main())
