"""Memory of a server's GPUs (weights, KV cache, reserved rest), and the number of sequences that run at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megatron_dppo.cluster.planner.devices import CONTEXT, GIB, MIB, Device
from megatron_dppo.cluster.planner.facts import RolloutFacts
from megatron_dppo.model import mapping
from megatron_dppo.model.engine_layout import EngineLayout, check_engine_layout
from megatron_dppo.model.families import engine_layer_counts, family_of
from megatron_dppo.model.quantization import stored_bytes
from megatron_dppo.model.rows import EngineRow
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.spec import ServersSpec

_ITEM = 2
"""Bytes of a bf16 element."""
_FEW_RUNNING, _MOST_RUNNING = 2048, 4096
"""Bounds of SGLang's default of ``max_running_requests``."""
_CHUNKED_PREFILL = 8192
"""SGLang's default of ``chunked_prefill_size`` on GPUs below 160 GiB."""
_STATE_SHARE = 0.9
"""SGLang's default of ``mamba_full_memory_ratio``: memory of recurrent states for each byte of the KV cache."""
_STATES_PER_SEQUENCE = 5
"""Recurrent states that SGLang keeps for a running sequence: three, and two more for snapshots of the prefix cache."""


@dataclass(frozen=True)
class EngineBytes:
    """Bytes on one GPU of a server, and the sequences that the server runs.

    Attributes:
        weights: bytes of the weights.
        kv_pool: bytes of the KV cache and, with delta nets, of the recurrent states.
        reserved: bytes that ``mem_fraction_static`` leaves free for activations, CUDA graphs and communicators.
        fraction: ``mem_fraction_static``.
        kv_tokens: tokens in the KV cache of the whole server.
        sequences: number of sequences of mean length that run at once.
        longest: number of sequences that run at once if each has the longest prompt and the longest response.
    """

    weights: int
    kv_pool: int
    reserved: int
    fraction: float
    kv_tokens: int
    sequences: int
    longest: int


@cache
def weight_bytes(shape: ModelShape, layout: EngineLayout, *, quantized: bool = False) -> int:
    """Return the bytes of the weights of one tensor-parallel rank, summed over all pipeline stages.

    The weights are bf16, except tensors that the family always keeps in another dtype. With ``quantized``, linear
    layers and experts are block FP8 with their scales.
    """
    check_engine_layout(shape, layout)
    family = family_of(shape)
    # SGLang's tensors outside of experts, each with its count.
    rows = engine_layer_counts(shape)
    rules_outside_layers = [family.embedding, family.final_norm]
    if not shape.tied_embeddings or mapping.keeps_untied_output(shape):
        rules_outside_layers.append(family.output)
    for rule in rules_outside_layers:
        rows += [(row, 1) for row in rule.in_engine]
    total = 0
    for row, count in rows:
        ranks = mapping.dividing_ranks(shape, layout, row)
        total += _tensor_bytes(row, shape, ranks, quantized) * count
    expert_count = len(shape.moe_layers) * shape.num_experts // layout.expert
    for rule in family.expert:
        for row in rule.in_engine:
            total += _tensor_bytes(row, shape, layout.expert_tensor, quantized) * expert_count
    return total


def _tensor_bytes(row: EngineRow, shape: ModelShape, ranks: int, quantized: bool) -> int:
    """Return the bytes of one of SGLang's tensors on one of the ``ranks`` that divide it."""
    dims = mapping.shard_of(row.split, row.sources, shape, 0, ranks).shape
    dtype = row.dtype_in(shape)
    item_bytes = _ITEM if dtype is None else ITEM_BYTES[dtype]
    return stored_bytes(row.sources[0].name, dims, item_bytes, quantized=quantized)


def kv_bytes_per_token(shape: ModelShape, engine: ServersSpec) -> int:
    """Return the bytes of a token in the KV cache on one GPU.

    The formula is 2 x layers with attention x key-value heads of the rank (at least one) x head size x bytes of an
    element (SGLang's ``MHATokenToKVPool``). With latent attention, the formula is layers x (width of the latent +
    rotated part of the key) x bytes of an element (``MLATokenToKVPool``).
    """
    layers = shape.attention_layers
    item_bytes = 1 if str(engine.options.get("kv_cache_dtype", "auto")).startswith("fp8") else 2
    return layers * shape.cached_elements(engine.layout.attention_tensor) * item_bytes


def state_bytes(shape: ModelShape, engine: ServersSpec) -> int:
    """Return the bytes of one recurrent state of a sequence on one GPU (SGLang's ``MambaPool``).

    In each layer with a delta net, the state has the matrices of the rank's heads, fp32, and the convolution's inputs
    of the last tokens, bf16.
    """
    if shape.delta is None:
        return 0
    matrices, convolved = shape.delta.state_elements()
    layers = len(shape.delta_layers)
    bytes_per_layer = matrices * ITEM_BYTES["float32"] + convolved * _ITEM
    return layers * bytes_per_layer // engine.layout.attention_tensor


def default_fraction(device: Device, engine: ServersSpec) -> float:
    """Return the ``mem_fraction_static`` that SGLang 0.5.23 chooses (``arg_groups/memory_hook.py``).

    SGLang keeps this number of MiB free: 512 + 1.5 x chunked prefill (at least 2048) + 128 x TP + 2 g, where g is
    the largest batch with a CUDA graph. With n > 1 attention replicas, SGLang adds 3 n g if g is at most 300, and
    1.5 x 3 n g otherwise. On GPUs above 60 GiB, SGLang keeps at least 10 GiB free.
    """
    memory_mib = device.memory / MIB
    chunk = chunk_tokens(engine, device)
    graph_batch = 256
    if engine.layout.tensor >= 4 or memory_mib >= 160 * 1024:
        graph_batch = 512
    reserved_mib = 512 + 1.5 * max(chunk, 2048) + 128 * engine.layout.tensor + 2 * graph_batch
    replicas = engine.layout.attention_replicas
    if replicas > 1:
        factor = 1.5 if graph_batch > 300 else 1
        reserved_mib += 3 * replicas * graph_batch * factor
    if memory_mib > 60 * 1024:
        reserved_mib = max(reserved_mib, 10 * 1024)
    return round((memory_mib - reserved_mib) / memory_mib, 3)


def chunk_tokens(engine: ServersSpec, device: Device) -> int:
    """Return the tokens in one chunk of a prefill: the configured number, or the number that SGLang chooses."""
    configured: int | None = engine.options.get("chunked_prefill_size")
    if configured:
        return configured
    if device.memory >= 160 * 1024 * MIB:
        return 2 * _CHUNKED_PREFILL
    return _CHUNKED_PREFILL


def engine_bytes(
    shape: ModelShape, engine: ServersSpec, rollout: RolloutFacts, device: Device
) -> EngineBytes:
    """Return the bytes on one GPU of a server, and the sequences that run on the server at once.

    KV pool = (fraction x memory that is free before loading the weights) - weights. Tokens = pool / bytes of a token.
    Sequences at once = tokens / mean length, at most ``max_running_requests``. The default of ``max_running_requests``
    is clamp(512 x tokens / context, 2048, 4096) (``model_executor/pool_configurator.py``). With delta nets, the pool is
    divided between the KV cache and recurrent states, and the number of states also limits the sequences
    (``mem_cache/kv_cache_configurator.py``). Each attention replica has its own pool, and its share of a configured
    ``max_running_requests``.
    """
    weights = weight_bytes(shape, engine.layout, quantized=engine.is_quantized)
    replicas = engine.layout.attention_replicas
    fraction = float(engine.options.get("mem_fraction_static") or default_fraction(device, engine))
    free_bytes = device.memory - CONTEXT
    pool = int(free_bytes * fraction) - weights
    kv_share = max(0, pool)
    if shape.delta is not None:
        kv_share = int(kv_share / (1 + _STATE_SHARE))
    tokens = kv_share // kv_bytes_per_token(shape, engine)
    context = rollout.longest_prompt + rollout.longest_response
    # ``limit`` is the largest number of running requests of one replica.
    if most_running := engine.options.get("max_running_requests"):
        limit = max(1, most_running // replicas)
    else:
        limit = min(_MOST_RUNNING, max(_FEW_RUNNING, 512 * tokens // context))
    if shape.delta is not None:
        states = (max(0, pool) - kv_share) // state_bytes(shape, engine)
        limit = min(limit, states // _STATES_PER_SEQUENCE)
    return EngineBytes(
        weights=weights,
        kv_pool=pool,
        reserved=free_bytes - int(free_bytes * fraction),
        fraction=fraction,
        kv_tokens=replicas * tokens,
        sequences=replicas * min(limit, int(tokens / rollout.mean_length)),
        longest=replicas * min(limit, tokens // context),
    )


def capture_host_bytes(shape: ModelShape, kv_tokens: int) -> int:
    """Return the bytes of pinned host memory in which one rank of a server captures the routing (R3).

    The buffer holds the experts of each token in the KV pool: int32 [tokens, layers, experts of a token]
    (``state_capturer/base.py``, ``BaseHostCache``).
    """
    return kv_tokens * shape.num_layers * shape.experts_per_token * 4


LEAST_RESERVED = 3 * GIB
"""Bytes that a server needs for the activations of a prefill chunk and for CUDA graphs, in addition to static memory
and communicators. Assumption. By default, SGLang keeps more memory free: at least 10 GiB on GPUs above 60 GiB
(``default_fraction``)."""
