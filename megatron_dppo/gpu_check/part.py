"""What a part of the check is: a module in ``parts/`` with three names, found by being there.

- ``SHOWS``: what it shows, in one line.
- ``LIMIT_S``: seconds after which it is ended.
- ``run(site)``: yields a ``Row`` for each thing that was looked at; raises ``LackingError`` for what it
  can't do without and this machine lacks.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
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
        what: its name.
        measured: what was found, with its unit.
        expected: what should be found; empty where nothing is expected.
        holds: whether it was; None: nothing to judge.
        figures: the measured numbers by name, for programs.
    """

    what: str
    measured: str
    expected: str = ""
    holds: bool | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Where a part works. ``folder``: its own, for files that stay. ``gpus``: how many there are."""

    folder: Path
    gpus: int


@dataclass(frozen=True)
class Part:
    """One part: its module, and what that says of itself."""

    name: str
    module: str
    shows: str
    limit_s: float
    run: Callable[[Site], Iterator[Row]]


def load(module: str) -> Part:
    """The part that a module is."""
    found = importlib.import_module(module)
    return Part(module.rpartition(".")[2], module, found.SHOWS, found.LIMIT_S, found.run)


def discover(package: str = PARTS) -> list[Part]:
    """All parts of ``package``, those with the shortest limit first."""
    folder = importlib.import_module(package).__path__
    names = [module.name for module in pkgutil.iter_modules(folder)]
    return sorted((load(f"{package}.{name}") for name in names), key=lambda p: (p.limit_s, p.name))


def at_most(what: str, measured: float, bound: float, unit: str = "") -> Row:
    """A row that holds where ``measured`` is finite and not above ``bound``."""
    told = f"{measured:.2g}{unit}"
    return Row(what, told, f"at most {bound:.2g}{unit}", measured <= bound, {"measured": measured})
