"""Bytes and seconds of a weight update and of a checkpoint, at stated bandwidths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.devices import Device
from megatron_dppo.planner.job import Job
from megatron_dppo.planner.units import GB

BROADCAST_EFFICIENCY = 0.6
"""Share of a network port's rate that a broadcast of large buckets reaches. Assumption."""
BUCKET_LATENCY = 0.02
"""Seconds of HTTP, hashing and loading for each bucket that do not overlap. Assumption."""
FIXED_UPDATE = 1.0
"""Seconds to drain, to compare canaries and to commit. Assumption."""
STORAGE = 5 * GB
"""Bytes/s at which all writers together reach a shared file system. Assumption; ``--storage-gbps`` replaces it."""


@dataclass(frozen=True)
class Transfer:
    """``update``: bytes of a weight update, which every engine GPU receives whole. ``gathered``: of them, what moves
    between trainer ranks first, at most. ``checkpoint``: bytes of weights and optimizer state."""

    update: int
    gathered: int
    buckets: int
    update_seconds: float
    checkpoint: int
    checkpoint_seconds: float


@cache
def parameters(shape: ModelShape) -> int:
    """Of the model, tied embeddings once."""
    return sum(math.prod(dims) for dims in hf_tensors(shape).values())


def transfer(job: Job, device: Device, storage: float = STORAGE) -> Transfer:
    """Update: every engine GPU receives all weights; senders broadcast in turn, so seconds = bytes / (a network port's
    rate x efficiency) + buckets x latency + a fixed part. Gathered first, within nodes where one rank of each sends:
    all but the sender's own shards; a holder has whole experts with expert tensor parallelism 1. Adapters alone are
    gathered on one rank, written and read: seconds = 2 x bytes / the storage's rate + the fixed part.

    Checkpoint: elements x (2 + 12) for bfloat16 (weights, fp32 master, two moments), x (4 + 8) for float32, over the
    storage's bytes/s; with adapters, of them alone.
    """
    trainer = job.trainer
    count = parameters(trainer.shape)
    stored = count if trainer.trained is None else trainer.trained.elements(trainer.shape)
    state = stored * (trainer.item_bytes + (8 if trainer.dtype == "float32" else 12))
    if job.updates_adapters:
        sent = gathered = stored * trainer.item_bytes
        buckets, wire = 1, 2 * sent / storage
    else:
        sent, gathered = count * trainer.item_bytes, _gathered(job)
        buckets = job.senders * math.ceil(sent / job.senders / job.bucket_bytes)
        wire = sent / (device.network * BROADCAST_EFFICIENCY) + buckets * BUCKET_LATENCY
    return Transfer(
        update=sent,
        gathered=gathered,
        buckets=buckets,
        update_seconds=wire + FIXED_UPDATE,
        checkpoint=state,
        checkpoint_seconds=state / storage,
    )


def _gathered(job: Job) -> int:
    """Bytes of all weights that move between trainer ranks."""
    shape, layout = job.trainer.shape, job.trainer.layout
    experts = (
        shape.num_layers * shape.num_experts * 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    )
    spread = (parameters(shape) - experts) * (layout.tensor - 1) / layout.tensor
    own = job.senders / (layout.expert * layout.pipeline) / layout.expert_tensor
    spread += experts * (1 - own)
    return round(spread * job.trainer.item_bytes)
