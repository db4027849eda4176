"""What the commands on one saved batch of a run have in common: arguments, errors, and how facts are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from megatron_dppo.system.errors import RunError


def batch_parser(
    command: str, description: str, *, step: str, limit: int
) -> argparse.ArgumentParser:
    """A parser of RUN, ``--step`` and ``--limit``. ``step``: which saved batch is the default, in words."""
    parser = argparse.ArgumentParser(
        prog=f"megatron-dppo {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's directory (run.directory)")
    parser.add_argument("--step", type=int, help=f"whose batch; default: the {step} saved one")
    parser.add_argument(
        "--limit", type=int, default=limit, help=f"responses at most ({limit}); 0: all"
    )
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
