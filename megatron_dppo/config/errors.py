"""Errors of a configuration: one ConfigError with every fault, each with the given and the expected value."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, Tag

from megatron_dppo.config.counterparts import key_of_last_part, key_of_name
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.text import cut

MOST_SHOWN = 14
"""Largest number of faults in one message: as many as fit on a screen."""


class ConfigError(RunError, ValueError):
    """A configuration that can't be run.

    ``faults`` has one line for each fault, with the key first. ``source`` is the file.
    """

    def __init__(self, faults: Sequence[str], source: str = "configuration") -> None:
        self.faults = tuple(faults)
        self.source = source
        count = ""
        if len(self.faults) > 1:
            count = f" {len(self.faults)} faults"
        shown_faults = self.faults[:MOST_SHOWN]
        more = []
        if len(shown_faults) < len(faults):
            more = [f"and {len(faults) - len(shown_faults)} more"]
        super().__init__("\n  ".join([f"{source}:{count}", *shown_faults, *more]))


_TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    set: "a list",
    dict: "a table",
    collections.abc.Sequence: "a list",
    collections.abc.Mapping: "a table",
    type(None): "null",
    Any: "anything",
    collections.abc.Callable: "a Python function, which YAML can't hold",
}
_BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


@dataclass(frozen=True)
class FieldExpectation:
    """A key of the schema: its dotted ``path``, what it expects in words, and the first sentence of its docstring."""

    path: str
    expected: str
    summary: str


def given(value: Any) -> str:
    """Return the text of a value as the user wrote it, with its type: ``'x' (str)``."""
    if value is None:
        return "null"
    text = repr(value)
    if isinstance(value, bool):
        text = text.lower()
    return f"{cut(text)} ({type(value).__name__})"


def expectation(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return ``annotation`` in words: ``a number > 0 and <= 1``, ``one of 'auto', 'never'``, ``text or null``."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return expectation(arguments[0], (*arguments[1:], *metadata))
    if origin in (Union, types.UnionType):
        return _union_expectation(arguments, metadata)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is dict and arguments:
        return f"a table of name: {expectation(arguments[1])}"
    if origin is list and arguments:
        return f"a list, each item {expectation(arguments[0])}"
    python_type = origin or annotation
    words = _class_expectation(python_type)
    if python_type in _TYPE_WORDS:
        words = _TYPE_WORDS[python_type] + _bounds(metadata)
    return words


def _union_expectation(members: Sequence[Any], metadata: Iterable[Any]) -> str:
    member_types = [member for member in members if member is not type(None)]
    alternatives = [expectation(member, metadata) for member in member_types]
    if type(None) in members:
        alternatives.append("null")
    if _TYPE_WORDS[float] in alternatives:
        # "a number or a whole number" would say the same twice.
        alternatives = [word for word in alternatives if word != _TYPE_WORDS[int]]
    return " or ".join(dict.fromkeys(alternatives))


def _class_expectation(python_type: Any) -> str:
    if dataclasses.is_dataclass(python_type) or _is_section(python_type):
        return "a table"
    if isinstance(python_type, type) and issubclass(python_type, Enum):
        return "one of " + ", ".join(map(repr, python_type.__members__))
    return f"a Python {getattr(python_type, '__name__', python_type)}, which YAML can't hold"


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = [m for m in metadata if isinstance(m, Gt | Ge | Lt | Le)]
    texts: list[str] = []
    for bound in bounds:
        for bound_type, attribute, sign in _BOUNDS:
            if type(bound) is bound_type:
                texts.append(f"{sign} {getattr(bound, attribute)}")
    if not texts:
        return ""
    return " " + " and ".join(texts)


def field_at(model: type[BaseModel], location: Sequence[Any]) -> FieldExpectation:
    """Return the key of the schema at the ``location`` of a pydantic error.

    The key has the index of a list's item if the item is a table. The key lacks the tag of a union's branch. For
    example, ``("data", "train", "list", 0, "path")`` is the location of ``data.train[0].path``.
    """
    path: list[str] = []
    annotation: Any = model
    metadata: Sequence[Any] = ()
    summary = ""
    for part in location:
        part_type = _bare(annotation)
        if _is_section(part_type):
            path.append(str(part))
            field = part_type.model_fields.get(str(part))
            if field is None:
                break
            annotation = field.annotation
            metadata = field.metadata
            summary = (field.description or "").split(". ")[0].strip().rstrip(".")
            continue
        inner_type = _inside(part_type, part)
        if inner_type is None:
            break
        annotation, metadata = inner_type, ()
        if get_origin(part_type) is dict:
            path.append(str(part))
        elif get_origin(part_type) is list:
            path[-1] += f"[{part}]"
    return FieldExpectation(".".join(path), expectation(annotation, metadata), summary)


def section_at(model: type[BaseModel], location: Sequence[Any]) -> type[BaseModel]:
    """Return the section that contains the key at ``location``."""
    annotation: Any = model
    for part in location[:-1]:
        part_type = _bare(annotation)
        if _is_section(part_type):
            annotation = part_type.model_fields[str(part)].annotation
        else:
            annotation = _inside(part_type, part)
    section = _bare(annotation)
    assert _is_section(section)
    return section


def _bare(annotation: Any) -> Any:
    """Return ``annotation`` without the additions of ``Annotated``."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    return annotation


def _is_section(python_type: Any) -> bool:
    return isinstance(python_type, type) and issubclass(python_type, BaseModel)


def _inside(outer_type: Any, part: Any) -> Any:
    """Return the type at ``part`` of a table, of a list of tables or of a tagged union.

    Returns None for any other type, and for a union's branch that is a plain value: the message then names all
    alternatives of the union.
    """
    origin = get_origin(outer_type)
    arguments = get_args(outer_type)
    if origin is dict:
        return arguments[1]
    if origin is list:
        if _is_section(_bare(arguments[0])):
            return arguments[0]
        return None
    if origin in (Union, types.UnionType):
        for branch in arguments:
            has_tag = Tag(str(part)) in get_args(branch)[1:]
            bare_type = _bare(branch)
            # Types with arguments are lists and tables, such as list[TrainingFile].
            if has_tag and (_is_section(bare_type) or get_args(bare_type)):
                return branch
    return None


def dotted_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path (``section.key``) of every section and key of ``model``, each after ``prefix``."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from dotted_paths(field.annotation, f"{prefix}{name}.")


def closest(name: str, candidates: Iterable[str], count: int = 1) -> list[str]:
    """Return the names that ``name`` was probably meant to be, best first."""
    return difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.6)


def suggestion(model: type[BaseModel], location: Sequence[Any]) -> str | None:
    """Return the key that an unknown key was probably meant to be; None if no key is similar.

    The order of preference is: the key of another package's whole name, a very similar key of the unknown key's
    section, the key of the last part of another package's name, a key of another section, a less similar key of the
    unknown key's section.
    """
    key = str(location[-1])
    prefix = field_at(model, location[:-1]).path
    if prefix:
        prefix += "."
    if same_key := _existing(model, key_of_name(prefix + key)):
        return same_key
    similar_keys = closest(key, section_at(model, location).model_fields)
    if similar_keys and difflib.SequenceMatcher(None, key, similar_keys[0]).ratio() >= 0.8:
        return prefix + similar_keys[0]
    if same_key := _existing(model, key_of_last_part(key)):
        return same_key
    path_of_key = {path.rsplit(".", 1)[-1]: path for path in dotted_paths(model)}
    keys_elsewhere = difflib.get_close_matches(key, list(path_of_key), n=1, cutoff=0.85)
    if keys_elsewhere:
        return path_of_key[keys_elsewhere[0]]
    if similar_keys:
        return prefix + similar_keys[0]
    return None


def _existing(model: type[BaseModel], key: str | None) -> str | None:
    """Return ``key`` if ``model`` has it, or has the table of names that contains it; else None."""
    if key is None:
        return None
    paths = set(dotted_paths(model))
    return key if key in paths or key.rpartition(".")[0] in paths else None
