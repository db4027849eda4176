"""Bytes and seconds of a weight update and of a checkpoint, at assumed bandwidths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from megatron_dppo.cluster.planner.devices import GB, Cluster
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.mapping import engine_parameters, hf_tensors, parameter_count
from megatron_dppo.model.quantization import holds_quantized, stored_bytes
from megatron_dppo.model.shape import ModelShape

MESSAGE_EFFICIENCY = 0.8
"""Share of a network port's rate that messages between two GPUs reach. Assumption."""
LOCAL_EFFICIENCY = 0.7
"""Share of NVLink's rate that messages between two GPUs of a node reach. Assumption."""
MESSAGE_LATENCY = 0.002
"""Seconds of the copies of a message, and of NCCL's start. Assumption."""
BUCKET_EFFICIENCY = 0.6
"""Share of a network port's rate at which a sender gathers whole tensors, and engines read them. Assumption."""
REQUEST_LATENCY = 0.02
"""Seconds that each request with messages, or bucket of whole tensors, adds: HTTP, hashing, loading. Assumption."""
FIXED_UPDATE = 1.0
"""Seconds that an update adds to the seconds of its buckets. In this time, running requests end, log-probabilities of
fixed prompts are compared (the canary), and the new version is committed. Assumption."""
STORAGE = 5 * GB
"""Bytes/s that all writers of a shared file system reach together. Assumption; ``--storage-gbps`` replaces it."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of a weight update and of a checkpoint.

    Attributes:
        update: bytes of all weights.
        received: bytes that the busiest engine GPU receives in a weight update.
        messages: number of messages to this GPU, or of buckets.
        update_seconds: seconds of a weight update.
        checkpoint: bytes of weights and optimizer state.
        checkpoint_seconds: seconds to write a checkpoint.
    """

    update: int
    received: int
    messages: int
    update_seconds: float
    checkpoint: int
    checkpoint_seconds: float


def traffic(facts: RunFacts, cluster: Cluster, storage: float = STORAGE) -> Traffic:
    """Return the bytes and seconds of a weight update and of a checkpoint.

    Weight update: all ports work at a time, and the busiest engine GPU decides. It receives the bytes that it keeps in
    equal messages. Of the n servers of a node it has every n-th message from the network, and the others from a server
    of its node (``_transfer_seconds``). Seconds = the messages' + a fixed part.

    With ``weight_sync.strategy: tensor``, the batches of all trainer ranks reach a server one after another: seconds =
    received bytes / (a network port's rate x efficiency) + batches x a request's latency + the fixed part. The copies
    on the host are counted as if they took a port; messages from other hosts travel at the same time.

    With ``disk``, whole tensors are gathered: the same formula with all bytes, and a lower efficiency. With
    ``weight_sync.directory`` they are also written to storage, and read by each node of servers: + (1 + nodes) x bytes
    / the storage's rate.

    Adapter update: one rank gathers the adapters and writes them, and the servers read them: seconds = 2 x bytes / the
    storage's rate + the fixed part.

    Checkpoint: bytes = elements x (2 + 12) for bfloat16 (weights, fp32 master, two moments) or elements x (4 + 8) for
    float32, less if moments are bfloat16, and seconds = bytes / the storage's rate. With adapters, only the trained
    elements count.
    """
    device = cluster.device
    state_bytes = checkpoint_bytes(facts)
    update_bytes = received_bytes = sent_bytes(facts)
    if facts.spec.model.sends_adapters:
        messages = 1
        seconds = 2 * update_bytes / storage
    elif facts.sends_in_group:
        received_bytes = _kept_bytes(facts)
        messages = math.ceil(received_bytes / facts.config.weight_sync.bucket_bytes)
        seconds = _transfer_seconds(facts, cluster, messages, received_bytes / messages)
    elif facts.sends_shards:
        received_bytes = _kept_bytes(facts)
        messages = math.ceil(
            received_bytes * facts.engine.layout.tensor / facts.config.weight_sync.bucket_bytes
        )
        travel = received_bytes / (device.network * MESSAGE_EFFICIENCY)
        seconds = travel + messages * REQUEST_LATENCY
    else:
        messages = math.ceil(received_bytes / facts.config.weight_sync.bucket_bytes)
        travel = received_bytes / (device.network * BUCKET_EFFICIENCY)
        seconds = travel + messages * REQUEST_LATENCY
        if facts.config.weight_sync.directory is not None:
            nodes = math.ceil(facts.engine.started / max(1, servers_of_node(facts, cluster)))
            seconds += (1 + nodes) * update_bytes / storage
    return Traffic(
        update=update_bytes,
        received=received_bytes,
        messages=messages,
        update_seconds=seconds + FIXED_UPDATE,
        checkpoint=state_bytes,
        checkpoint_seconds=state_bytes / storage,
    )


def _transfer_seconds(
    facts: RunFacts, cluster: Cluster, messages: int, message_bytes: float
) -> float:
    """Return the seconds until the last engine GPU has its messages.

    In a step a GPU receives one message from the network and one from its node, if the node has several servers. While
    messages travel, the ranks copy the messages before and after them. So a step takes the larger of the travel and
    the latency of its messages. Messages of the network: messages / n. Messages of the node, of which one travels in
    the same step as one of the network: messages x (n - 1) / n. A message reaches the last of all servers
    servers - 1 steps later.
    """
    device = cluster.device
    engine = facts.engine
    from_network = message_bytes / (device.network * MESSAGE_EFFICIENCY)
    from_node = message_bytes / (device.nvlink * LOCAL_EFFICIENCY)
    servers = servers_of_node(facts, cluster)
    lanes = min(servers, 2)
    network_step = max(from_network, lanes * MESSAGE_LATENCY)
    network_steps = messages / servers
    node_steps = messages - lanes * network_steps
    seconds = (network_steps + engine.started - 1) * network_step
    return seconds + node_steps * max(from_node, MESSAGE_LATENCY)


def servers_of_node(facts: RunFacts, cluster: Cluster) -> int:
    """Return how many servers a node has, at most."""
    engine = facts.engine
    return min(engine.started, max(1, cluster.gpus_per_node // engine.layout.tensor))


def checkpoint_bytes(facts: RunFacts) -> int:
    """Return the bytes of a checkpoint: weights and optimizer state of the trained elements."""
    return facts.trainer.checkpoint_bytes(facts.trainer.trained_elements)


def sent_bytes(facts: RunFacts) -> int:
    """Return the bytes of a weight update: adapters, or all weights in the trainer's dtype or in block FP8."""
    item_bytes = facts.trainer.item_bytes
    if facts.spec.model.sends_adapters:
        return facts.trainer.trained_elements * item_bytes
    if not facts.engine.is_quantized:
        return parameter_count(facts.trainer.shape) * item_bytes
    total = 0
    for name, dims in hf_tensors(facts.trainer.shape).items():
        total += stored_bytes(name, dims, item_bytes, quantized=True)
    return total


def _kept_bytes(facts: RunFacts) -> int:
    """Return the bytes that the busiest engine GPU keeps."""
    engine = facts.engine
    shape, item_bytes = facts.trainer.shape, facts.trainer.item_bytes
    return kept_bytes(shape, engine.layout, item_bytes, quantized=engine.is_quantized)


@lru_cache
def kept_bytes(shape: ModelShape, layout: EngineLayout, item_bytes: int, *, quantized: bool) -> int:
    """Return the bytes that the first GPU of a server keeps of a weight update. No GPU of a server keeps more."""
    total = 0
    for parameter in engine_parameters(shape, layout, 0):
        is_quantized = quantized and holds_quantized(parameter)
        for segment in parameter.segments:
            dims = list(parameter.shape)
            dims[segment.dim] = segment.length
            name = segment.hf_name
            total += stored_bytes(name, tuple(dims), item_bytes, quantized=is_quantized)
    return total
