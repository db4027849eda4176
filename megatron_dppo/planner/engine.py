"""A server's GPUs: weights, KV cache, what is left for everything else; sequences that run at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from megatron_dppo.model.engine_layout import EngineLayout, check_engine_layout, keeps_untied_output
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import shard_of
from megatron_dppo.model.rules import Rule
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.devices import Device, usable_bytes
from megatron_dppo.planner.job import EngineJob, RolloutJob
from megatron_dppo.planner.units import GIB, MIB

_ITEM = 2
_FEW_RUNNING, _MOST_RUNNING = 2048, 4096
_CHUNKED_PREFILL = 8192


@dataclass(frozen=True)
class EngineBytes:
    """One GPU of a server. ``reserved``: what ``mem_fraction_static`` leaves free, for activations, CUDA graphs and
    communicators. ``kv_tokens``: of the whole server. ``sequences``: that run at once, at the mean length; ``longest``:
    if all were as long as they may be."""

    weights: int
    kv_pool: int
    reserved: int
    fraction: float
    kv_tokens: int
    sequences: int
    longest: int


@cache
def weight_bytes(shape: ModelShape, layout: EngineLayout) -> int:
    """bf16 weights of an engine rank: the family's rows by SGLang's own cuts (``Rule.in_engine``)."""
    check_engine_layout(shape, layout)
    family, each = family_of(shape), shape.num_layers
    rules = [(rule, each) for rule in family.layer] + [
        (family.embedding, 1),
        (family.final_norm, 1),
    ]
    if not shape.tied_embeddings or keeps_untied_output(shape):
        rules.append((family.embedding, 1))
    total = sum(_elements(rule, shape, layout.tensor) * count for rule, count in rules)
    experts = each * shape.num_experts // layout.expert
    total += sum(_elements(rule, shape, layout.expert_tensor) * experts for rule in family.expert)
    return total * _ITEM


def _elements(rule: Rule, shape: ModelShape, size: int) -> int:
    return math.prod(shard_of(rule.in_engine.split, rule.sources, shape, 0, size).shape)


def kv_bytes_per_token(shape: ModelShape, engine: EngineJob) -> int:
    """Of one GPU: 2 x layers x key-value heads of the rank (at least one) x head size x bytes of an element (SGLang's
    ``MHATokenToKVPool``)."""
    heads = max(1, shape.num_query_groups // engine.tensor)
    layers = -(-shape.num_layers // engine.pipeline)
    return 2 * layers * heads * shape.head_dim * engine.kv_bytes


def default_fraction(device: Device, engine: EngineJob) -> float:
    """``mem_fraction_static`` as SGLang 0.5.23 chooses it (``arg_groups/memory_hook.py``): MiB kept free = 512 + 1.5 x
    chunked prefill + 128 x TP x PP + 2 x largest batch with a CUDA graph, and on GPUs above 60 GiB at least 10 GiB."""
    memory = device.memory / MIB
    chunk = chunk_tokens(engine, device)
    graphs = 512 if engine.tensor >= 4 or memory >= 160 * 1024 else 256
    reserved = 512 + 1.5 * max(chunk, 2048) + 128 * engine.gpus + 2 * graphs
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory - reserved) / memory, 3)


def chunk_tokens(engine: EngineJob, device: Device) -> int:
    """Tokens of a prefill's pass, as SGLang chooses them."""
    large = device.memory >= 160 * 1024 * MIB
    return engine.chunked_prefill or (2 * _CHUNKED_PREFILL if large else _CHUNKED_PREFILL)


def engine_bytes(
    shape: ModelShape, engine: EngineJob, rollout: RolloutJob, device: Device
) -> EngineBytes:
    """KV pool = fraction x free memory before the weights - weights; tokens = pool / bytes of a token.

    Sequences at once: tokens / mean length, at most ``max_running_requests``, whose default is
    clamp(512 x tokens / context, 2048, 4096) (``model_executor/pool_configurator.py``).
    """
    weights = weight_bytes(shape, EngineLayout(engine.tensor, engine.expert)) // engine.pipeline
    fraction = engine.memory_fraction or default_fraction(device, engine)
    free = usable_bytes(device)
    pool = int(free * fraction) - weights
    tokens = max(0, pool) // kv_bytes_per_token(shape, engine)
    context = rollout.longest_prompt + rollout.longest_response
    limit = engine.max_running or min(_MOST_RUNNING, max(_FEW_RUNNING, 512 * tokens // context))
    return EngineBytes(
        weights=weights,
        kv_pool=pool,
        reserved=free - int(free * fraction),
        fraction=fraction,
        kv_tokens=tokens,
        sequences=min(limit, int(tokens / rollout.mean_length)),
        longest=min(limit, tokens // context),
    )


def capture_host_bytes(shape: ModelShape, kv_tokens: int) -> int:
    """Pinned host memory in which a server with R3 keeps the experts of every token of its KV pool: int32 [tokens,
    layers, k] (``state_capturer/base.py``, ``BaseHostCache``)."""
    return kv_tokens * shape.num_layers * shape.experts_per_token * 4


LEAST_RESERVED = 3 * GIB
"""Bytes beside static memory and communicators that a server needs for activations of a prefill chunk and CUDA graphs.
Assumption; SGLang's own estimate is the 10 GiB and more of ``default_fraction``."""
