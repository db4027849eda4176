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
    """``model``: bytes of the weights, which every engine GPU receives whole. ``gathered``: of them, what moves between
    trainer ranks first, at most. ``checkpoint``: bytes of weights and optimizer state."""

    model: int
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
    all but the sender's own shards; a holder has whole experts with expert tensor parallelism 1.

    Checkpoint: elements x (2 + 12) for bfloat16 (weights, fp32 master, two moments), x (4 + 8) for float32, over the
    storage's bytes/s; with adapters, of them alone.
    """
    shape, layout = job.trainer.shape, job.trainer.layout
    count = parameters(shape)
    model = count * job.trainer.item_bytes
    experts = (
        shape.num_layers * shape.num_experts * 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    )
    spread = (count - experts) * (layout.tensor - 1) / layout.tensor
    own = job.senders / (layout.expert * layout.pipeline) / layout.expert_tensor
    spread += experts * (1 - own)
    buckets = job.senders * math.ceil(model / job.senders / job.bucket_bytes)
    wire = model / (device.network * BROADCAST_EFFICIENCY)
    trained = job.trainer.trained
    stored = count if trained is None else trained.elements(shape)
    state = stored * (job.trainer.item_bytes + (8 if job.trainer.dtype == "float32" else 12))
    return Transfer(
        model=model,
        gathered=round(spread * job.trainer.item_bytes),
        buckets=buckets,
        update_seconds=wire + buckets * BUCKET_LATENCY + FIXED_UPDATE,
        checkpoint=state,
        checkpoint_seconds=state / storage,
    )
