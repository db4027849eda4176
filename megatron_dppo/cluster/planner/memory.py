"""Count the bytes in the memory of a trainer rank's GPU, of a server's GPU and of a node's host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from megatron_dppo.cluster.planner import devices
from megatron_dppo.cluster.planner.activations import ActivationBytes, activation_bytes
from megatron_dppo.cluster.planner.facts import (
    Counts,
    EngineFacts,
    RankParameters,
    RolloutFacts,
    RunFacts,
    TrainerFacts,
    elements,
    rank_parameters,
)
from megatron_dppo.data.columns import (
    ROLLOUT_LOG_PROBS,
    ROUTED_EXPERTS,
    TOPK_IDS,
    TOPK_LOG_PROBS,
    WEIGHT_VERSION,
    Column,
    Form,
    Rows,
)
from megatron_dppo.launch.placement import Allocation, Host, Placement, PlacementError, Roles, place
from megatron_dppo.model import mapping
from megatron_dppo.model.families import Rule, family_of
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import (
    COPIED_PARTS,
    TRAINER_PARTS,
    ModelShape,
    TrainerPart,
    checkpoint_bytes,
)

# GPU memory of NCCL's communicators, of a trainer rank and of an engine rank.

CHANNELS = 16
"""Channels of a communicator over NVLink and InfiniBand. Assumption: NCCL chooses between 8 and 32."""
CONNECTIONS = 2
"""Receiving connections of a rank in each channel: one for the ring and one for the tree. Assumption."""
_LL = 8 * 512 * 8 * 16
_LL128 = 120 * 640 * 8 * 8
_SIMPLE = 4 * devices.MIB
PER_COMMUNICATOR = CHANNELS * CONNECTIONS * (_LL + _LL128 + _SIMPLE)
"""Bytes: channels x connections x the buffers of NCCL's three protocols (src/include/device.h and src/init.cc of NCCL
2.29: LL 8 lines x 512 threads x 8 steps x 16 bytes, LL128 120 x 640 x 8 x 8, Simple NCCL_BUFFSIZE = 4 MiB)."""


def trainer_communicator_bytes(layout: Layout, *, sends: bool) -> int:
    """Return the bytes of the communicators that a trainer rank uses.

    A rank uses the world's communicator, one for each parallel dimension of more than one rank, and (``sends``) one
    that it shares with all engine ranks. Megatron-Core makes more groups; NCCL allocates only for those that are used.
    """
    sizes = (
        layout.tensor,
        layout.context,
        layout.pipeline,
        layout.data,
        layout.expert,
        layout.expert_data,
    )
    groups = sum(size > 1 for size in sizes) + (layout.expert_tensor > 1 and layout.expert > 1)
    # Gradients are reduced over a joint group of the data and context dimensions.
    groups += layout.context > 1 and layout.data > 1
    return (int(layout.world_size > 1) + groups + int(sends)) * PER_COMMUNICATOR


def engine_communicator_bytes(tensor: int, senders: int) -> int:
    """Return the bytes of an engine rank's communicators: its server's own group, and one with each weight sender."""
    return (int(tensor > 1) + senders) * PER_COMMUNICATOR


# Weights, gradients and Adam's state of a rank, as the trainer's settings of Megatron-Core make them.

_PARAMETER_PAD, _BUCKET_PAD = 64, 128


@dataclass(frozen=True)
class StateBytes:
    """Bytes that stay allocated on one rank during the whole run, by ``TrainerPart``."""

    weights: int
    reference: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in TRAINER_PARTS)


def state_bytes(trainer: TrainerFacts, stage: int) -> StateBytes:
    """Return the bytes of weights, reference policy, gradient buffers and optimizer state on each rank of ``stage``.

    - weights: elements x 2 (bfloat16) or 4 (float32).
    - gradients: elements x 4 (``grad_reduce_in_fp32=True`` in ``trainer/model.py``) or x 2; dense and expert
      parameters have a buffer each (``_ParamAndGradBuffer``).
    - optimizer: Adam's two fp32 moments, 8 bytes, and for bfloat16 a fp32 master, 4 bytes (megatron.core
      ``Float16OptimizerWithFloat16Params``, ``DistributedOptimizer``); a float32 parameter is its own master.
      ``optimizer.distributed`` divides these bytes by the number of ranks with the same parameters: ``data`` x
      ``context`` for dense parameters, ``expert_data`` for experts.
    - With the distributed optimizer, weights and gradients are stored in buffers: each parameter starts at a multiple
      of 64 elements, and the end is padded to a multiple of lcm(replicas, 128) (``_pad_start_of_param_if_needed``,
      ``_pad_end_of_bucket_if_needed``).
    - With adapters, only the adapters have such buffers; the frozen weights stay in the tensors of the model.
    - A reference policy copies the trained ones of the model's own parameters, and also the adapters where they start
      from a folder (``ReferenceWeights``).
    """
    parameters, frozen_elements = rank_parameters(trainer.shape, trainer.layout, stage), 0
    base_elements = parameters.elements
    if trainer.trained is not None:
        base_elements = trainer.trained.trained_base(trainer.shape, trainer.layout)
        frozen_elements = parameters.elements - base_elements
        parameters = trainer.trained.parameters(trainer.shape, trainer.layout, stage)
    padded_sizes = [
        _buffer_elements(counts, replicas) if trainer.distributed else elements(counts)
        for counts, replicas in _groups(parameters, trainer.layout)
    ]
    buffer_elements = sum(padded_sizes)
    reference_elements = base_elements if trainer.reference else 0
    if trainer.reference_adapters:
        reference_elements = parameters.elements
    shard_sizes = [
        size // replicas if trainer.distributed else size
        for size, (_, replicas) in zip(
            padded_sizes, _groups(parameters, trainer.layout), strict=True
        )
    ]
    return StateBytes(
        weights=(frozen_elements + buffer_elements) * trainer.item_bytes,
        reference=reference_elements * trainer.item_bytes,
        gradients=buffer_elements * trainer.gradient_bytes,
        optimizer=round(sum(shard_sizes) * trainer.optimizer_bytes),
    )


@dataclass(frozen=True)
class ParkedBytes:
    """Bytes of one rank's parked state.

    ``device``: bytes that parking frees on the GPU. ``host``: bytes of pinned host memory, which stays allocated after
    the first parking; each part has a buffer of its own, which torch's CachingHostAllocator rounds up to a power of
    two.
    """

    device: int
    host: int


def parked_bytes(state: StateBytes, parts: Collection[TrainerPart] = TRAINER_PARTS) -> ParkedBytes:
    """Return the bytes that a rank with ``state`` moves when ``trainer/parking.py`` parks ``parts``."""
    sizes: dict[TrainerPart, int] = {part: getattr(state, part) for part in parts}
    return ParkedBytes(
        device=sum(sizes.values()),
        host=sum(devices.power_of_two(sizes[part]) for part in COPIED_PARTS & sizes.keys()),
    )


def _groups(parameters: RankParameters, layout: Layout) -> list[tuple[Counts, int]]:
    dense_replicas = layout.data * layout.context
    groups = [(parameters.dense, dense_replicas), (parameters.experts, layout.expert_data)]
    return [(counts, replicas) for counts, replicas in groups if counts]


def _buffer_elements(counts: Counts, replicas: int) -> int:
    """Return the elements of one buffer of the distributed optimizer, with the padding of parameters and end."""
    total = sum(devices.ceil_to(size, _PARAMETER_PAD) * count for size, count in counts)
    return devices.ceil_to(total, math.lcm(replicas, _BUCKET_PAD))


# Peak memory of one trainer rank's GPU during a step.

_COLUMN_PIECE = 64 * devices.MIB
"""``PIECE_BYTES`` of loop/exchange.py: ranks exchange columns over the GPUs in pieces of this size."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one GPU of a pipeline stage, by part."""

    stage: int
    state: StateBytes
    activations: ActivationBytes
    update_buckets: int
    communicators: int
    context: int
    fragmentation: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part at the peak of training: while the logits exist, or while a layer is recomputed."""
        activations = self.activations
        head = activations.head + activations.logits
        is_peak_at_logits = head > activations.recomputed
        return {
            "weights": self.state.weights + self.state.reference,
            "gradients": self.state.gradients,
            "optimizer": self.state.optimizer,
            "activations": activations.layers
            + (0 if is_peak_at_logits else activations.recomputed),
            "logits": head if is_peak_at_logits else 0,
            "working": activations.working,
            "communicators": self.communicators,
            "context": self.context + self.fragmentation,
        }

    @property
    def total(self) -> int:
        """Peak memory: the larger of training and a weight update."""
        steady = self.state.total + self.communicators + self.context
        training = self.activations.total + self.fragmentation
        return steady + max(training, self.update_buckets)


def rank_bytes(facts: RunFacts, stage: int) -> RankBytes:
    """Return the bytes on the GPU of each rank of ``stage``.

    A weight update holds three buckets: one that is gathered, one that is converted to the engine's layout, and one
    that is sent. The exchange of columns between ranks holds two pieces, at another time.
    """
    activations = activation_bytes(facts.trainer, stage, facts.rollout.topk)
    sends = facts.engine.servers > 0 and not facts.schedule.is_colocated
    return RankBytes(
        stage=stage,
        state=state_bytes(facts.trainer, stage),
        activations=activations,
        update_buckets=max(3 * facts.bucket_bytes, 2 * _COLUMN_PIECE),
        communicators=trainer_communicator_bytes(facts.trainer.layout, sends=sends),
        context=devices.CONTEXT,
        fragmentation=round(activations.total * devices.FRAGMENTATION),
    )


# Memory of a server's GPUs: weights, KV cache and the reserved rest; and the sequences that run at once.

_ITEM = 2
_FEW_RUNNING, _MOST_RUNNING = 2048, 4096
_CHUNKED_PREFILL = 8192


@dataclass(frozen=True)
class EngineBytes:
    """Bytes on one GPU of a server, and the sequences that the server runs.

    ``reserved``: bytes that ``mem_fraction_static`` leaves free for activations, CUDA graphs and communicators.
    ``kv_tokens``: tokens in the KV cache of the whole server. ``sequences``: sequences of mean length that run at once;
    ``longest``: the same for sequences that reach both length limits.
    """

    weights: int
    kv_pool: int
    reserved: int
    fraction: float
    kv_tokens: int
    sequences: int
    longest: int


@cache
def weight_bytes(shape: ModelShape, layout: mapping.EngineLayout) -> int:
    """Return the bytes of an engine rank's bf16 weights: the family's rules, split as SGLang does (``in_engine``)."""
    mapping.check_engine_layout(shape, layout)
    family, layers = family_of(shape), shape.num_layers
    rules = [(rule, layers) for rule in family.layer]
    rules += [(family.embedding, 1), (family.final_norm, 1)]
    if not shape.tied_embeddings or mapping.keeps_untied_output(shape):
        rules.append((family.embedding, 1))
    total = sum(_elements(rule, shape, layout.tensor) * count for rule, count in rules)
    experts = layers * shape.num_experts // layout.expert
    total += sum(_elements(rule, shape, layout.expert_tensor) * experts for rule in family.expert)
    return total * _ITEM


def _elements(rule: Rule, shape: ModelShape, size: int) -> int:
    return math.prod(mapping.shard_of(rule.in_engine.split, rule.sources, shape, 0, size).shape)


def kv_bytes_per_token(shape: ModelShape, engine: EngineFacts) -> int:
    """Return the bytes of a token in the KV cache of one GPU.

    The formula is 2 x layers x key-value heads of the rank (at least one) x head size x bytes of an element (SGLang's
    ``MHATokenToKVPool``).
    """
    heads = max(1, shape.num_query_groups // engine.tensor)
    layers = -(-shape.num_layers // engine.pipeline)
    return 2 * layers * heads * shape.head_dim * engine.kv_bytes


def default_fraction(device: devices.Device, engine: EngineFacts) -> float:
    """Return the ``mem_fraction_static`` that SGLang 0.5.23 chooses (``arg_groups/memory_hook.py``).

    SGLang keeps free, in MiB: 512 + 1.5 x chunked prefill + 128 x TP x PP + 2 x largest batch with a CUDA graph, and
    on GPUs above 60 GiB at least 10 GiB.
    """
    memory = device.memory / devices.MIB
    chunk = chunk_tokens(engine, device)
    graphs = 512 if engine.tensor >= 4 or memory >= 160 * 1024 else 256
    reserved = 512 + 1.5 * max(chunk, 2048) + 128 * engine.gpus + 2 * graphs
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory - reserved) / memory, 3)


def chunk_tokens(engine: EngineFacts, device: devices.Device) -> int:
    """Return the tokens in one chunk of a prefill: the configured number, or the one that SGLang chooses."""
    large = device.memory >= 160 * 1024 * devices.MIB
    return engine.chunked_prefill or (2 * _CHUNKED_PREFILL if large else _CHUNKED_PREFILL)


def engine_bytes(
    shape: ModelShape, engine: EngineFacts, rollout: RolloutFacts, device: devices.Device
) -> EngineBytes:
    """Return the bytes on one GPU of a server, and the sequences that run on the server at once.

    KV pool = fraction x memory that is free before the weights are loaded - weights; tokens = pool / bytes of a token.
    Sequences at once = tokens / mean length, at most ``max_running_requests``, whose default is
    clamp(512 x tokens / context, 2048, 4096) (``model_executor/pool_configurator.py``).
    """
    weights = (
        weight_bytes(shape, mapping.EngineLayout(engine.tensor, engine.expert)) // engine.pipeline
    )
    fraction = engine.memory_fraction or default_fraction(device, engine)
    free_bytes = device.memory - devices.CONTEXT
    pool = int(free_bytes * fraction) - weights
    tokens = max(0, pool) // kv_bytes_per_token(shape, engine)
    context = rollout.longest_prompt + rollout.longest_response
    limit = engine.max_running or min(_MOST_RUNNING, max(_FEW_RUNNING, 512 * tokens // context))
    return EngineBytes(
        weights=weights,
        kv_pool=pool,
        reserved=free_bytes - int(free_bytes * fraction),
        fraction=fraction,
        kv_tokens=tokens,
        sequences=min(limit, int(tokens / rollout.mean_length)),
        longest=min(limit, tokens // context),
    )


def capture_host_bytes(shape: ModelShape, kv_tokens: int) -> int:
    """Return the bytes of pinned host memory in which a server with R3 stores its routing capture.

    The buffer holds the experts of each token in the KV pool: int32 [tokens, layers, k] (``state_capturer/base.py``,
    ``BaseHostCache``).
    """
    return kv_tokens * shape.num_layers * shape.experts_per_token * 4


LEAST_RESERVED = 3 * devices.GIB
"""Bytes that a server needs for the activations of a prefill chunk and for CUDA graphs, in addition to static memory
and communicators. Assumption; SGLang's own estimate is the 10 GiB and more of ``default_fraction``."""


# Bytes of a rollout batch's per-token columns: in the servers' HTTP replies, and in the ranks' host memory.

_TOKEN = 4 + 1
"""Bytes of a token: its int32 id and its loss mask."""
_BASE64 = 4 / 3


@dataclass(frozen=True)
class ColumnBytes:
    """Bytes of the columns of one rollout batch.

    ``routing`` and ``topk``: bytes of one copy in memory; ``*_wire``: bytes in the HTTP replies of the run's servers.
    ``replicas``: bytes of the columns that only the replica that trains on them holds, with the tokens, summed over
    all replicas.
    """

    routing: float
    routing_wire: float
    topk: float
    topk_wire: float
    replicas: float


def column_bytes(shape: ModelShape, rollout: RolloutFacts) -> ColumnBytes:
    """Return rows x bytes of a row for each column that ``data/columns.py`` declares, at the mean lengths.

    Routing (R3): layers x experts of a token, uint8 up to 256 experts, for each token but the last; a server sends the
    same bytes outside the JSON. Top-K: K int32 ids and K fp32 log-probabilities for each sampled token; a server sends
    them in base64.
    """
    routing = topk = 0.0
    if rollout.routing:
        routing = _rows(ROUTED_EXPERTS, rollout) * routing_bytes_per_token(shape)
    if rollout.topk:
        forms = [Form(c.dtypes[0], (rollout.topk,)) for c in (TOPK_IDS, TOPK_LOG_PROBS)]
        topk = _rows(TOPK_IDS, rollout) * sum(form.row_bytes for form in forms)
    sampled_rows = _rows(ROLLOUT_LOG_PROBS, rollout)
    row_sizes = [Form(c.dtypes[0], ()).row_bytes for c in (ROLLOUT_LOG_PROBS, WEIGHT_VERSION)]
    return ColumnBytes(
        routing=routing,
        routing_wire=routing,
        topk=topk,
        topk_wire=topk * _BASE64,
        replicas=rollout.tokens * _TOKEN + routing + topk + sampled_rows * sum(row_sizes),
    )


def routing_bytes_per_token(shape: ModelShape) -> int:
    """Return the bytes of a token's routing capture in memory."""
    narrow_dtype, wide_dtype = ROUTED_EXPERTS.dtypes
    row_shape = (len(shape.moe_layers), shape.experts_per_token)
    return Form(narrow_dtype if shape.num_experts <= 256 else wide_dtype, row_shape).row_bytes


def _rows(column: Column, rollout: RolloutFacts) -> float:
    rows = rollout.mean_response if column.rows is Rows.SAMPLED else rollout.mean_length - 1
    return rollout.responses * rows


# The placement of a run (``launch.placement``), counted by node: the GPUs that train and the GPUs that serve.


@dataclass(frozen=True)
class NodeRoles:
    """The roles of one node's GPUs.

    ``ranks``: the trainer ranks on the node. ``engine``: the number of GPUs that serve; ``servers``: the indexes of
    their servers.
    """

    node: int
    ranks: tuple[int, ...]
    engine: int
    servers: tuple[int, ...]
    idle: int

    @property
    def trainer(self) -> int:
        return len(self.ranks)


def node_roles(roles: Roles, cluster: devices.Cluster) -> tuple[tuple[NodeRoles, ...], list[str]]:
    """Return the roles of each node's GPUs and the reasons why they do not fit the nodes; one of both is empty."""
    names = [str(node) for node in range(cluster.nodes)]
    hosts = tuple(Host(name, name, cluster.gpus_per_node) for name in names)
    try:
        placement = place(roles, Allocation(hosts))
    except PlacementError as error:
        return (), [str(error)]
    return _by_node(placement, cluster), []


def _by_node(placement: Placement, cluster: devices.Cluster) -> tuple[NodeRoles, ...]:
    ranks: dict[int, list[int]] = {}
    servers: dict[int, list[int]] = {}
    engine: Counter[int] = Counter()
    for rank in placement.ranks:
        ranks.setdefault(int(rank.host.name), []).append(rank.rank)
    for server in placement.servers:
        for host in server.hosts:
            node = int(host.name)
            servers.setdefault(node, []).append(server.index)
            engine[node] += server.devices
    return tuple(
        NodeRoles(
            node,
            tuple(ranks.get(node, ())),
            engine[node],
            tuple(servers.get(node, ())),
            max(0, cluster.gpus_per_node - len(ranks.get(node, ())) - engine[node]),
        )
        for node in range(cluster.nodes)
    )


# Host memory of a node: processes, a batch's columns, copies for a checkpoint, the engines' pinned buffers.

TRAINER_PROCESS = 4 * devices.GIB
"""Bytes of a rank's Python, torch, CUDA host memory and pinned NCCL buffers. Assumption; 0.5 GiB measured without
CUDA."""
ENGINE_PROCESS = 8 * devices.GIB
"""The same for each GPU of a server, with its share of scheduler, tokenizer and detokenizer. Assumption."""
COPIES = 2
"""Copies of a batch's columns: the batch that is trained on, and the packs made of it. Staleness adds the batches that
generation is ahead."""


@dataclass(frozen=True)
class HostBytes:
    """Bytes of host memory on one node, which may train, serve or do both.

    ``checkpoint``: pinned copies of the tensors that the ranks write (``trainer/checkpoint/saving.py``), 0 where
    checkpoints are not written in the background.
    ``parked``: pinned copies of the ranks' state, 0 where servers have GPUs of their own.
    """

    processes: int
    batch: int
    checkpoint: int
    capture: int
    parked: int = 0

    @property
    def total(self) -> int:
        return self.processes + self.batch + self.checkpoint + self.capture + self.parked


def host_bytes(
    facts: RunFacts, columns: ColumnBytes, node: NodeRoles, capture: int, parked: int = 0
) -> HostBytes:
    """Return the bytes of host memory on ``node``.

    batch = ranks x copies x columns of all replicas / DP: an upper bound, because the ranks of a replica share one copy
    on a host where shared memory has room. checkpoint: each rank copies its share of weights and optimizer state. An
    element takes 14 bytes (12 in float32), divided among its replicas; with adapters, only their elements count. The
    rank copies into one pinned buffer, which torch's CachingHostAllocator rounds up to a power of two.

    Args:
        facts: The run.
        columns: The columns of one rollout batch.
        node: The roles of the node's GPUs.
        capture: Bytes of R3's pinned buffer for each engine GPU, 0 without R3.
        parked: Bytes of state that a rank keeps in host memory while a server has its GPU.
    """
    copies = COPIES + facts.schedule.staleness
    per_rank = columns.replicas / facts.trainer.layout.data
    return HostBytes(
        processes=node.trainer * TRAINER_PROCESS + node.engine * ENGINE_PROCESS,
        batch=round(node.trainer * copies * per_rank),
        checkpoint=len(node.ranks) * devices.power_of_two(_copied(facts))
        if facts.checkpoint_background
        else 0,
        capture=node.engine * capture,
        parked=len(node.ranks) * parked,
    )


def _copied(facts: RunFacts) -> int:
    """Return the bytes that a rank writes to a checkpoint; replicas divide the tensors that they all hold."""
    layout, trained = facts.trainer.layout, facts.trainer.trained
    if trained is None:
        counts = rank_parameters(facts.trainer.shape, layout, 0)
        experts = elements(counts.experts) * layout.expert * layout.expert_tensor
        model_elements = (elements(counts.dense) * layout.tensor + experts) * layout.pipeline
    else:
        model_elements = trained.elements(facts.trainer.shape)
    return round(checkpoint_bytes(model_elements, facts.trainer.dtype) / layout.world_size)
