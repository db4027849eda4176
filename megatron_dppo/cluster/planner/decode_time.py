"""Seconds of one decode step, with the network time of a server that spans several nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2, prod

from megatron_dppo.cluster.planner.devices import LINK_EFFICIENCY, Cluster, Device
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.cluster.planner.server_memory import kv_bytes_per_token
from megatron_dppo.model.mapping import ATTENTION_MODULES, hf_tensors
from megatron_dppo.model.quantization import is_quantized
from megatron_dppo.model.shape import ModelShape, active_parameters, forward_flops
from megatron_dppo.model.splits import Dims
from megatron_dppo.spec import ServersSpec

_ITEM = 2
"""Bytes of a bf16 element."""


def network_seconds(
    shape: ModelShape, engine: ServersSpec, cluster: Cluster, tokens: float, sampled_tokens: float
) -> float:
    """Return the seconds of the collectives between nodes in one forward pass over ``tokens`` tokens.

    The pass computes the logits of ``sampled_tokens`` of the tokens. The result is 0 if a tensor-parallel group is
    inside a node.

    SGLang all-reduces hidden states (bf16) after the embedding and twice in each layer, and gathers the logits. Between
    nodes, SGLang uses NCCL for both. NCCL models a collective (``src/graph/tuning.cc``) as latency + bytes / rate. With
    n GPUs on h nodes, the latency of each collective is 2 ceil(log2 h) x the network's latency: up a tree and down. An
    all-reduce sends 2 (n - 1) / n of its bytes between nodes, and a gather sends (n - 1) / n. All n / h GPUs of a node
    use their ports at once.
    """
    gpus = engine.layout.tensor
    nodes = ceil(gpus / cluster.gpus_per_node)
    if nodes == 1:
        return 0.0
    reductions = 2 * shape.num_layers + 1
    reduction_bytes = reductions * tokens * shape.hidden_size * _ITEM
    gather_bytes = sampled_tokens * shape.vocab_size * _ITEM
    network_bytes = (2 * reduction_bytes + gather_bytes) * (gpus - 1) / gpus
    rate = gpus / nodes * cluster.device.network * LINK_EFFICIENCY
    latency = 2 * ceil(log2(nodes)) * cluster.network_latency
    return (reductions + 1) * latency + network_bytes / rate


HBM_EFFICIENCY = 0.7
"""Share of the memory's rate that decoding reaches when it reads dense weights and KV cache. Published runs of dense
models agree with this share (docs/evidence/scale.md)."""


EXPERT_EFFICIENCY = 0.55
"""Share of the memory's rate that decoding reaches when it reads experts' weights. Each expert serves only a few
tokens. Set from published runs (docs/evidence/scale.md)."""


PREFILL_UTILISATION = 0.4
"""Share of peak FLOP/s in prefill and in large decode batches. Assumption."""


DECODE_OVERHEAD = 0.004
"""Seconds that each decode step adds to the time of weights and KV cache: launches, sampling, scheduling.
Assumption."""


SEQUENCE_OVERHEAD = 10e-6
"""Seconds that each sequence adds to a decode step: sampling, its log-probability, scheduling, detokenizing. Set from
published runs (docs/evidence/scale.md)."""


REDUCE_LATENCY = 15e-6
"""Seconds that each all-reduce over NVLink adds to the time of its bytes. Assumption."""


def decode_seconds(facts: RunFacts, cluster: Cluster, running: float, context: float) -> float:
    """Return the seconds of one decode step of a server with ``running`` sequences of ``context`` tokens.

    The formula is max(bytes / memory rate, FLOPs / peak) + collectives + an overhead of the step + an overhead of each
    sequence. A GPU reads the weights that the batch touches and the KV cache of all sequences. With attention replicas,
    it reads the KV cache of its replica's sequences, and a larger share of attention's weights. Attention replicas also
    make attention's collectives smaller, but the formula does not count that.

    Block-FP8 weights halve the bytes of linear layers and experts. FLOPs count at the bf16 peak, because no rate of FP8
    kernels was measured here.
    """
    shape = facts.trainer.shape
    engine = facts.engine
    device = cluster.device
    tokens = max(1.0, running)
    replicas = engine.layout.attention_replicas
    touched = touched_parameters(shape, tokens)
    cache_bytes = tokens / replicas * context * kv_bytes_per_token(shape, engine)
    dense_bytes = touched.dense * _ITEM
    expert_bytes = touched.experts * _ITEM
    # ``dense_bytes`` has one copy of attention's weights. Each further replica has another copy.
    replicated_bytes: float = (replicas - 1) * attention_parameters(shape) * _ITEM
    if engine.is_quantized:
        # A block-FP8 weight has one byte. The output matrix and the routers stay bf16; the scales, 1 / 4096 of the
        # bytes, are not counted.
        dense_bytes -= quantized_parameters(shape) * (_ITEM - 1)
        expert_bytes /= _ITEM
        replicated_bytes /= _ITEM
    dense_bytes += replicated_bytes
    read_seconds = (dense_bytes / engine.layout.tensor + cache_bytes) / (
        device.hbm * HBM_EFFICIENCY
    )
    read_seconds += expert_bytes / engine.layout.tensor / (device.hbm * EXPERT_EFFICIENCY)
    # The mean token of a causal sequence attends to half of it: the last token attends to twice as many tokens.
    flops = tokens * forward_flops(shape).of_token(2 * context) / engine.layout.tensor
    math_seconds = flops / (device.flops * PREFILL_UTILISATION)
    seconds = max(read_seconds, math_seconds) + DECODE_OVERHEAD
    seconds += reduce_seconds(shape, engine, device, tokens)
    seconds += network_seconds(shape, engine, cluster, tokens, tokens)
    return seconds + running * SEQUENCE_OVERHEAD


def reduce_seconds(shape: ModelShape, engine: ServersSpec, device: Device, tokens: float) -> float:
    """Return the seconds of the all-reduces within a node in one forward pass.

    Each layer has two all-reduces. An all-reduce among n GPUs takes a latency, and the time in which 2 (n - 1) / n of
    the hidden states' bytes (bf16) cross NVLink.
    """
    gpus = engine.layout.tensor
    if gpus == 1:
        return 0.0
    nvlink_bytes = 2 * (gpus - 1) / gpus * tokens * shape.hidden_size * _ITEM
    seconds = REDUCE_LATENCY + nvlink_bytes / (device.nvlink * LINK_EFFICIENCY)
    return 2 * shape.num_layers * seconds


@dataclass(frozen=True)
class TouchedParameters:
    """The numbers of weights that a decode step reads."""

    dense: float
    experts: float


@cache
def quantized_parameters(shape: ModelShape) -> int:
    """Return the number of weights outside of experts that an engine with block-FP8 weights holds in FP8."""
    total = 0
    for name, dims in _tensors_with_one_expert(shape).items():
        if is_quantized(name) and ".experts." not in name:
            total += prod(dims)
    return total


@cache
def attention_parameters(shape: ModelShape) -> int:
    """Return the number of weights that each attention replica holds, without the embedding.

    The embedding does not count, because a step reads only a few of its rows.
    """
    total = 0
    for name, dims in _tensors_with_one_expert(shape).items():
        if any(module in name for module in ATTENTION_MODULES):
            total += prod(dims)
    return total


def _tensors_with_one_expert(shape: ModelShape) -> dict[str, Dims]:
    """Return the sizes of the model's tensors by name, with at most one expert in a layer: the callers skip experts."""
    return hf_tensors(replace(shape, num_experts=min(shape.num_experts, 1)))


def touched_parameters(shape: ModelShape, running: float) -> TouchedParameters:
    """Return the numbers of weights that a batch of ``running`` tokens reads.

    With uniform routing to k of E experts for each token, the batch reads the share 1 - (1 - k / E)^running of the
    experts' weights.
    """
    if not shape.is_moe:
        return TouchedParameters(float(active_parameters(shape)), 0.0)
    # ``expert_size``: the three matrices of one expert in each layer that has experts.
    expert_size = len(shape.moe_layers) * 3.0 * shape.hidden_size * shape.moe_ffn_hidden_size
    dense_size = active_parameters(shape) - expert_size * shape.experts_per_token
    read_share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
    return TouchedParameters(dense_size, expert_size * shape.num_experts * read_share)
