"""Configurations that build on another one: the top-level key ``base``.

``base: other.yaml`` reads that file first and lays this one over it: tables are merged key by key, every other value
replaces the base's, null included. The path is relative to the file that names it, so recipes can lie side by side
and be started from anywhere. A base may have a base of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.expectations import given

KEY = "base"
_LONGEST_PATH = 4096

Tree = dict[str, Any]


def read_with_bases(path: Path, read: Callable[[Path], Tree]) -> Tree:
    """Read ``path`` and all that it builds on.

    Args:
        path: the configuration's file.
        read: parses one file into its tables.

    Returns:
        The merged tables, without the key ``base``.

    Raises:
        ConfigError: a base is no path, is missing, or builds on itself.
    """
    return _read(path, read, ())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """``over`` laid over ``base``: tables key by key, other values replaced. Neither is changed."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def _is_path(text: str) -> bool:
    return len(text) <= _LONGEST_PATH and "\0" not in text


def _read(path: Path, read: Callable[[Path], Tree], above: tuple[Path, ...]) -> Tree:
    if not _is_path(str(path)):
        raise ConfigError(["this is no path"], given(str(path)))
    where = path.resolve()
    if where in above:
        chain = " -> ".join(p.name for p in (*above[above.index(where) :], where))
        raise ConfigError([f"{KEY}: {chain}: a configuration can't build on itself"], str(path))
    tree = read(path)
    if KEY not in tree:
        return tree
    own = {key: value for key, value in tree.items() if key != KEY}
    name = tree[KEY]
    if not isinstance(name, str):
        problem = f"{KEY}: got {given(name)}, expected the path of a configuration file"
        raise ConfigError([problem], str(path))
    if not _is_path(name):
        raise ConfigError([f"{KEY}: got {given(name)}, which is no path"], str(path))
    base = path.parent / name
    if not base.is_file():
        raise ConfigError([f"{KEY}: got {name!r}, but there is no file {base}"], str(path))
    return merged(_read(base, read, (*above, where)), own)
