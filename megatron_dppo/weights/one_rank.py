"""Whole tensors in one process as the source of weight updates, in place of a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion.gathering import Buffers, Gathered, gather
from megatron_dppo.model.gather_plan import ParameterKey, hf_buckets_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import local_parameters
from megatron_dppo.model.quantization import Rounding
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.weights.source import Plan


class OneRankWeights:
    """A WeightSource of one rank. It has no model to score with, so the canary must be off.

    Args:
        shape: the model.
        tensors: the whole tensors by their Hugging Face names.
    """

    rank = 0
    layout = Layout()
    rounds_as_engines = False

    def __init__(self, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self.num_layers = shape.num_layers
        self.is_routed = shape.is_moe
        self._values: dict[ParameterKey, Tensor] = {}
        self._buffers = Buffers()
        for parameter in local_parameters(shape, self.layout, 0):
            first = tensors[parameter.segments[0].hf_name]
            local = torch.zeros(parameter.shape, dtype=first.dtype, device=first.device)
            for segment in parameter.segments:
                segment.of_local(local).copy_(segment.of_hf(tensors[segment.hf_name]))
            self._values[parameter.chunk, parameter.name] = local
        self.dtype = next(iter(self._values.values())).dtype
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.bytes = sum(tensor.nbytes for tensor in self._values.values())

    def values(self) -> Mapping[ParameterKey, Tensor]:
        """Return the tensors in Megatron's form."""
        return self._values

    def all_max(self, values: Tensor) -> Tensor:
        """Return ``values``: there is one rank."""
        return values

    def plan(self, bucket_bytes: int) -> Plan:
        """Plan all weights in buckets."""
        return hf_buckets_plan(self.shape, self.layout, bucket_bytes, self.dtype.itemsize)

    def gather(self, plan: Plan) -> Iterator[Gathered]:
        """Yield the plan's buckets as a trainer does."""
        return gather(plan, self.rank, self.values(), self._buffers)

    def bytes_between_nodes(self, plan: Plan) -> int:
        """Return 0: nothing is gathered from another node."""
        return 0

    def held_update(self) -> tuple[float, float]:
        """Return zeros: there are no adapters."""
        return 0.0, 0.0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks: there is one rank."""
        return [value]

    def score(
        self, prompts: Sequence[Sequence[int]], *, rounding: Rounding | None = None
    ) -> list[list[float]]:
        """Raise ValueError: there is no model."""
        raise ValueError("these weights have no model to score with: expected canary_every 0")
