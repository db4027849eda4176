"""Names of other RL packages beside the keys of this package: the table in ``counterparts.toml``.

The hint for an unknown key reads the table, and tools/coming_from.py prints docs/coming_from.md from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("verl", "TRL", "slime", "NeMo-RL", "prime-rl")


@dataclass(frozen=True)
class Counterpart:
    """A key of this package, and the names of the same setting elsewhere.

    Attributes:
        key: the key here; with a value after ``=`` if one value of the key is the counterpart.
        names: package -> its names, dotted as in its configuration, without leading dashes.
        note: difference in meaning; empty if there is none.
    """

    key: str
    names: Mapping[str, Sequence[str]]
    note: str = ""


def _read() -> Iterator[Counterpart]:
    """Yield the rows of ``counterparts.toml``."""
    text = Path(__file__).with_name("counterparts.toml").read_text(encoding="utf-8")
    for key, columns in tomllib.loads(text).items():
        note = columns.pop("difference", "")
        yield Counterpart(key, columns, note)


COUNTERPARTS = tuple(_read())
"""The rows, in the order of the page."""


def key_of_name(path: str) -> str | None:
    """Return the key here for a whole name of another package, or for two parts at least of its end; else None.

    ``path``: the dotted name as the user wrote it.
    """
    name = path.replace("-", "_")
    for other_name, key in _keys_by_name():
        shorter, longer = sorted((name, other_name), key=len)
        if name == other_name or ("." in shorter and longer.endswith(f".{shorter}")):
            return key
    return None


def key_of_last_part(path: str) -> str | None:
    """Return the key here for the last part of another package's name; None without one.

    The first row counts if the packages give one last part different meanings.
    """
    last_part = path.replace("-", "_").rpartition(".")[2]
    for other_name, key in _keys_by_name():
        if other_name.rpartition(".")[2] == last_part:
            return key
    return None


def _keys_by_name() -> Iterator[tuple[str, str]]:
    """Yield each name of another package with the key here, without a value."""
    for row in COUNTERPARTS:
        for names in row.names.values():
            for name in names:
                yield name, row.key.partition("=")[0]
