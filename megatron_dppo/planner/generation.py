"""How long servers take to generate a rollout batch: a roofline of memory bandwidth and FLOPs, and the longest tail."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from megatron_dppo.model.flops import active_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.devices import Cluster
from megatron_dppo.planner.engine import chunk_tokens, engine_bytes, kv_bytes_per_token
from megatron_dppo.planner.flops import attention_flops, linear_flops
from megatron_dppo.planner.job import Job
from megatron_dppo.planner.server_network import hand_over_seconds, network_seconds

HBM_EFFICIENCY = 0.7
"""Share of the memory's rate that decoding reaches. Assumption."""
PREFILL_UTILISATION = 0.4
"""Share of peak FLOP/s in prefill and in large decode batches. Assumption."""
DECODE_OVERHEAD = 0.004
"""Seconds of a decode step beside weights and KV cache: launches, sampling, scheduling. Assumption."""
REDUCE_LATENCY = 15e-6
"""Seconds of one small all-reduce over NVLink; two a layer under tensor parallelism. Assumption."""


def decode_seconds(job: Job, cluster: Cluster, running: float, context: float) -> float:
    """One decode step of a server with ``running`` sequences of ``context`` tokens: max(bytes / memory rate, FLOPs /
    peak) + collectives + overhead. Bytes of a GPU: the weights that the batch touches, and the KV cache of all
    sequences.

    With p pipeline stages the batch is p parts, each in another stage, and every part passes all stages: p times what
    a stage, 1 / p of the layers, takes for a part and for handing it on. So weights are read p times.
    """
    shape, engine, device = job.trainer.shape, job.engine, cluster.device
    stages = engine.pipeline
    part = max(1.0, running / stages)
    touched = touched_parameters(shape, part) * 2 / engine.gpus
    cache = part * context * kv_bytes_per_token(shape, engine)
    memory = (touched + cache) / (device.hbm * HBM_EFFICIENCY)
    flops = part * (linear_flops(shape) + 2 * attention_flops(shape, context)) / engine.gpus
    compute = flops / (device.flops * PREFILL_UTILISATION)
    beside = DECODE_OVERHEAD + hand_over_seconds(shape, engine, cluster, part)
    reduce = 2 * shape.num_layers * REDUCE_LATENCY if engine.tensor > 1 else 0.0
    reduce += network_seconds(shape, engine, cluster, part, part)
    return stages * (max(memory, compute) + beside) + reduce


def touched_parameters(shape: ModelShape, running: float) -> float:
    """Weights that a batch of ``running`` tokens reads: with uniform routing 1 - (1 - k / E)^running of the experts."""
    if not shape.is_moe:
        return float(active_parameters(shape))
    expert = shape.num_layers * 3.0 * shape.hidden_size * shape.moe_ffn_hidden_size
    dense = active_parameters(shape) - expert * shape.experts_per_token
    share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
    return dense + expert * shape.num_experts * share


def generation_seconds(job: Job, cluster: Cluster) -> float:
    """Seconds from the first prompt to the last response, over all servers.

    Bulk: sampled tokens of a server / sequences at once, each at the decode step of that batch and half of the mean
    length; prompts once a group (the prefix cache serves the rest). Tail: what the longest response needs beyond the
    mean one, with a tenth of the sequences.
    """
    rollout, engine, device = job.rollout, job.engine, cluster.device
    if not engine.servers:
        return 0.0
    memory = engine_bytes(job.trainer.shape, engine, rollout, device)
    waiting = rollout.responses / engine.servers
    leaders = job.trainer.layout.data * rollout.max_concurrent / engine.servers
    running = max(1.0, min(waiting, memory.sequences, leaders))
    context = rollout.mean_prompt + rollout.mean_response / 2
    bulk = rollout.response_tokens / engine.servers / running
    bulk *= decode_seconds(job, cluster, running, context)
    beyond = rollout.longest_response - rollout.mean_response
    tail = beyond * decode_seconds(job, cluster, max(1.0, running / 10), rollout.longest_response)
    return bulk + prefill_seconds(job, cluster) + tail


def evaluation_seconds(job: Job, cluster: Cluster) -> float:
    """One evaluation: generation of its responses, which are as long as training's unless its limit is lower."""
    asked = job.evaluation
    if asked is None:
        return 0.0
    rollout = replace(
        job.rollout,
        prompts=asked.problems,
        group_size=asked.samples,
        longest_response=asked.longest_response,
        mean_response=min(job.rollout.mean_response, asked.longest_response),
    )
    return generation_seconds(replace(job, rollout=rollout), cluster)


def prefill_seconds(job: Job, cluster: Cluster) -> float:
    """Every prompt once, on all servers: FLOPs / (peak x utilisation) + what passes over chunks of prompts take
    between nodes. With p pipeline stages p - 1 more passes fill and drain them."""
    shape, rollout, engine = job.trainer.shape, job.rollout, job.engine
    tokens = rollout.prompts * rollout.mean_prompt / engine.servers
    seconds = tokens * linear_flops(shape)
    seconds /= engine.gpus * cluster.device.flops * PREFILL_UTILISATION
    passes = ceil(tokens / chunk_tokens(engine, cluster.device))
    prompts = rollout.prompts / engine.servers
    chunk, stages = tokens / passes, engine.pipeline
    moved = network_seconds(shape, engine, cluster, chunk, prompts / passes) / stages
    moved += hand_over_seconds(shape, engine, cluster, chunk)
    return (seconds / passes + moved) * (passes + stages - 1)


def assumptions() -> dict[str, float]:
    """What the model takes for granted, by name."""
    return {
        "decoding's share of the memory's rate": HBM_EFFICIENCY,
        "prefill's share of peak FLOP/s": PREFILL_UTILISATION,
        "seconds of a decode step beside memory and FLOPs": DECODE_OVERHEAD,
        "seconds of a small all-reduce": REDUCE_LATENCY,
    }
