"""From a YAML file and ``key.path=value`` words to a :class:`TrainConfig`, or one error that lists
all problems.

A relative path in a configuration is relative to the directory that the program is started in.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import ValidationError

from megatron_dppo.config.errors import MOST_SHOWN, ConfigError
from megatron_dppo.config.expectations import field_at, given, section_at, suggestion
from megatron_dppo.config.inheritance import read_with_bases
from megatron_dppo.config.schema import Section, TrainConfig
from megatron_dppo.config.values import unusable_values
from megatron_dppo.config.yaml_core import dump_yaml, parse_scalar, parse_yaml

_LONGEST_PATH = 1024
C = TypeVar("C", bound=Section)

log = logging.getLogger(__name__)

EARLIER_NAMES = {("rollout", "drop_groups_without_spread"): "drop_zero_variance_groups"}
"""(section, key) of an earlier version -> the key's name now."""

_KEY_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """:func:`load_as` for a run of reinforcement learning."""
    return load_as(TrainConfig, path, overrides)


def load_as(schema: type[C], path: str | Path | None, overrides: Sequence[str] = ()) -> C:
    """Read ``path`` (None: an empty file) as ``schema``, set the overrides (the last one of a key wins), validate every
    field by itself.

    An override's value is a YAML scalar or a flow list; nothing after ``=`` means null; a missing
    table is made. ``base: other.yaml`` builds on that file
    (:mod:`megatron_dppo.config.inheritance`). ``{key.path}`` in ``run.directory`` stands for that
    value. Checks across sections are :mod:`megatron_dppo.config.checks`'s. Raises ConfigError.
    """
    tree = {} if path is None else read_with_bases(Path(path), partial(_read_tree, schema=schema))
    problems = _apply_overrides(tree, overrides)
    _take_null_sets_away(tree)
    _rename_earlier_keys(tree)
    problems += _fill_in_directory(tree)
    config, invalid = _validate(tree, schema)
    problems += invalid if config is None else unusable_values(config)
    if config is None or problems:
        raise ConfigError(problems, "the command line" if path is None else str(path))
    return config


def resolved_yaml(config: Section) -> str:
    """The whole configuration, defaults filled in; :func:`load_config` reads it back to an equal
    one."""
    return dump_yaml(config.model_dump())


def _source(path: Path) -> str:
    """A path for a message: whole, but cut where nobody would read it through, or its characters can't be shown."""
    text = str(path)
    return text if len(text) <= _LONGEST_PATH and text.isprintable() else given(text)


def _read_tree(path: Path, schema: type[Section]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"can't be read: {reason}"], _source(path)) from error
    try:
        tree = parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError([f"not valid YAML: {error.problem}"], at) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"not valid YAML: {reason}"], str(path)) from error
    except RecursionError as error:
        raise ConfigError(["nested too deeply, or in itself"], str(path)) from error
    if not isinstance(tree, dict):
        problem = f"got {given(tree)} at the top level, expected a table with the sections "
        raise ConfigError([problem + ", ".join(schema.model_fields)], str(path))
    # A section whose lines are all commented out parses as null and means an empty table.
    return {
        name: {} if value is None and _is_table(schema, name) else value
        for name, value in tree.items()
    }


def _is_table(schema: type[Section], name: str) -> bool:
    """Whether the schema has a table there; what it doesn't know counts as one."""
    field = schema.model_fields.get(name)
    annotation = None if field is None else field.annotation
    return annotation is None or isinstance(annotation, type) or get_origin(annotation) is dict


def _apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Set each in ``tree``; the problems of those that can't be."""
    problems = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not _KEY_PATH.fullmatch(key):
            problems.append(f"override {override!r}: expected key.path=value")
            continue
        try:
            value = parse_scalar(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            problems.append(f"override {override!r}: the value is not valid YAML: {reason}")
            continue
        problems += _set(tree, key, value)
    return problems


def _set(tree: dict[str, Any], key: str, value: Any) -> list[str]:
    *tables, leaf = key.split(".")
    for depth, name in enumerate(tables):
        table = tree.setdefault(name, {})
        if not isinstance(table, dict):
            path = ".".join(tables[: depth + 1])
            return [f"override {key}: {path} is {given(table)}, not a table"]
        tree = table
    tree[leaf] = value
    return []


def _take_null_sets_away(tree: dict[str, Any]) -> None:
    """``data.evaluation.NAME: null`` removes a set that an inherited file, or this one, names."""
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("evaluation"), dict):
        sets = data["evaluation"]
        data["evaluation"] = {name: path for name, path in sets.items() if path is not None}


def _rename_earlier_keys(tree: dict[str, Any]) -> None:
    """Give keys that an earlier version wrote their present names."""
    for (section, earlier), name in EARLIER_NAMES.items():
        table = tree.get(section)
        if isinstance(table, dict) and earlier in table and name not in table:
            log.warning("%s.%s is called %s.%s now", section, earlier, section, name)
            table[name] = table.pop(earlier)


def _fill_in_directory(tree: dict[str, Any]) -> list[str]:
    """Replace each ``{key.path}`` in ``run.directory``; the problems of those that can't be."""
    run = tree.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("directory"), str):
        return []
    problems = []

    def value_of(match: re.Match[str]) -> str:
        value: Any = tree
        for name in match[1].split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None or isinstance(value, dict | list):
            problems.append(
                f"run.directory: {match[0]} stands for nothing, expected the path of a value that "
                "this file or an override sets"
            )
        return str(value)

    run["directory"] = re.sub(r"\{([^{}]*)\}", value_of, run["directory"])
    return problems


def _validate(tree: dict[str, Any], schema: type[C]) -> tuple[C | None, list[str]]:
    try:
        return schema.model_validate(tree), []
    except ValidationError as error:
        errors = error.errors()
        told = errors[: 2 * MOST_SHOWN]  # to guess what thousands of keys meant takes its time
        problems = [_problem(schema, e["type"], e["loc"], e["input"]) for e in told]
        # A union reports each of its branches.
        return None, [*dict.fromkeys(problems), *(str(e["loc"]) for e in errors[len(told) :])]


def _problem(schema: type[Section], kind: str, location: tuple[int | str, ...], value: Any) -> str:
    """One line on one pydantic error."""
    if kind == "extra_forbidden":
        return _unknown_key(schema, location, value)
    field = field_at(schema, location)
    if kind == "missing":
        meaning = f" ({field.summary})" if field.summary else ""
        return f"{field.path}: missing, expected {field.expected}{meaning}"
    return f"{field.path}: got {given(value)}, expected {field.expected}"


def _unknown_key(schema: type[Section], location: tuple[int | str, ...], value: Any) -> str:
    path = field_at(schema, location).path
    meant = suggestion(schema, location)
    hint = f"did you mean {meant}? " if meant else ""
    known = ", ".join(section_at(schema, location).model_fields)
    return f"{path}: unknown key (got {given(value)}); {hint}Expected one of: {known}"
