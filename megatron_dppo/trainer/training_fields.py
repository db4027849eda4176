"""The fields of Megatron-Core's configurations of DDP and optimizer, and our tables as their values."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_dppo.config.forwarded import ForwardedTable
from megatron_dppo.config.forwarded_training import DDP, OPTIMIZER
from megatron_dppo.config.library_fields import LibraryFields, read_value

_DTYPES = Literal["float32", "bfloat16", "float16", "uint8"]
"""Types of the optimizer's tensors; uint8 stands for FP8 in Transformer Engine's Adam."""


@functools.cache
def ddp_fields() -> LibraryFields:
    """Of DistributedDataParallelConfig."""
    return _fields(DistributedDataParallelConfig)


@functools.cache
def optimizer_fields() -> LibraryFields:
    """Of OptimizerConfig, with torch's types by their names."""
    return _fields(OptimizerConfig)


def ddp_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The ``megatron_ddp:`` table as DistributedDataParallelConfig takes it. Raises ValueError."""
    return _values(DDP, ddp_fields(), table)


def optimizer_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The ``megatron_optimizer:`` table as OptimizerConfig takes it. Raises ValueError."""
    values = _values(OPTIMIZER, optimizer_fields(), table)
    named = {key for key, kind in optimizer_fields().types.items() if kind is _DTYPES}
    return {key: getattr(torch, v) if key in named else v for key, v in values.items()}


def _fields(kind: Any) -> LibraryFields:
    hints = get_type_hints(kind)
    types = {
        field.name: _DTYPES if hints[field.name] is torch.dtype else hints[field.name]
        for field in dataclasses.fields(kind)
    }
    version = importlib.metadata.version("megatron-core")
    return LibraryFields(f"{kind.__name__} (megatron-core {version})", types)


def _values(
    rules: ForwardedTable, fields: LibraryFields, table: Mapping[str, Any]
) -> dict[str, Any]:
    problems = [*rules.problems(table), *rules.library_problems(table, fields)]
    if problems:
        raise ValueError("\n".join(problems))
    return {key: read_value(fields.types[key], value) for key, value in table.items()}
