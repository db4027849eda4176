"""The trainer as weight updates see it: weights by Hugging Face name, and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_dppo.checkpoint_conversion.adapters import AdapterFolder
from megatron_dppo.checkpoint_conversion.gathering import Buffers, Gathered, gather
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.model import gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.quantization import Rounding
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.fp8_weights import rounded_to_fp8
from megatron_dppo.trainer.merged_weights import MergedWeights
from megatron_dppo.trainer.topology import ranks_per_node
from megatron_dppo.trainer.trainer import Trainer


class TrainerWeights:
    """A trainer's weights as the WeightSource of a weight update. The protocol WeightSource documents the methods.

    Args:
        trainer: the trainer.
        values: returns this rank's current tensors; default: the trainer's weights.
    """

    def __init__(
        self,
        trainer: Trainer,
        values: Callable[[], Mapping[gather_plan.ParameterKey, Tensor]] | None = None,
    ) -> None:
        self._trainer = trainer
        self._values = trainer.weights if values is None else values
        self._buffers = Buffers()
        self._gathered: Mapping[gather_plan.ParameterKey, Tensor] = {}

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._trainer.topology.rank

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model, without padding."""
        return self._trainer.shape.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self._trainer.shape.num_layers

    @property
    def is_routed(self) -> bool:
        """Whether layers of the model have a router of experts."""
        return self._trainer.shape.is_moe

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights."""
        return str(self._trainer.dtype).removeprefix("torch.")

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self._trainer.shape

    @property
    def layout(self) -> Layout:
        """The trainer's layout."""
        return self._trainer.layout

    def values(self) -> Mapping[gather_plan.ParameterKey, Tensor]:
        """Return this rank's current tensors."""
        self._trainer.check_resident("read weights", "weights")
        self._gathered = self._values()
        return self._gathered

    def all_max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum of the vectors ``values`` of all ranks. Collective."""
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def plan(self, bucket_bytes: int) -> list[gather_plan.Bucket]:
        """Plan all weights in buckets that rank 0 gathers."""
        trainer = self._trainer
        return gather_plan.hf_buckets_plan(
            trainer.shape,
            trainer.layout,
            bucket_bytes=bucket_bytes,
            item_bytes=trainer.dtype.itemsize,
        )

    def bytes_between_nodes(self, plan: Sequence[gather_plan.Bucket]) -> int:
        """Count the bytes that the plan's gathers send between nodes, over all ranks."""
        node_ranks = ranks_per_node()
        elements = 0
        for bucket in plan:
            elements += gather_plan.elements_between_nodes(bucket, node_ranks)
        return elements * self._trainer.dtype.itemsize

    def gather(self, plan: Sequence[gather_plan.Bucket]) -> Iterator[Gathered]:
        """Yield the current weights in the plan's buckets. Collective.

        Bucket n stays unchanged while bucket n + 1 is gathered. Bucket n + 2 overwrites bucket n.
        """
        return gather(plan, self.rank, self.values(), self._buffers)

    def held_update(self) -> tuple[float, float]:
        """Return the sums of ``MergedWeights.held_update`` for the last gather; 0 and 0 without merged adapters."""
        if isinstance(self._gathered, MergedWeights):
            return self._gathered.held_update()
        return 0.0, 0.0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank. Collective."""
        return all_gather_json(value)

    def score(
        self, prompts: Sequence[Sequence[int]], *, rounding: Rounding | None = None
    ) -> list[list[float]]:
        """Compute log p(token | tokens before it) of all tokens but the first, by prompt, at temperature 1. Collective.

        Every replica computes the same values. Routers choose the experts: no recorded routing is used. ``rounding``:
        score with weights that are rounded to block FP8. In a trainer with adapters ``fp8`` rounds nothing: engines
        round the merged weights, and the trainer's forward pass has no merged weights.
        """
        # Log-probabilities are computed of responses: all tokens but the first are the response.
        samples = [Trajectory.of_response(p[:1], p[1:]) for p in prompts]
        # Only the first batch has tokens.
        batches = self._trainer.packed(samples)
        with self._rounded_weights(rounding):
            flat = self._trainer.log_probs(batches, temperature=1.0)[0].cpu()
        # The values of all prompts are in one row, prompt by prompt. A prompt has one value fewer than tokens.
        values = iter(flat[batches[0].loss_mask].tolist())
        return [list(islice(values, len(prompt) - 1)) for prompt in prompts]

    @property
    def rounds_as_engines(self) -> bool:
        """Whether ``fp8`` rounds the weights that FP8 engines hold; not with adapters."""
        return self._trainer.adapted is None

    def _rounded_weights(self, rounding: Rounding | None) -> AbstractContextManager[None]:
        """Return a context in which the weights are rounded by ``rounding``; without adapters."""
        trainer = self._trainer
        if rounding is None or (rounding == "fp8" and not self.rounds_as_engines):
            return nullcontext()
        weights = trainer.base_weights()
        return rounded_to_fp8(weights, trainer.shape, trainer.layout, self.rank, rounding)


class AdapterWeights(TrainerWeights):
    """A trainer's adapters as a source of weights, under the names of ``model.adapters``.

    ``base``: the frozen weights that the adapters are added to. ``folder``: the description of the adapters in a PEFT
    folder. Raises ValueError for a trainer without adapters.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.adapted is None:
            raise ValueError("lora.rank is 0: there are no adapters")
        super().__init__(trainer, values=trainer.adapted.values)
        self.base = TrainerWeights(trainer, values=trainer.base_weights)
        self.folder = AdapterFolder(
            trainer.adapted.adapters, trainer.shape, trainer.config.model.hf_checkpoint
        )

    def plan(self, bucket_bytes: int) -> list[gather_plan.Bucket]:
        """Plan buckets for all A and B. Rank 0 gathers the buckets."""
        trainer = self._trainer
        return gather_plan.adapter_buckets_plan(
            self.folder.adapters,
            trainer.shape,
            trainer.layout,
            bucket_bytes,
            trainer.dtype.itemsize,
        )
