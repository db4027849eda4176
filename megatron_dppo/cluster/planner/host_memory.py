"""Host memory of a node: processes, a batch's columns, copies for a checkpoint, the engines' pinned buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_dppo.cluster.planner.batch_memory import ColumnBytes
from megatron_dppo.cluster.planner.devices import GIB, Cluster, power_of_two
from megatron_dppo.cluster.planner.facts import RunFacts, elements, rank_parameters
from megatron_dppo.cluster.planner.server_memory import EngineBytes, capture_host_bytes
from megatron_dppo.cluster.planner.trainer_state import state_bytes
from megatron_dppo.launch.placement import Allocation, Host, Placement, PlacementError, place
from megatron_dppo.spec import Roles


@dataclass(frozen=True)
class NodeRoles:
    """The roles of one node's GPUs.

    Attributes:
        node: the node's number.
        ranks: the trainer ranks on the node.
        engine: the number of GPUs that serve, the policy or a teacher.
        servers: the indexes of the policy's servers on these GPUs.
        idle: the number of GPUs that neither train nor serve.
    """

    node: int
    ranks: tuple[int, ...]
    engine: int
    servers: tuple[int, ...]
    idle: int

    @property
    def trainer(self) -> int:
        """The number of GPUs that train."""
        return len(self.ranks)


def node_roles(roles: Roles, cluster: Cluster) -> tuple[tuple[NodeRoles, ...], list[str]]:
    """Return the roles of each node's GPUs, and the reasons why the roles do not fit; one of the two is empty."""
    names = [str(node) for node in range(cluster.nodes)]
    hosts = tuple(Host(name, name, cluster.gpus_per_node) for name in names)
    try:
        placement = place(roles, Allocation(hosts))
    except PlacementError as error:
        return (), [str(error)]
    return _by_node(placement, cluster), []


def _by_node(placement: Placement, cluster: Cluster) -> tuple[NodeRoles, ...]:
    """Return the roles of each node. The name of a host is the number of its node."""
    ranks: dict[int, list[int]] = {}
    servers: dict[int, list[int]] = {}
    engine: Counter[int] = Counter()
    for rank in placement.ranks:
        ranks.setdefault(int(rank.host.name), []).append(rank.rank)
    for server in (*placement.servers, *placement.teachers):
        for host in server.hosts:
            node = int(host.name)
            if not server.teacher:
                servers.setdefault(node, []).append(server.index)
            engine[node] += server.devices
    roles: list[NodeRoles] = []
    for node in range(cluster.nodes):
        node_ranks = tuple(ranks.get(node, ()))
        node_servers = tuple(servers.get(node, ()))
        idle_gpus = max(0, cluster.gpus_per_node - len(node_ranks) - engine[node])
        roles.append(NodeRoles(node, node_ranks, engine[node], node_servers, idle_gpus))
    return tuple(roles)


TRAINER_PROCESS = 4 * GIB
"""Bytes of a rank's Python, torch, CUDA host memory and pinned NCCL buffers. Assumption; without CUDA, 0.5 GiB were
measured."""


ENGINE_PROCESS = 8 * GIB
"""Bytes of a server's processes (scheduler, tokenizer, detokenizer) for each of its GPUs. Assumption."""


COPIES = 2
"""Copies of a batch's columns: the batch that is trained on, and the packs made of it. Staleness adds one copy for each
batch that generation may be ahead."""


@dataclass(frozen=True)
class HostBytes:
    """Bytes of host memory on one node. The node may train, serve, or do both.

    Attributes:
        processes: the processes of ranks and servers.
        batch: the columns of rollout batches.
        checkpoint: pinned copies of the tensors that the ranks write (``trainer/checkpoint/saving.py``); 0 if
            checkpoints are not written in the background.
        capture: the servers' pinned buffers of R3.
        parked: pinned copies of the ranks' state; 0 unless trainer and servers share GPUs.
        offloaded: Adam's state of an offloaded optimizer.
        sent: pinned copies of the weights that the ranks sent last, 0 unless updates send only changes.
        kept: tensors of an update that servers keep until its end, 0 without ``engine.atomic_updates``.
    """

    processes: int
    batch: int
    checkpoint: int
    capture: int
    parked: int = 0
    offloaded: int = 0
    sent: int = 0
    kept: int = 0

    @property
    def updates(self) -> int:
        """Bytes for weight updates, of ranks and servers."""
        return self.sent + self.kept

    @property
    def total(self) -> int:
        moved = self.parked + self.offloaded + self.updates
        return self.processes + self.batch + self.checkpoint + self.capture + moved


def host_bytes(
    facts: RunFacts,
    columns: ColumnBytes,
    node: NodeRoles,
    engine: EngineBytes | None,
    parked: int,
    update: int,
) -> HostBytes:
    """Return the bytes of host memory on ``node``.

    - batch = ranks x copies x columns of all replicas / DP. This is an upper bound: if the host's shared memory has
      room, the ranks of a replica share one copy.
    - checkpoint: each rank copies its share of weights and optimizer state. An element takes 14 bytes (12 in float32,
      less with bfloat16 moments), and the replicas of an element divide these bytes among themselves. With adapters,
      only the trained elements count. The rank copies into one pinned buffer. torch's CachingHostAllocator rounds the
      buffer up to a power of two.
    - sent: the share of an update that the node's ranks send. All ranks send equal shares.

    Args:
        facts: The run.
        columns: The columns of one rollout batch.
        node: The roles of the node's GPUs.
        engine: Memory of a server's GPU; None without servers.
        parked: Bytes of state that a rank keeps in host memory while a server uses the rank's GPU.
        update: Bytes of a whole weight update.
    """
    copies = COPIES + facts.schedule.staleness
    columns_per_rank = columns.replicas / facts.trainer.layout.data
    checkpoint = sent = capture = kept = 0
    if facts.config.checkpoint.background:
        checkpoint = node.trainer * power_of_two(written_bytes(facts))
    if facts.config.weight_sync.changes_only:
        sent = update * node.trainer // facts.trainer.layout.world_size
    if engine is not None and facts.rollout.routing:
        capture = capture_host_bytes(facts.trainer.shape, engine.kv_tokens)
    if engine is not None and facts.config.engine.atomic_updates:
        kept = engine.weights
    return HostBytes(
        processes=node.trainer * TRAINER_PROCESS + node.engine * ENGINE_PROCESS,
        batch=round(node.trainer * copies * columns_per_rank),
        checkpoint=checkpoint,
        capture=node.engine * capture,
        parked=node.trainer * parked,
        offloaded=node.trainer * _offloaded_bytes(facts),
        sent=sent,
        kept=node.engine * kept,
    )


def _offloaded_bytes(facts: RunFacts) -> int:
    """Return the bytes of Adam's state that a rank of the largest stage keeps in host memory."""
    stages = range(facts.trainer.layout.pipeline)
    return max(state_bytes(facts.trainer, stage).offloaded for stage in stages)


def written_bytes(facts: RunFacts) -> int:
    """Return the bytes that a rank writes to a checkpoint. The replicas of a tensor divide the tensor's bytes."""
    trainer = facts.trainer
    layout = trainer.layout
    if trainer.trained is None:
        model_elements = 0
        for stage in range(layout.pipeline):
            counts = rank_parameters(trainer.shape, layout, stage)
            model_elements += elements(counts.dense) * layout.tensor
            model_elements += elements(counts.experts) * layout.expert * layout.expert_tensor
    else:
        model_elements = trainer.trained.elements(trainer.shape)
    return round(trainer.checkpoint_bytes(model_elements) / layout.world_size)
