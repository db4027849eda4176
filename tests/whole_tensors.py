"""Whole tensors of a trainer, gathered on global rank 0 by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
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


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return the trainer's present weights by name, on global rank 0; collective."""
    return {name: t.clone() for bucket in hf_buckets(trainer, 50_000) for name, t in bucket}


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Return the gradients of the last step by name, on global rank 0; collective."""
    from megatron_dppo.model.gather_plan import hf_buckets_plan
    from megatron_dppo.trainer.model import named_parameters

    plan = hf_buckets_plan(trainer.shape, trainer.layout, 50_000, 4)
    # A router's bias is a constant without a gradient.
    gradients = {
        key: getattr(parameter, "main_grad", torch.zeros_like(parameter))
        for key, parameter in named_parameters(trainer.chunks).items()
    }
    return dict(
        pair for bucket in gather_buckets(plan, trainer.topology.rank, gradients) for pair in bucket
    )
