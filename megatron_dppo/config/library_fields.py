"""Options that a library declares, as plain data, and whether a configured value fits one of them.

The readers are :mod:`megatron_dppo.trainer.megatron_config` and
:mod:`megatron_dppo.engine.options`, which import their library; nothing here does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.config.expectations import closest, expectation


class LibraryMissingError(ImportError):
    """The library can't be imported in this environment, so its options are not known."""


@dataclass(frozen=True)
class LibraryFields:
    """The options of a library's class. ``title``: class, library and version, for messages.

    ``types``: annotation by field; ``computed``: fields that the library sets itself and takes from
    nobody.
    """

    title: str
    types: Mapping[str, Any]
    computed: frozenset[str] = frozenset()


def field_problem(
    fields: LibraryFields, key: str, value: Any, hidden: Collection[str] = ()
) -> str | None:
    """What is wrong with ``key: value``, in words; None where the library takes it.

    ``hidden``: fields that are never suggested for an unknown key.
    """
    if key in fields.computed:
        return f"expected nothing: {fields.title} computes it"
    if key not in fields.types:
        near = closest(key, fields.types.keys() - fields.computed - {*hidden}, count=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"not a field of {fields.title}{hint}"
    try:
        read_value(fields.types[key], value)
    except ValueError as error:
        return f"{error}, as {fields.title} declares"
    return None


def read_value(annotation: Any, value: Any) -> Any:
    """``value``, which YAML gave, as the type that ``annotation`` asks for.

    A list becomes a tuple where one is declared, a name a member of an enumeration. Raises
    ValueError with what was expected.
    """
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        if isinstance(value, str) and value in annotation.__members__:
            return annotation[value]
        raise ValueError(f"expected {expectation(annotation)}")
    adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    try:  # as JSON, where strictness knows that a list may stand for a tuple
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ValueError(f"expected {expectation(annotation)}") from error
