"""Bytes of a trainer rank's weights, gradients and Adam state, under its settings of Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from megatron_dppo.cluster.planner.devices import power_of_two
from megatron_dppo.cluster.planner.facts import (
    Counts,
    RankParameters,
    TrainerFacts,
    elements,
    rank_parameters,
)
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import COPIED_PARTS, TRAINER_PARTS, TrainerPart
from megatron_dppo.model.splits import ceil_to

_PARAMETER_PAD, _BUCKET_PAD = 64, 128
"""Megatron-Core pads a parameter's start to a multiple of 64 elements, and a bucket's end to a multiple of 128."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank's state that stay allocated during the whole run.

    The fields with the name of a ``TrainerPart`` count bytes on the device. ``offloaded``: bytes of Adam's state in
    host memory. ``offloaded_elements``: number of elements whose Adam state is in host memory.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    offloaded: int = 0
    offloaded_elements: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, part) for part in TRAINER_PARTS)


def state_bytes(trainer: TrainerFacts, stage: int) -> StateBytes:
    """Return the bytes of weights, reference policy, gradient buffers and optimizer state on each rank of ``stage``.

    - weights: elements x 2 (bfloat16) or 4 (float32).
    - gradients: elements x 4 (``grad_reduce_in_fp32=True`` in ``trainer/model.py``) or x 2; dense and expert
      parameters have a buffer each (``_ParamAndGradBuffer``).
    - optimizer: Adam's two fp32 moments, 8 bytes, and for bfloat16 a fp32 master, 4 bytes (megatron.core
      ``Float16OptimizerWithFloat16Params``, ``DistributedOptimizer``); a float32 parameter is its own master. Two
      moments in bfloat16 take 4 bytes instead of 8. Offloaded state is in host memory (``AdamFacts``).
      ``optimizer.distributed`` divides these bytes by the number of ranks with the same parameters: ``data`` x
      ``context`` for dense parameters, ``expert_data`` for experts.
    - With the distributed optimizer, weights and gradients are stored in buffers: each parameter starts at a multiple
      of 64 elements, and the end is padded to a multiple of lcm(replicas, 128) (``_pad_start_of_param_if_needed``,
      ``_pad_end_of_bucket_if_needed``).
    - With adapters, only the trained parameters have buffers; the frozen weights stay in the tensors of the model.
    - A reference policy copies the trained parameters (``ReferenceWeights``). It copies adapters only if they start
      from a folder: otherwise the initial policy is the model without adapters.
    """
    model_parameters = rank_parameters(trainer.shape, trainer.layout, stage)
    parameters = model_parameters
    # Elements of the model itself, without adapters, that train.
    base_elements = model_parameters.elements
    if trainer.trained is not None:
        base_elements = trainer.trained.trained_base(trainer.shape, trainer.layout, stage)
        parameters = trainer.trained.parameters(trainer.shape, trainer.layout, stage)
    frozen_elements = model_parameters.elements - base_elements
    padded_sizes: list[int] = []
    shard_sizes: list[int] = []
    for counts, replicas in _groups(parameters, trainer.layout):
        if trainer.distributed_optimizer:
            size = _buffer_elements(counts, replicas)
            shard_sizes.append(size // replicas)
        else:
            size = elements(counts)
            shard_sizes.append(size)
        padded_sizes.append(size)
    buffer_elements = sum(padded_sizes)
    reference_elements = 0
    if trainer.config.keeps_reference:
        reference_elements = base_elements
        if trainer.config.lora.start_from is not None:
            reference_elements = parameters.elements
    return StateBytes(
        weights=(frozen_elements + buffer_elements) * trainer.item_bytes,
        reference=reference_elements * trainer.item_bytes,
        gradients=buffer_elements * trainer.gradient_bytes,
        optimizer=round(sum(shard_sizes) * trainer.adam.device),
        offloaded=round(sum(shard_sizes) * trainer.adam.host),
        offloaded_elements=round(sum(shard_sizes) * trainer.adam.offloaded),
    )


@dataclass(frozen=True)
class ParkedBytes:
    """Bytes of one rank's parked state.

    Attributes:
        device: bytes that parking frees on the GPU.
        host: bytes of pinned host memory. The memory stays allocated after the first parking. Each part has a buffer,
            and torch's CachingHostAllocator rounds each buffer up to a power of two.
    """

    device: int
    host: int


def parked_bytes(state: StateBytes, parts: Collection[TrainerPart] = TRAINER_PARTS) -> ParkedBytes:
    """Return the bytes that a rank with ``state`` moves when ``trainer/parking.py`` parks ``parts``."""
    device_bytes = host_bytes = 0
    for part in parts:
        size = getattr(state, part)
        device_bytes += size
        if part in COPIED_PARTS:
            host_bytes += power_of_two(size)
    return ParkedBytes(device=device_bytes, host=host_bytes)


def _groups(parameters: RankParameters, layout: Layout) -> list[tuple[Counts, int]]:
    """Return (parameters, number of replicas) of each group that has parameters."""
    dense_replicas = layout.data * layout.context
    groups = [(parameters.dense, dense_replicas), (parameters.experts, layout.expert_data)]
    return [(counts, replicas) for counts, replicas in groups if counts]


def _buffer_elements(counts: Counts, replicas: int) -> int:
    """Return the elements of one buffer of the distributed optimizer, with the padding of parameters and of the end."""
    total = sum(ceil_to(size, _PARAMETER_PAD) * count for size, count in counts)
    return ceil_to(total, math.lcm(replicas, _BUCKET_PAD))
