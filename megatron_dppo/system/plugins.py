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
import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from megatron_dppo.system.imports import (
    ImportTargetError,
    import_module,
    import_object,
    import_target,
)

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
ALGORITHMS = "megatron_dppo.algorithms"
"""Rows of algorithms (``megatron_dppo.algorithms.table.Preset``), as ``algorithm.name: package.module:ROW`` takes
them."""
METRICS = "megatron_dppo.metrics"
"""Rows of metrics (``megatron_dppo.metrics.row.Metric``), as ``tracking.metrics: [package.module:ROW]`` takes
them."""
STAND_INS = "megatron_dppo.stand_ins"
"""Modules of this package that stand in for CUDA and for Transformer Engine's layers (``megatron_dppo.cpu``)."""
FAMILIES = "megatron_dppo.families"
"""Model families (``megatron_dppo.model.families.Family``) by the ``model_type`` of their config.json."""

_DISTRIBUTION = "megatron-dppo"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""The project file of a clone. An installed wheel has none; its metadata has the entry points."""


class PluginError(ValueError):
    """An entry point is malformed or can't be imported, or its name is taken; the message names the distribution."""


def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Find the entry points of ``group`` by name, this package's own first.

    An entry point of this package is left out if its module is missing: a tree without ``cluster/`` or ``diagnostics/``
    works without the plugins of these folders.

    Raises PluginError for a malformed entry point, and if two distributions register the same name.
    """
    plugins, faults = sound_plugins(group)
    if faults:
        raise PluginError("; ".join(faults))
    return plugins


def sound_plugins(group: str) -> tuple[dict[str, EntryPoint], list[str]]:
    """Find the entry points of ``group`` as ``find_plugins`` does; return them without the faulty ones, and the faults.

    This package keeps its names. A name that two other distributions register is left out.
    """
    plugins = {entry.name: entry for entry in _own_entries(group)}
    own_names = set(plugins)
    owners = dict.fromkeys(own_names, _DISTRIBUTION)
    faults: list[str] = []
    for distribution, entry in _foreign_entries(group, faults):
        described = f"entry point {entry.name!r} of group {group!r}"
        if not entry.pattern.fullmatch(entry.value):
            faults.append(
                f"{described}: {distribution} registers {entry.value!r}, expected package.module or "
                "package.module:name"
            )
        elif entry.name in owners:
            owner = owners[entry.name]
            faults.append(
                f"{described}: {owner} and {distribution} both register it, expected one distribution"
            )
            if entry.name not in own_names:
                plugins.pop(entry.name, None)
        else:
            plugins[entry.name] = entry
            owners[entry.name] = distribution
    return plugins, faults


def _own_entries(group: str) -> Iterator[EntryPoint]:
    for entry in _declared_entries(group):
        if module_file(entry.module) is not None:
            yield entry


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


def _foreign_entries(group: str, faults: list[str]) -> Iterator[tuple[str, EntryPoint]]:
    """Yield the other distributions' entry points; append a line to ``faults`` for each unreadable file of them."""
    try:
        entries = list(importlib.metadata.entry_points(group=group))
    # One file of entry points that is no such file ends the search in any exception.
    except Exception:
        entries = list(_readable_entries(group, faults))
    for entry in entries:
        distribution = _distribution_of(entry)
        if distribution != _DISTRIBUTION:
            yield distribution, entry


def _readable_entries(group: str, faults: list[str]) -> Iterator[EntryPoint]:
    names: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = str(distribution.name)
        # The first distribution of a name on the path counts.
        if name in names:
            continue
        names.add(name)
        try:
            entries = list(distribution.entry_points)
        except Exception as error:
            faults.append(
                f"the entry points of {name} cannot be read: {type(error).__name__}: {error}"
            )
            continue
        for entry in entries:
            if entry.group == group:
                yield entry


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


def target_of(kind: str, name: str, group: str, own_names: Iterable[str], form: str) -> str:
    """Return the target ``package.module:attribute`` of a part: ``name`` itself, or that of the entry point ``name``.

    Args:
        kind: noun for the part, for the message.
        name: a target, or the name of an entry point.
        group: group of the entry points.
        own_names: names of this package's parts, for the message. None of them is an entry point.
        form: the form of a target, as in ``package.module:Class``.

    Raises:
        ValueError: ``name`` is neither. The message lists the names.
    """
    if ":" in name:
        return name
    registered = targets(group)
    if name not in registered:
        names = ", ".join(sorted({*own_names, *registered}))
        raise ValueError(f"unknown {kind} {name!r}; there are {names}, or {form}")
    return registered[name]


def import_part(kind: str, name: str, group: str, own_names: Iterable[str], form: str) -> Any:
    """Import the part ``name``, with the arguments of :func:`target_of`.

    Raises ValueError for an unknown name, and for a target that can't be imported.
    """
    try:
        return import_target(target_of(kind, name, group, own_names, form))
    except ImportTargetError as error:
        raise ValueError(f"the {kind} {name!r} can't be imported: {error}") from error


def _target_of(entry: EntryPoint) -> str:
    # The value of an entry point may name extras in brackets.
    return entry.value.partition("[")[0].strip()


def _distribution_of(entry: EntryPoint) -> str:
    # An entry point of this package may come from the project file of a clone.
    return _DISTRIBUTION if entry.dist is None else str(entry.dist.name)


def help_line(entry: EntryPoint) -> str:
    """Return the first docstring line of the plugin's module, without its full stop; empty without a docstring."""
    try:
        file = module_file(entry.module)
        if file is None:
            return ""
        docstring = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    except (ImportError, OSError, SyntaxError, ValueError):
        # The command itself reports that its module can't be read.
        return ""
    return docstring.partition("\n")[0].rstrip(".")


def load_plugin(entry: EntryPoint) -> Any:
    """Import the object that an entry point names, or the module if it names only a module.

    Raises PluginError if it can't be imported.
    """
    try:
        if entry.attr:
            return import_object(_target_of(entry))
        return import_module(entry.module)
    except ImportTargetError as error:
        raise PluginError(
            f"entry point {entry.name!r} of group {entry.group!r}: {entry.value!r} of {_distribution_of(entry)} "
            f"cannot be imported: {error}"
        ) from error


def load_command(entry: EntryPoint) -> Callable[[Sequence[str]], int | None]:
    """Return the function ``main`` of a command's module. Raises PluginError if there is none."""
    try:
        main: Callable[[Sequence[str]], int | None] = import_module(entry.module).main
    except (ImportTargetError, AttributeError) as error:
        raise PluginError(
            f"the command {entry.name!r} of {_distribution_of(entry)} ({entry.value}) cannot be imported: {error}"
        ) from error
    return main
