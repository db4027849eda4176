"""Plugins: parts of this package and of other packages that are registered as entry points.

Plugins are found without an import of their modules.

A package registers a part under a group in its pyproject.toml::

    [project.entry-points."megatron_dppo.commands"]
    hello = "my_package.hello"

The groups are the constants below. This package registers its own commands, start checks and reports in the same way,
so that the core does not import them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from megatron_dppo.system.imports import ImportTargetError, import_target

COMMANDS = "megatron_dppo.commands"
"""Modules with ``main(arguments) -> int | None``; the first line of the module's docstring is the help text."""
START_CHECKS = "megatron_dppo.start_checks"
"""Functions ``(TrainConfig, Machine) -> StartCheck`` that judge whether a run can start on a machine."""
RUN_REPORTS = "megatron_dppo.run_reports"
"""Functions ``(run directory) -> Path`` that draw a finished run into a file of its directory."""
REWARDS = "megatron_dppo.rewards"
"""Reward functions or classes, as ``reward.name: package.module:function`` takes them."""
ENVIRONMENTS = "megatron_dppo.environments"
"""Classes of environments, as ``environment.name: package.module:Class`` takes them."""
TRACKERS = "megatron_dppo.trackers"
"""Classes of experiment trackers: ``megatron_dppo.metrics.trackers.ExperimentTracker``."""

_DISTRIBUTION = "megatron-dppo"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""The project file of a clone. An installed wheel has none; its metadata has the entry points."""


def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Find the entry points of ``group`` by name, this package's own first.

    An entry point of this package is left out if its module is missing: a tree without ``cluster/`` or ``diagnostics/``
    works without the plugins of these folders.

    Raises:
        ValueError: two distributions register the same name.
    """
    plugins: dict[str, EntryPoint] = {}
    owners: dict[str, str] = {}
    for distribution, entry in [*_own_entries(group), *_foreign_entries(group)]:
        if entry.name in plugins:
            raise ValueError(
                f"entry point {entry.name!r} of group {group!r}: {owners[entry.name]} and {distribution} both register "
                f"it, expected one distribution"
            )
        plugins[entry.name] = entry
        owners[entry.name] = distribution
    return plugins


def _own_entries(group: str) -> Iterator[tuple[str, EntryPoint]]:
    for entry in _declared_entries(group):
        if module_file(entry.module) is not None:
            yield _DISTRIBUTION, entry


def _declared_entries(group: str) -> list[EntryPoint]:
    """Return the entry points of this package, from the project file of a clone or else from the package's metadata."""
    if _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
        # The file above an installed package may belong to another project.
        if project["name"] == _DISTRIBUTION:
            entries = project.get("entry-points", {}).get(group, {})
            return [EntryPoint(name, value, group) for name, value in entries.items()]
    distribution = importlib.metadata.distribution(_DISTRIBUTION)
    return [entry for entry in distribution.entry_points if entry.group == group]


def _foreign_entries(group: str) -> Iterator[tuple[str, EntryPoint]]:
    for entry in importlib.metadata.entry_points(group=group):
        distribution = "an unnamed distribution"
        if entry.dist is not None:
            distribution = entry.dist.name
        if distribution != _DISTRIBUTION:
            yield distribution, entry


def module_file(module: str) -> Path | None:
    """Return the source file of ``module``, or None. Neither the module nor its parent packages are imported."""
    package, *submodules = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if not submodules:
        if spec.origin is None:
            return None
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        path = Path(folder).joinpath(*submodules)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def targets(group: str) -> dict[str, str]:
    """Return the entry points of ``group``: name -> ``package.module:attribute``."""
    return {name: _target_of(entry) for name, entry in find_plugins(group).items()}


def _target_of(entry: EntryPoint) -> str:
    # The value of an entry point may name extras in brackets.
    return entry.value.partition("[")[0].strip()


def help_line(entry: EntryPoint) -> str:
    """Return the first docstring line of the plugin's module, without its full stop; empty without a docstring."""
    file = module_file(entry.module)
    if file is None:
        return ""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


def load_plugin(entry: EntryPoint) -> Any:
    """Import the object that an entry point names, or the module if it names only a module.

    Raises ValueError if an object can't be imported. Errors of an entry point that names only a module are not changed.
    """
    if not entry.attr:
        return importlib.import_module(entry.module)
    try:
        return import_target(_target_of(entry))
    except ImportTargetError as error:
        raise ValueError(
            f"entry point {entry.name!r} of group {entry.group!r}: {entry.value!r} cannot be imported: {error}"
        ) from error
