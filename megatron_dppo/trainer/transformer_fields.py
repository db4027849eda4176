"""The fields of Megatron-Core's TransformerConfig, and a ``megatron:`` table as their values."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any, get_type_hints

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dppo.config.forwarded import MEGATRON, megatron_problems
from megatron_dppo.config.library_fields import LibraryFields, read_value


@functools.cache
def transformer_fields() -> LibraryFields:
    """Every field that TransformerConfig's constructor takes, inherited ones included."""
    hints = get_type_hints(TransformerConfig)
    version = importlib.metadata.version("megatron-core")
    return LibraryFields(
        f"TransformerConfig (megatron-core {version})",
        {field.name: hints[field.name] for field in dataclasses.fields(TransformerConfig)},
    )


def transformer_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The ``megatron:`` table with every value of its field's type; names of enumerations become
    members.

    Raises ValueError with a line for each key that is no field, or that another section sets, and
    for each value that does not fit.
    """
    fields = transformer_fields()
    problems = [*megatron_problems(table), *MEGATRON.library_problems(table, fields)]
    if problems:
        raise ValueError("\n".join(problems))
    return {key: read_value(fields.types[key], value) for key, value in table.items()}
