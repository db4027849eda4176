"""The command-line arguments that name a configuration and replace its values, declared once for every command."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser, name: str = "config") -> None:
    """Declare the configuration file, as the argument ``name``, and the ``overrides`` of its values."""
    parser.add_argument(name, metavar=f"{name.upper()}.yaml", help="the run's configuration")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        metavar="key.path=value",
        nargs="*",
        help="replaces one value, e.g. algorithm.name=grpo-clip-higher or optimizer.lr=1e-6; "
        "nothing after '=' means null",
    )
