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

from megatron_dppo.system.errors import RunError

MOST_SHOWN = 14
"""Most faults in one message: as many as a screen holds."""


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


_NAMES = {
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
_LONGEST = 60


@dataclass(frozen=True)
class FieldExpectation:
    """A key of the schema: its dotted ``path``, what it expects in words, and the first sentence of its docstring."""

    path: str
    expected: str
    summary: str


def given(value: Any) -> str:
    """Return a value as the user would recognise it, with its type: ``'x' (str)``."""
    if value is None:
        return "null"
    text = repr(value)
    if isinstance(value, bool):
        text = text.lower()
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 3] + "..."
    return f"{text} ({type(value).__name__})"


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
    name = _NAMES.get(origin or annotation)
    return name + _bounds(metadata) if name else _class_expectation(origin or annotation)


def _union_expectation(members: Sequence[Any], metadata: Iterable[Any]) -> str:
    member_types = [member for member in members if member is not type(None)]
    alternatives = [expectation(member, metadata) for member in member_types]
    if type(None) in members:
        alternatives.append("null")
    if _NAMES[float] in alternatives:
        # Every whole number is a number.
        alternatives = [word for word in alternatives if word != _NAMES[int]]
    return " or ".join(dict.fromkeys(alternatives))


def _class_expectation(kind: Any) -> str:
    if dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "a table"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(map(repr, kind.__members__))
    return f"a Python {getattr(kind, '__name__', kind)}, which YAML can't hold"


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = [m for m in metadata if isinstance(m, Gt | Ge | Lt | Le)]
    texts: list[str] = []
    for bound in bounds:
        for kind, attribute, sign in _BOUNDS:
            if type(bound) is kind:
                texts.append(f"{sign} {getattr(bound, attribute)}")
    return " " + " and ".join(texts) if texts else ""


def field_at(model: type[BaseModel], location: Sequence[Any]) -> FieldExpectation:
    """Return the key that the ``location`` of a pydantic error stands for.

    The branch of a union is no key. An item of a list is a key where it is a table.
    """
    path: list[str] = []
    annotation: Any = model
    metadata: Sequence[Any] = ()
    summary = ""
    for part in location:
        kind = _bare(annotation)
        if _is_section(kind):
            path.append(str(part))
            field = kind.model_fields.get(str(part))
            if field is None:
                break
            annotation = field.annotation
            metadata = field.metadata
            summary = (field.description or "").split(". ")[0].strip().rstrip(".")
            continue
        inner_kind = _inside(kind, part)
        if inner_kind is None:
            break
        annotation, metadata = inner_kind, ()
        if get_origin(kind) is dict:
            path.append(str(part))
        elif get_origin(kind) is list:
            path[-1] += f"[{part}]"
    return FieldExpectation(".".join(path), expectation(annotation, metadata), summary)


def section_at(model: type[BaseModel], location: Sequence[Any]) -> type[BaseModel]:
    annotation: Any = model
    for part in location[:-1]:
        kind = _bare(annotation)
        section = _is_section(kind)
        annotation = kind.model_fields[str(part)].annotation if section else _inside(kind, part)
    bare = _bare(annotation)
    assert _is_section(bare)
    return bare


def _bare(annotation: Any) -> Any:
    """Return ``annotation`` without the additions of ``Annotated``."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    return annotation


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _inside(kind: Any, part: Any) -> Any:
    """Return the type inside a table, a list of tables or a tagged union at ``part``.

    Returns None inside any other type, and for a union's branch that is a plain value: the union's own text says more.
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is dict:
        return arguments[1]
    if origin is list:
        if _is_section(_bare(arguments[0])):
            return arguments[0]
        return None
    if origin in (Union, types.UnionType):
        tagged = [a for a in arguments if Tag(str(part)) in get_args(a)[1:]]
        return next((a for a in tagged if _is_section(_bare(a)) or get_args(_bare(a))), None)
    return None


def dotted_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key of the schema."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from dotted_paths(field.annotation, f"{prefix}{name}.")


def closest(name: str, candidates: Iterable[str], count: int = 1) -> list[str]:
    """Return the names that ``name`` was probably meant to be, best first."""
    return difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.6)


def suggestion(model: type[BaseModel], location: Sequence[Any]) -> str | None:
    """Return the key that an unknown key was probably meant to be: in its section, or of that name in another
    section.
    """
    key = str(location[-1])
    prefix = field_at(model, location[:-1]).path
    prefix += "." if prefix else ""
    similar_keys = closest(key, section_at(model, location).model_fields)
    if similar_keys and difflib.SequenceMatcher(None, key, similar_keys[0]).ratio() >= 0.8:
        return prefix + similar_keys[0]
    leaves = {path.rsplit(".", 1)[-1]: path for path in dotted_paths(model)}
    elsewhere = difflib.get_close_matches(key, list(leaves), n=1, cutoff=0.85)
    if elsewhere:
        return leaves[elsewhere[0]]
    if similar_keys:
        return prefix + similar_keys[0]
    return None
