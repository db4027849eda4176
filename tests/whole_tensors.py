"""Whole tensors of a trainer, gathered on global rank 0 by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer


def gather_buckets(
    plan: list[Any], rank: int, values: Mapping[Any, Tensor]
) -> Iterator[list[tuple[str, Tensor]]]:
    """Each bucket's tensors on its receiver, an empty list elsewhere; collective."""
    from megatron_dppo.checkpoint_conversion.gathering import gather

    return (gathered.tensors for gathered in gather(plan, rank, values))


def hf_buckets(trainer: Trainer, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The trainer's present weights in buckets; every rank must exhaust the iterator."""
    from megatron_dppo.model.gather_plan import hf_buckets_plan

    plan = hf_buckets_plan(trainer.shape, trainer.layout, bucket_bytes, trainer.dtype.itemsize)
    return gather_buckets(plan, trainer.topology.rank, trainer.weights())
