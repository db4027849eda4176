"""How long servers take to generate: a roofline of memory bandwidth and FLOPs, and the tail of the longest response."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from megatron_dppo.model.shape import ModelShape, active_parameters
from megatron_dppo.model.shape import forward_flops as model_flops
from megatron_dppo.planner.devices import LINK_EFFICIENCY, Cluster, Device
from megatron_dppo.planner.facts import EngineFacts, RunFacts
from megatron_dppo.planner.memory import chunk_tokens, engine_bytes, kv_bytes_per_token


def linear_flops(shape: ModelShape) -> float:
    """Of one token's forward pass in matrix products: twice the weights that multiply it."""
    return model_flops(shape).linear


def attention_flops(shape: ModelShape, length: float) -> float:
    """Of one token's forward pass, on average over a causal sequence of ``length`` tokens."""
    return model_flops(shape).quadratic * length


def forward_flops(shape: ModelShape, length: float) -> float:
    """Of one token of a sequence of ``length`` tokens."""
    return linear_flops(shape) + attention_flops(shape, length)


# What a server over several nodes pays for its network: tensor parallelism's collectives in a
# forward pass, and what one pipeline stage hands to the next.

_ITEM = 2


def network_seconds(
    shape: ModelShape, engine: EngineFacts, cluster: Cluster, tokens: float, sampled: float
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
    shape: ModelShape, engine: EngineFacts, cluster: Cluster, tokens: float
) -> float:
    """Seconds in which a pipeline stage hands ``tokens`` hidden states (bf16) to a stage on another node; 0 where all
    stages are on one. Each GPU of the stage sends its part, on a port of its own: latency + bytes / rate."""
    if engine.pipeline == 1 or engine.gpus <= cluster.gpus_per_node:
        return 0.0
    sent = tokens * shape.hidden_size * _ITEM / engine.tensor
    return cluster.network_latency + sent / (cluster.device.network * LINK_EFFICIENCY)


# One decode step.

HBM_EFFICIENCY = 0.7
"""Share of the memory's rate that decoding reaches in dense weights and KV cache. Holds in the published runs of dense
models (docs/scale.md)."""
EXPERT_EFFICIENCY = 0.55
"""The same of the experts' weights, of which each serves a few tokens. Set from published runs (docs/scale.md)."""
PREFILL_UTILISATION = 0.4
"""Share of peak FLOP/s in prefill and in large decode batches. Assumption."""
DECODE_OVERHEAD = 0.004
"""Seconds of a decode step beside weights and KV cache: launches, sampling, scheduling. Assumption."""
SEQUENCE_OVERHEAD = 10e-6
"""Seconds of a decode step for each sequence beside these: sampling, its log-probability, scheduling, detokenizing. Set
from published runs (docs/scale.md)."""
REDUCE_LATENCY = 15e-6
"""Seconds of one small all-reduce over NVLink beside its bytes. Assumption."""


def decode_seconds(facts: RunFacts, cluster: Cluster, running: float, context: float) -> float:
    """One decode step of a server with ``running`` sequences of ``context`` tokens: max(bytes / memory rate, FLOPs /
    peak) + collectives + an overhead, and one of each sequence. Bytes of a GPU: the weights that the batch touches, and
    the KV cache of all sequences.

    With p pipeline stages the batch is p parts, each in another stage, and every part passes all stages: p times what
    a stage, 1 / p of the layers, takes for a part and for handing it on. So weights are read p times.
    """
    shape, engine, device = facts.trainer.shape, facts.engine, cluster.device
    stages = engine.pipeline
    part = max(1.0, running / stages)
    touched = touched_parameters(shape, part)
    cache = part * context * kv_bytes_per_token(shape, engine)
    memory = (touched.dense * _ITEM / engine.gpus + cache) / (device.hbm * HBM_EFFICIENCY)
    memory += touched.experts * _ITEM / engine.gpus / (device.hbm * EXPERT_EFFICIENCY)
    flops = part * (linear_flops(shape) + 2 * attention_flops(shape, context)) / engine.gpus
    compute = flops / (device.flops * PREFILL_UTILISATION)
    beside = DECODE_OVERHEAD + hand_over_seconds(shape, engine, cluster, part)
    reduce = reduce_seconds(shape, engine, device, part)
    reduce += network_seconds(shape, engine, cluster, part, part)
    return stages * (max(memory, compute) + beside) + running * SEQUENCE_OVERHEAD + reduce


def reduce_seconds(shape: ModelShape, engine: EngineFacts, device: Device, tokens: float) -> float:
    """Of a forward pass's all-reduces within a node, two a layer: latency, and 2 (n - 1) / n of the hidden states'
    bytes (bf16) over NVLink."""
    size = engine.tensor
    if size == 1:
        return 0.0
    moved = 2 * (size - 1) / size * tokens * shape.hidden_size * _ITEM
    each = REDUCE_LATENCY + moved / (device.nvlink * LINK_EFFICIENCY)
    return 2 * shape.num_layers * each


@dataclass(frozen=True)
class Touched:
    """Weights that a decode step reads."""

    dense: float
    experts: float


def touched_parameters(shape: ModelShape, running: float) -> Touched:
    """By a batch of ``running`` tokens: with uniform routing 1 - (1 - k / E)^running of the experts."""
    if not shape.is_moe:
        return Touched(float(active_parameters(shape)), 0.0)
    expert = shape.num_layers * 3.0 * shape.hidden_size * shape.moe_ffn_hidden_size
    dense = active_parameters(shape) - expert * shape.experts_per_token
    share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
    return Touched(dense, expert * shape.num_experts * share)


# A rollout batch.


@dataclass(frozen=True)
class GenerationSeconds:
    """Of a rollout batch, on all servers. ``steady``: servers are full; ``tail``: few of the longest responses are
    left, and the next batch may not begin. ``mean_response``: one of that length, on a full server; ``last_response``:
    the longest, begun when no other waits."""

    steady: float
    tail: float
    mean_response: float = 0.0
    last_response: float = 0.0

    @property
    def total(self) -> float:
        return self.steady + self.tail


def generation_seconds(facts: RunFacts, cluster: Cluster) -> GenerationSeconds:
    """Seconds of a rollout batch under the run's schedule.

    Where every step waits for all of its responses, from the first prompt to the last response: steady = sampled tokens
    of a server / sequences at once, each at the decode step of that batch and half of the mean length, and prompts
    once a group (the prefix cache serves the rest); tail = what the longest response needs beyond the mean one, with a
    tenth of the sequences.

    Where responses go on after an update there is no tail, but each update prefills what is running again. What the
    longest response then costs depends on the trainer, too: ``StepSeconds.decoding``.
    """
    rollout, schedule = facts.rollout, facts.schedule
    # Responses come from a file, or from servers that others started.
    if not facts.engine.servers:
        return GenerationSeconds(0.0, 0.0)
    running = sequences_at_once(facts, cluster)
    context = rollout.mean_prompt + rollout.mean_response / 2
    step = decode_seconds(facts, cluster, running, context)
    steady = rollout.response_tokens / facts.engine.servers / running * step
    steady += prefill_seconds(facts, cluster)
    mean, longest = rollout.mean_response, rollout.longest_response
    tail = (longest - mean) * decode_seconds(facts, cluster, max(1.0, running / 10), longest)
    if schedule.drains:
        return GenerationSeconds(steady, tail, mean * step, mean * step + tail)
    steady += resumed_seconds(facts, cluster, running)
    return GenerationSeconds(steady, 0.0, mean * step, mean * step + tail)


def sequences_at_once(facts: RunFacts, cluster: Cluster) -> float:
    """That a server runs: what waits for it, what its KV cache holds, what clients ask for at a time; the least."""
    rollout = facts.rollout
    ahead = 1 if facts.schedule.drains else max(1, facts.schedule.staleness)
    waiting = ahead * rollout.responses / facts.engine.servers
    return max(1.0, min(waiting, server_slots(facts, cluster)))


def server_slots(facts: RunFacts, cluster: Cluster) -> float:
    """Sequences that a server has room for: what its KV cache holds, what clients ask for at a time; the less."""
    rollout, engine = facts.rollout, facts.engine
    memory = engine_bytes(facts.trainer.shape, engine, rollout, cluster.device)
    leaders = facts.trainer.layout.data * rollout.max_concurrent / engine.servers
    return min(memory.sequences, leaders)


def resumed_seconds(facts: RunFacts, cluster: Cluster, running: float) -> float:
    """Of prefilling ``running`` sequences of a server again, half of their mean length done, after an update."""
    shape, rollout, engine = facts.trainer.shape, facts.rollout, facts.engine
    length = rollout.mean_prompt + rollout.mean_response / 2
    flops = running * length * forward_flops(shape, length)
    return flops / (engine.gpus * cluster.device.flops * PREFILL_UTILISATION)


def evaluation_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """One evaluation: generation of all its responses, which are as long as training's unless its limit is lower."""
    evaluation = facts.evaluation
    if evaluation is None:
        return 0.0
    rollout = replace(
        facts.rollout,
        prompts=evaluation.problems,
        group_size=evaluation.samples,
        longest_response=evaluation.longest_response,
        mean_response=min(facts.rollout.mean_response, evaluation.longest_response),
    )
    asked = replace(facts, rollout=rollout, schedule=replace(facts.schedule, drains=True))
    return generation_seconds(asked, cluster).total


def prefill_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Every prompt once, on all servers: FLOPs / (peak x utilisation) + what passes over chunks of prompts take
    between nodes. With p pipeline stages p - 1 more passes fill and drain them."""
    shape, rollout, engine = facts.trainer.shape, facts.rollout, facts.engine
    tokens = rollout.prompts * rollout.mean_prompt / engine.servers
    seconds = tokens * linear_flops(shape)
    seconds /= engine.gpus * cluster.device.flops * PREFILL_UTILISATION
    passes = ceil(tokens / chunk_tokens(engine, cluster.device))
    prompts = rollout.prompts / engine.servers
    chunk, stages = tokens / passes, engine.pipeline
    moved = network_seconds(shape, engine, cluster, chunk, prompts / passes) / stages
    moved += hand_over_seconds(shape, engine, cluster, chunk)
    return (seconds / passes + moved) * (passes + stages - 1)
