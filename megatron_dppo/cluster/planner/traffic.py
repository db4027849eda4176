"""Bytes and seconds of a weight update and of a checkpoint, at assumed bandwidths."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dppo.cluster.planner.devices import GB, Device
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.model.mapping import engine_parameters, hf_tensors, parameter_count
from megatron_dppo.model.quantization import holds_quantized, stored_bytes

BROADCAST_EFFICIENCY = 0.6
"""Share of a network port's rate that a broadcast of large buckets reaches. Assumption."""
BUCKET_LATENCY = 0.02
"""Seconds that each bucket adds to the seconds of its broadcast: HTTP, hashing and loading. Assumption."""
SHARD_EFFICIENCY = 0.8
"""Share of a network port's rate that messages between two GPUs reach with ``shards``. Assumption."""
MESSAGE_LATENCY = 0.002
"""Seconds that each message to an engine GPU adds with ``shards``: its copies, and NCCL's start. Assumption."""
FIXED_UPDATE = 1.0
"""Seconds that an update adds to the seconds of its buckets. In this time, running requests end, log-probabilities of
fixed prompts are compared (the canary), and the new version is committed. Assumption."""
STORAGE = 5 * GB
"""Bytes/s that all writers of a shared file system reach together. Assumption; ``--storage-gbps`` replaces it."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of a weight update and of a checkpoint.

    Attributes:
        update: bytes of a weight update. Each engine GPU receives all of these bytes.
        gathered: estimated bytes that trainer ranks gather before they send.
        buckets: number of buckets of a weight update.
        update_seconds: seconds of a weight update.
        checkpoint: bytes of weights and optimizer state.
        checkpoint_seconds: seconds to write a checkpoint.
    """

    update: int
    gathered: int
    buckets: int
    update_seconds: float
    checkpoint: int
    checkpoint_seconds: float


def traffic(facts: RunFacts, device: Device, storage: float = STORAGE) -> Traffic:
    """Return the bytes and seconds of a weight update and of a checkpoint.

    Weight update: each engine GPU receives all weights. Only one sender broadcasts at a time, so seconds = bytes / (a
    network port's rate x efficiency) + buckets x latency + a fixed part. The formula is the same for servers on the
    ranks' GPUs, although these servers need no network. Before a sender broadcasts a bucket, it gathers the shards of
    the bucket that it does not hold.

    With ``weight_sync.strategy: shards`` all ports work at a time, and the busiest engine GPU decides: seconds = the
    bytes that it keeps / (a network port's rate x efficiency) + (its messages + servers) x latency + a fixed part. A
    message reaches the last of several servers after as many further messages.

    Adapter update: one rank gathers the adapters and writes them, and the servers read them: seconds = 2 x bytes / the
    storage's rate + the fixed part.

    Checkpoint: bytes = elements x (2 + 12) for bfloat16 (weights, fp32 master, two moments) or elements x (4 + 8) for
    float32, less if moments are bfloat16, and seconds = bytes / the storage's rate. With adapters, only the trained
    elements count.
    """
    trainer = facts.trainer
    model_elements = parameter_count(trainer.shape)
    trained_elements = model_elements
    if trainer.trained is not None:
        trained_elements = trainer.trained.elements(trainer.shape)
    state_bytes = trainer.checkpoint_bytes(trained_elements)
    if facts.spec.model.sends_adapters:
        update_bytes = gathered_bytes = trained_elements * trainer.item_bytes
        buckets = 1
        seconds = 2 * update_bytes / storage
    else:
        update_bytes = _sent_bytes(facts)
        gathered_bytes = _gathered(facts)
        # Each sender cuts its share of the bytes into buckets.
        buckets = facts.senders * math.ceil(update_bytes / facts.senders / facts.bucket_bytes)
        seconds = update_bytes / (device.network * BROADCAST_EFFICIENCY) + buckets * BUCKET_LATENCY
        if facts.config.weight_sync.strategy == "shards":
            gathered_bytes = 0
            kept_bytes = _kept(facts)
            buckets = math.ceil(kept_bytes / facts.bucket_bytes) + facts.engine.started
            seconds = kept_bytes / (device.network * SHARD_EFFICIENCY) + buckets * MESSAGE_LATENCY
    return Traffic(
        update=update_bytes,
        gathered=gathered_bytes,
        buckets=buckets,
        update_seconds=seconds + FIXED_UPDATE,
        checkpoint=state_bytes,
        checkpoint_seconds=state_bytes / storage,
    )


def _sent_bytes(facts: RunFacts) -> int:
    """Return the bytes of all weights as servers receive them: the trainer's dtype, or block FP8."""
    item_bytes = facts.trainer.item_bytes
    if not facts.engine.is_quantized:
        return parameter_count(facts.trainer.shape) * item_bytes
    total = 0
    for name, dims in hf_tensors(facts.trainer.shape).items():
        total += stored_bytes(name, dims, item_bytes, quantized=True)
    return total


def _kept(facts: RunFacts) -> int:
    """Return the bytes that the first GPU of a server keeps of a weight update. No GPU of a server keeps more."""
    item_bytes = facts.trainer.item_bytes
    total = 0
    for parameter in engine_parameters(facts.trainer.shape, facts.engine.layout, 0):
        is_quantized = facts.engine.is_quantized and holds_quantized(parameter)
        for segment in parameter.segments:
            dims = list(parameter.shape)
            dims[segment.dim] = segment.length
            name = segment.hf_name
            total += stored_bytes(name, tuple(dims), item_bytes, quantized=is_quantized)
    return total


def _gathered(facts: RunFacts) -> int:
    """Estimate the bytes of weights that trainer ranks send to each other before a weight update.

    Stages are taken to have equally many weights. ``weight_plan`` counts the bytes of every tensor.
    """
    shape = facts.trainer.shape
    layout = facts.trainer.layout
    # An expert has three matrices.
    expert_size = 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    expert_elements = len(shape.moe_layers) * shape.num_experts * expert_size
    dense_elements = parameter_count(shape) - expert_elements
    # The share of the dense weights that the senders hold before they gather. A sender holds 1 / TP of each weight of
    # its own stage. A node with several stages may have only one sender: then some stages have none.
    stages_with_sender = min(facts.senders, layout.pipeline)
    dense_share = stages_with_sender / layout.pipeline / layout.tensor
    # The same share of the experts' weights. The experts of a stage are in EP groups, so the model has EP x PP groups.
    # A sender holds 1 / ETP of the weights of its own group, and nothing of the other groups.
    expert_groups = layout.expert * layout.pipeline
    expert_share = facts.senders / expert_groups / layout.expert_tensor
    gathered_elements = dense_elements * (1 - dense_share) + expert_elements * (1 - expert_share)
    return round(gathered_elements * facts.trainer.item_bytes)
