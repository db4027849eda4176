"""What a server over several nodes pays for its network: tensor parallelism's collectives in a forward pass, and what
one pipeline stage hands to the next."""

from __future__ import annotations

from math import ceil, log2

from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.devices import LINK_EFFICIENCY, Cluster
from megatron_dppo.planner.job import EngineJob

_ITEM = 2


def network_seconds(
    shape: ModelShape, engine: EngineJob, cluster: Cluster, tokens: float, sampled: float
) -> float:
    """Seconds between nodes in one forward pass over ``tokens`` tokens, of which ``sampled`` get logits; 0 where
    a tensor parallel group is inside a node.

    SGLang all-reduces hidden states (bf16) after the embedding and twice in a layer, and gathers the logits; across
    nodes that is NCCL's. Its model (``src/graph/tuning.cc``): latency + bytes / rate. With n GPUs on h nodes each
    pays 2 ceil(log2 h) x the network's latency (a tree up and down), and 2 (n - 1) / n of the bytes of an all-reduce,
    (n - 1) / n of a gather, cross between nodes, on the ports of all n / h GPUs of a node at once.
    """
    size, nodes = engine.tensor, ceil(engine.tensor / cluster.gpus_per_node)
    if nodes == 1:
        return 0.0
    reductions = 2 * shape.num_layers + 1
    reduced = reductions * tokens * shape.hidden_size * _ITEM
    gathered = sampled * shape.vocab_size * _ITEM
    moved = (2 * reduced + gathered) * (size - 1) / size
    rate = size / nodes * cluster.device.network * LINK_EFFICIENCY
    latency = 2 * ceil(log2(nodes)) * cluster.network_latency
    return (reductions + 1) * latency + moved / rate


def hand_over_seconds(
    shape: ModelShape, engine: EngineJob, cluster: Cluster, tokens: float
) -> float:
    """Seconds in which a pipeline stage hands ``tokens`` hidden states (bf16) to a stage on another node; 0 where all
    stages are on one. Each GPU of the stage sends its part, on a port of its own: latency + bytes / rate."""
    if engine.pipeline == 1 or engine.gpus <= cluster.gpus_per_node:
        return 0.0
    sent = tokens * shape.hidden_size * _ITEM / engine.tensor
    return cluster.network_latency + sent / (cluster.device.network * LINK_EFFICIENCY)
