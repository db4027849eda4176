"""Weights, gradients and Adam's state of a rank, as the trainer's settings of Megatron-Core make them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dppo.model.layout import Layout
from megatron_dppo.planner.job import TrainerJob
from megatron_dppo.planner.units import ceil_to
from megatron_dppo.planner.weights import Counts, RankParameters, elements, rank_parameters

_PARAMETER_PAD, _BUCKET_PAD = 64, 128


@dataclass(frozen=True)
class StateBytes:
    """Bytes that live through a whole run on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(job: TrainerJob, stage: int) -> StateBytes:
    """Weights, gradient buffer and optimizer state of each rank of ``stage``.

    - weights: elements x 2 (bfloat16) or 4 (float32).
    - gradients: elements x 4: ``grad_reduce_in_fp32=True`` in ``trainer/model.py``, or x 2; one buffer for dense and
      one for experts' parameters (``_ParamAndGradBuffer``).
    - optimizer: Adam's two fp32 moments, 8 bytes, and for bfloat16 a fp32 master, 4 bytes (megatron.core
      ``Float16OptimizerWithFloat16Params``, ``DistributedOptimizer``); a float32 parameter is its own master.
      ``optimizer.distributed`` cuts these by the replicas: ``data`` for dense parameters, ``expert_data`` for experts.
    - With the distributed optimizer weights and gradients live in buffers in which each parameter starts at a multiple
      of 64 elements and the end is padded to one of lcm(replicas, 128) (``_pad_start_of_param_if_needed``,
      ``_pad_end_of_bucket_if_needed``).
    - With adapters all this is of them alone; the frozen weights lie where they were made.
    - A reference policy is a copy of those of the model's own parameters that are trained; of the adapters, too, where
      they start from a folder (``ReferenceWeights``).
    """
    parameters, frozen = rank_parameters(job.shape, job.layout, stage), 0
    changed = parameters.elements
    if job.trained is not None:
        changed = job.trained.trained_base(job.shape, job.layout)
        frozen = parameters.elements - changed
        parameters = job.trained.parameters(job.shape, job.layout, stage)
    padded = [
        _buffer_elements(counts, replicas) if job.distributed else elements(counts)
        for counts, replicas in _groups(parameters, job.layout)
    ]
    held = sum(padded)
    kept = changed if job.reference else 0
    if job.reference_adapters:
        kept = parameters.elements
    shared = [
        size // replicas if job.distributed else size
        for size, (_, replicas) in zip(padded, _groups(parameters, job.layout), strict=True)
    ]
    return StateBytes(
        weights=(frozen + held + kept) * job.item_bytes,
        gradients=held * job.gradient_bytes,
        optimizer=round(sum(shared) * job.optimizer_bytes),
    )


def _groups(parameters: RankParameters, layout: Layout) -> list[tuple[Counts, int]]:
    groups = [(parameters.dense, layout.data), (parameters.experts, layout.expert_data)]
    return [(counts, replicas) for counts, replicas in groups if counts]


def _buffer_elements(counts: Counts, replicas: int) -> int:
    """Elements of one buffer of the distributed optimizer; every parameter but the last is followed by its padding."""
    total = sum(ceil_to(size, _PARAMETER_PAD) * count for size, count in counts)
    return ceil_to(total, math.lcm(replicas, _BUCKET_PAD))
