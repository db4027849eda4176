"""Read a YAML file and ``key.path=value`` words into a :class:`TrainConfig`, or raise one error that lists all faults.

A relative path in a configuration is relative to the directory that the program is started in.

A configuration is YAML of the 1.2 core schema (:mod:`megatron_dppo.system.yaml_core`).

A configuration can build on a base. Its top-level key ``base: other.yaml`` reads other.yaml first. Then tables are
merged key by key, and every other value, null included, replaces the base's value. The base's path is relative to
the file that has the key ``base``, so a run can be started in any directory. A base may itself have a base.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import ValidationError

from megatron_dppo.config.counterparts import key_of_last_part, key_of_name
from megatron_dppo.config.data_schema import Section
from megatron_dppo.config.errors import (
    MOST_SHOWN,
    ConfigError,
    field_at,
    given,
    section_at,
    suggestion,
)
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.config.value_limits import leaves, unusable_values
from megatron_dppo.system.files import hash_fault
from megatron_dppo.system.text import single_line
from megatron_dppo.system.yaml_core import dump_yaml, parse_scalar, parse_yaml

_BASE_KEY = "base"
"""Key of the file that a configuration builds on."""
_MAX_PATH = 4096
"""Characters of the longest path that Linux allows."""

Tree = dict[str, Any]
"""The tables of a configuration as read from YAML, before the schema validates them."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Return ``over`` laid over ``base``: tables merged key by key, other values replaced. Neither argument is
    changed.
    """
    result = dict(base)
    for key, value in over.items():
        base_value = result.get(key)
        if isinstance(base_value, Mapping) and isinstance(value, Mapping):
            result[key] = merged(base_value, value)
        else:
            result[key] = value
    return result


def _is_path(text: str) -> bool:
    return len(text) <= _MAX_PATH and "\0" not in text


def read_with_bases(path: Path, schema: type[Section], descendants: tuple[Path, ...] = ()) -> Tree:
    """Return the tables of ``path`` and of all files that it builds on, merged, without the key ``base``.

    ``descendants`` are the files that build on ``path``. Raises ConfigError if a file can't be read as ``schema``'s
    sections, or if a base is no path, is missing, or builds on itself.
    """
    if not _is_path(str(path)):
        raise ConfigError(["this is no path"], given(str(path)))
    resolved_path = path.resolve()
    if resolved_path in descendants:
        cycle = (*descendants[descendants.index(resolved_path) :], resolved_path)
        chain = " -> ".join(cycle_path.name for cycle_path in cycle)
        raise ConfigError(
            [f"{_BASE_KEY}: {chain}: a configuration can't build on itself"], str(path)
        )
    tree = _read_tree(path, schema)
    if _BASE_KEY not in tree:
        return tree
    name = tree.pop(_BASE_KEY)
    if not isinstance(name, str):
        fault = f"{_BASE_KEY}: got {given(name)}, expected the path of a configuration file"
        raise ConfigError([fault], str(path))
    if not _is_path(name):
        raise ConfigError([f"{_BASE_KEY}: got {given(name)}, which is no path"], str(path))
    base = path.parent / name
    if not base.is_file():
        raise ConfigError([f"{_BASE_KEY}: got {name!r}, but there is no file {base}"], str(path))
    return merged(read_with_bases(base, schema, (*descendants, resolved_path)), tree)


_MAX_SHOWN_PATH = 1024
"""Characters of the longest path that a message shows whole."""
C = TypeVar("C", bound=Section)

_KEY_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load the configuration of a reinforcement-learning run; :func:`load_as` describes it."""
    return load_as(TrainConfig, path, overrides)


def load_as(schema: type[C], path: str | Path | None, overrides: Sequence[str] = ()) -> C:
    """Read ``path`` (None: an empty file) as ``schema``, apply the overrides, and validate every field separately.

    If a key has several overrides, the last override counts. An override's value is a YAML scalar or a flow list;
    nothing after ``=`` means null; a missing table is created. ``{key.path}`` in ``run.directory`` is replaced by the
    value of the key. Checks across sections are in :mod:`megatron_dppo.config.checks`. Raises ConfigError.
    """
    tree = {}
    if path is not None:
        tree = read_with_bases(Path(path), schema)
    faults = _apply_overrides(tree, overrides)
    _drop_null_sets(tree)
    _drop_former_keys(tree)
    faults += _fill_in_directory(tree)
    config, schema_faults = _validate(tree, schema)
    faults += schema_faults
    if config is not None:
        faults += unusable_values(config)
    if config is None or faults:
        raise ConfigError(faults, "the command line" if path is None else str(path))
    return config


_STAND_INS: Mapping[str, Any] = {
    "run": {},
    "model": {},
    "data": {},
    "rollout": {},
    "training": {},
    "optimizer": {},
    "run.directory": "/no/directory/given",
    "run.steps": 1,
    "model.hf_checkpoint": "/no/checkpoint/given",
    "data.train": "/no/data/given",
    "rollout.prompts_per_step": 1,
    "rollout.group_size": 2,
    "rollout.max_response_tokens": 1,
    "training.prompts_per_mini_batch": 1,
    "training.micro_batch_tokens": 1,
    "optimizer.lr": 1e-6,
}
"""Required key -> the value that replaces it if it is missing, so that the remaining keys can be checked. The paths do
not exist."""
_SECTIONS_OF_A_FUNCTION = ("reward", "environment")
"""Sections whose keys depend on each other: ``options`` are arguments of the function ``name``."""
_MAX_ROUNDS = 6
"""Largest number of rounds of validating and removing faulty values."""


@dataclass(frozen=True)
class Remainder:
    """The values of a faulty configuration that can still be checked.

    Attributes:
        config: the configuration, with a default or one of ``_STAND_INS`` in place of each faulty value.
        faulty_keys: dotted keys of the values that were replaced.
    """

    config: TrainConfig
    faulty_keys: frozenset[str]

    def has_faulty(self, sections: Iterable[str]) -> bool:
        """Whether a key of these sections is faulty."""
        return any(key.partition(".")[0] in sections for key in self.faulty_keys)

    def is_certain(self, fault: str) -> bool:
        """Whether ``fault``, reported by a check of ``config``, certainly comes from values that were not replaced.

        The fault may come from the replaced value of a faulty key in three cases: the fault's text contains this key,
        the fault is about a table that contains this key, or fault and key are in the same section of a function.
        """
        fault_key = fault.partition(":")[0]
        for key in self.faulty_keys:
            section = key.partition(".")[0]
            if section in _SECTIONS_OF_A_FUNCTION and fault.startswith(section):
                return False
            if key.startswith(f"{fault_key}."):
                return False
            if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", fault):
                return False
        return True


def load_remainder(path: str | Path, overrides: Sequence[str] = ()) -> Remainder | None:
    """Load a configuration that :func:`load_config` refuses, without its faulty values.

    Returns None if the file can't be read as a configuration, or has more faults than a message shows.
    """
    try:
        tree = read_with_bases(Path(path), TrainConfig)
    except ConfigError:
        return None
    faulty_keys: set[str] = set()
    for override in overrides:
        if _apply_overrides(tree, [override]):
            faulty_keys.add(override.partition("=")[0])
    _drop_null_sets(tree)
    _drop_former_keys(tree)
    if _fill_in_directory(tree):
        faulty_keys.add("run.directory")
        _remove(tree, ["run", "directory"])
    # A round may remove a required value; the next round sets its stand-in.
    for _ in range(_MAX_ROUNDS):
        try:
            config = TrainConfig.model_validate(tree)
        except ValidationError as error:
            if error.error_count() > 2 * MOST_SHOWN:
                return None
            for details in error.errors():
                faulty_keys |= _replace(tree, details["type"], details["loc"])
            continue
        faults = unusable_values(config)
        if not faults:
            return Remainder(config, frozenset(faulty_keys))
        for fault in faults:
            key = fault.partition(":")[0]
            faulty_keys.add(key)
            _remove(tree, key.split("."))
    return None


def _replace(tree: Tree, error_type: str, location: Sequence[int | str]) -> set[str]:
    """Remove the value at which pydantic reports an error. If a required value is missing, set its stand-in.

    Returns the keys whose values were lost. If the schema has no such key, the result also has the key that the user
    probably meant.
    """
    path = field_at(TrainConfig, location).path
    keys = {path.partition("[")[0]}
    if error_type == "missing" and path in _STAND_INS:
        stand_in = _STAND_INS[path]
        if isinstance(stand_in, dict):
            # The next round reports each missing key of this section.
            _set(tree, path, dict(stand_in))
            return set()
        _set(tree, path, stand_in)
        return keys
    if error_type == "extra_forbidden" and (meant_key := suggestion(TrainConfig, location)):
        keys.add(meant_key)
    _remove(tree, location)
    return keys


def _remove(tree: Tree, location: Sequence[int | str]) -> None:
    """Remove the value at ``location``, or the smallest value that contains it and is an entry of a table.

    A faulty item of a list thus removes the whole list.
    """
    table: Any = tree
    # Descend while the next part is a key of a table. After the last part comes None, which is no key of any table.
    for part, next_part in zip(location, [*location[1:], None], strict=True):
        value = table.get(part)
        if not isinstance(value, dict) or next_part not in value:
            table.pop(part, None)
            return
        table = value


def resolved_yaml(config: Section) -> str:
    """Return the whole configuration with defaults filled in, as a text that :func:`load_config` reads back."""
    return dump_yaml(config.model_dump())


def _source(path: Path) -> str:
    """Return a path for a message; a long path, or a path with unprintable characters, is quoted and cut."""
    text = str(path)
    if len(text) <= _MAX_SHOWN_PATH and text.isprintable():
        return text
    return given(text)


def _read_tree(path: Path, schema: type[Section]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"can't be read: {reason}"], _source(path)) from error
    if (fault := hash_fault(text)) is not None:
        raise ConfigError([f"altered: {fault}"], _source(path))
    try:
        tree = parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        position = str(path)
        if mark := error.problem_mark:
            position = f"{path}:{mark.line + 1}:{mark.column + 1}"
        raise ConfigError([f"not valid YAML: {error.problem}"], position) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = single_line(error)
        raise ConfigError([f"not valid YAML: {reason}"], str(path)) from error
    if not isinstance(tree, dict):
        fault = f"got {given(tree)} at the top level, expected a table with the sections "
        raise ConfigError([fault + ", ".join(schema.model_fields)], str(path))
    # A section whose lines are all comments is parsed as null and means an empty table.
    for name, value in tree.items():
        if value is None and _is_table(schema, name):
            tree[name] = {}
    return tree


def _is_table(schema: type[Section], name: str) -> bool:
    """Whether the schema has a table of this name; an unknown name counts as a table."""
    field = schema.model_fields.get(name)
    if field is None:
        return True
    # A top-level key is a section (a class) or a forwarded table (a dict).
    return isinstance(field.annotation, type) or get_origin(field.annotation) is dict


def _apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Set each override in ``tree``, and return the faults of the overrides that can't be set."""
    faults = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not _KEY_PATH.fullmatch(key):
            faults.append(f"override {override!r}: expected key.path=value")
            continue
        try:
            value = parse_scalar(text)
        except (yaml.YAMLError, ValueError) as error:
            reason = single_line(error)
            faults.append(f"override {override!r}: the value is not valid YAML: {reason}")
            continue
        faults += _set(tree, key, value)
    return faults


def _set(tree: dict[str, Any], key: str, value: Any) -> list[str]:
    """Set the value of a dotted key, and create missing tables; return a fault if a table's name has another value."""
    *table_names, last_name = key.split(".")
    table = tree
    for depth, name in enumerate(table_names):
        inner_table = table.setdefault(name, {})
        if not isinstance(inner_table, dict):
            path = ".".join(table_names[: depth + 1])
            return [f"override {key}: {path} is {given(inner_table)}, not a table"]
        table = inner_table
    table[last_name] = value
    return []


def _drop_null_sets(tree: dict[str, Any]) -> None:
    """Remove sets and rewards whose value is null.

    ``data.evaluation.NAME: null`` removes a set of the base (or of this file), ``reward.further.NAME: null`` a reward.
    """
    for section, key in (("data", "evaluation"), ("reward", "further")):
        table = tree.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), dict):
            table[key] = {name: value for name, value in table[key].items() if value is not None}


_FORMER_KEYS = [("weight_sync", "senders")]
"""Keys that earlier versions had. Their saved configurations have them with null where nobody set them."""


def _drop_former_keys(tree: dict[str, Any]) -> None:
    """Remove former keys whose value is null. A former key with another value stays, and is refused as unknown."""
    for section, key in _FORMER_KEYS:
        table = tree.get(section)
        if isinstance(table, dict) and table.get(key) is None:
            table.pop(key, None)


def _fill_in_directory(tree: dict[str, Any]) -> list[str]:
    """Replace each ``{key.path}`` in ``run.directory`` by its value; return the faults of keys without a value."""
    run = tree.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("directory"), str):
        return []
    faults = []

    def value_of(match: re.Match[str]) -> str:
        value: Any = tree
        for name in match[1].split("."):
            if not isinstance(value, dict):
                value = None
                break
            value = value.get(name)
        if value is None or isinstance(value, dict | list):
            faults.append(
                f"run.directory: {match[0]} stands for nothing, expected the path of a value that "
                "this file or an override sets"
            )
        return str(value)

    run["directory"] = re.sub(r"\{([^{}]*)\}", value_of, run["directory"])
    return faults


def _validate(tree: dict[str, Any], schema: type[C]) -> tuple[C | None, list[str]]:
    """Return the validated configuration and no faults, or None and the faults."""
    try:
        return schema.model_validate(tree), []
    except ValidationError as error:
        errors = error.errors()
        # Describe only as many errors as a message may show: for thousands of unknown keys, the search for the keys
        # that were meant takes minutes. Describe two errors for each line that is shown, because equal lines are
        # dropped: a union reports one error for each of its branches, and their lines may be equal.
        described_errors = errors[: 2 * MOST_SHOWN]
        faults = [_fault(schema, e["type"], e["loc"], e["input"]) for e in described_errors]
        # Most messages only count the other errors, so their locations are enough.
        other_locations = [str(e["loc"]) for e in errors[len(described_errors) :]]
        return None, [*dict.fromkeys(faults), *other_locations]


def _fault(
    schema: type[Section], error_type: str, location: tuple[int | str, ...], value: Any
) -> str:
    """Return one line about one pydantic error."""
    if error_type == "extra_forbidden":
        return _unknown_key(schema, location, value)
    field = field_at(schema, location)
    if error_type == "missing":
        meaning = ""
        if field.summary:
            meaning = f" ({field.summary})"
        return f"{field.path}: missing, expected {field.expected}{meaning}"
    reason = _REFUSAL_REASONS.get((field.path, str(value)), "")
    return f"{field.path}: got {given(value)}, expected {field.expected}{reason}"


_REFUSAL_REASONS = {
    (
        "rollout.interrupt",
        "in_place",
    ): ". A server that pauses in place goes on with keys and values of the old "
    "weights, so it samples from a distribution that no version of the weights has; see docs/staleness.md"
}
"""Reason why a value that other packages offer is refused here, by key and value."""


_MOST_COUNTERPARTS = 8
"""Largest number of another package's keys that a message translates."""


def _counterparts(path: str, value: Any) -> list[str]:
    """Translate the keys of an unknown table, as in ``n is rollout.group_size``. Keys without a counterpart are left
    out.
    """
    translations: list[str] = []
    if isinstance(value, dict):
        for other_key, _ in leaves(value, path):
            if key := key_of_name(other_key) or key_of_last_part(other_key):
                translations.append(f"{other_key.removeprefix(f'{path}.')} is {key}")
    return translations


def _unknown_key(schema: type[Section], location: tuple[int | str, ...], value: Any) -> str:
    path = field_at(schema, location).path
    hint = ""
    if meant_key := suggestion(schema, location):
        hint = f"did you mean {meant_key}? "
    elif same_keys := _counterparts(path, value):
        hint = f"in this package {', '.join(same_keys[:_MOST_COUNTERPARTS])}. "
    expected_keys = ", ".join(section_at(schema, location).model_fields)
    return f"{path}: unknown key (got {given(value)}); {hint}Expected one of: {expected_keys}"
