"""``megatron-dppo gpu-check``: what a person runs first on a GPU machine. docs/gpu_check.md

A part of the check is a function in a module of ``parts/`` under ``@part``, found by being there.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PARTS = "megatron_dppo.gpu_check.parts"
"""The package in which parts are looked for."""


class LackingError(Exception):
    """A part can't run on this machine; the message says what is missing."""


@dataclass(frozen=True)
class Row:
    """One thing that a part looked at.

    Attributes:
        label: its name.
        measured: what was found, with its unit.
        expected: what should be found; empty where nothing is expected.
        holds: whether it was; None: nothing to judge.
        figures: the measured numbers by name, for programs.
    """

    label: str
    measured: str
    expected: str = ""
    holds: bool | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Where a part works. ``folder``: its own, for files that stay. ``gpus``: how many there are."""

    folder: Path
    gpus: int


@dataclass(frozen=True)
class CheckPart:
    """``run`` yields a row for each thing it looked at, and raises ``LackingError`` for what it can't do without.

    ``shows``: what it shows, in a line. ``limit_s``: seconds after which it is ended.
    """

    run: Callable[[Bench], Iterator[Row]]
    shows: str
    limit_s: float

    @property
    def name(self) -> str:
        """By which it is chosen: its function's."""
        return self.run.__name__


def part(shows: str, limit_s: float) -> Callable[[Callable[[Bench], Iterator[Row]]], CheckPart]:
    return lambda run: CheckPart(run, shows, limit_s)


def discover(package: str = PARTS) -> list[CheckPart]:
    """All parts in the modules of ``package``, those with the shortest limit first."""
    folder = importlib.import_module(package).__path__
    modules = [importlib.import_module(f"{package}.{m.name}") for m in pkgutil.iter_modules(folder)]
    parts = [x for module in modules for x in vars(module).values() if isinstance(x, CheckPart)]
    return sorted(parts, key=lambda p: (p.limit_s, p.name))


def at_most(label: str, measured: float, bound: float, unit: str = "") -> Row:
    """A row that holds where ``measured`` is finite and not above ``bound``."""
    figures = {"measured": measured}
    return Row(
        label, f"{measured:.2g}{unit}", f"at most {bound:.2g}{unit}", measured <= bound, figures
    )


def run_command(arguments: Sequence[str]) -> int:
    """Run ``megatron-dppo`` with ``arguments``, its output in the part's log; the exit code."""
    print(" ".join(["megatron-dppo", *arguments]), flush=True)
    return subprocess.run(
        [sys.executable, "-m", "megatron_dppo", *arguments], check=False
    ).returncode


def must_run(arguments: Sequence[str]) -> None:
    """As ``run_command``. Raises RuntimeError for an exit code other than 0."""
    if code := run_command(arguments):
        raise RuntimeError(f"megatron-dppo {' '.join(arguments)} ended with exit code {code}")
