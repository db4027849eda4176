"""The trainer's weights, as weight updates read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron_dppo.checkpoint_conversion.gathering import Gathered
from megatron_dppo.model.gather_plan import Bucket as PlannedBucket
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.quantization import Rounding
from megatron_dppo.model.shape import ModelShape

Plan = Sequence[PlannedBucket]
"""The tensors of each bucket, and the rank that receives the bucket. Every rank has the same plan."""


class WeightSource(Protocol):
    """The trainer's weights, for updates. ``all_max``, ``gather``, ``all_gather`` and ``score`` are collective.

    Attributes:
        rank: this process's global rank.
        dtype_name: the dtype of the weights, "float32" or "bfloat16".
    """

    @property
    def rank(self) -> int: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def layout(self) -> Layout: ...

    def values(self) -> Mapping[ParameterKey, Tensor]:
        """Return this rank's tensors."""

    def all_max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum of the vectors ``values`` of all ranks."""

    def plan(self, bucket_bytes: int) -> Plan:
        """Plan all weights in buckets of ``bucket_bytes`` that rank 0 receives."""

    def gather(self, plan: Plan) -> Iterator[Gathered]:
        """Gather the plan's buckets one after another, each on its receiver.

        The tensors of a bucket stay unchanged until the caller asks for the second bucket after it.
        """

    def bytes_between_nodes(self, plan: Plan) -> int:
        """Return the bytes that the plan's gathers send from one node to another."""

    def held_update(self) -> tuple[float, float]:
        """Return this rank's part of UpdateReport's ``held_update``, for the values that were read last.

        These are the sums of h d and of d^2. d is the exact change of an element by merged adapters, h is the change
        that the weights' type holds.
        """

    def all_gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank."""

    def score(
        self, prompts: Sequence[Sequence[int]], *, rounding: Rounding | None = None
    ) -> list[list[float]]:
        """Return log p(token | tokens before it) at temperature 1, by prompt, for every token but the first.

        ``rounding``: score with weights that are rounded as the engines' block-FP8 weights are, or otherwise.
        """

    @property
    def rounds_as_engines(self) -> bool:
        """Whether ``score`` can round the weights that block-FP8 engines hold."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def is_routed(self) -> bool:
        """Whether layers have a router of experts."""

    @property
    def dtype_name(self) -> str: ...
