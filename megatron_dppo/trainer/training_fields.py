"""The fields of Megatron-Core's configurations of DDP and optimizer, and our tables as their values."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_dppo.config.forwarded import ForwardedTable
from megatron_dppo.config.forwarded_training import DDP, OPTIMIZER
from megatron_dppo.config.library_fields import LibraryFields, read_value


@functools.cache
def ddp_fields() -> LibraryFields:
    """Of DistributedDataParallelConfig."""
    return _fields(DistributedDataParallelConfig)


@functools.cache
def optimizer_fields() -> LibraryFields:
    """Of OptimizerConfig."""
    return _fields(OptimizerConfig)


def ddp_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The ``megatron_ddp:`` table as DistributedDataParallelConfig takes it. Raises ValueError."""
    return _values(DDP, ddp_fields(), table)


def optimizer_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The ``megatron_optimizer:`` table as OptimizerConfig takes it. Raises ValueError."""
    return _values(OPTIMIZER, optimizer_fields(), table)


def _fields(kind: Any) -> LibraryFields:
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    version = importlib.metadata.version("megatron-core")
    return LibraryFields(f"{kind.__name__} (megatron-core {version})", types)


def _values(
    rules: ForwardedTable, fields: LibraryFields, table: Mapping[str, Any]
) -> dict[str, Any]:
    problems = [*rules.problems(table), *rules.library_problems(table, fields)]
    if problems:
        raise ValueError("\n".join(problems))
    return {key: read_value(fields.types[key], value) for key, value in table.items()}
