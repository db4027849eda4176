"""Decide whether a run fits its machines: compute all parts of the plan, and describe each fault in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.cluster.planner.activations import activation_bytes
from megatron_dppo.cluster.planner.batch_memory import ColumnBytes, column_bytes
from megatron_dppo.cluster.planner.colocation import ColocatedBytes, shared_ranks, sharing_faults
from megatron_dppo.cluster.planner.communicators import engine_communicator_bytes
from megatron_dppo.cluster.planner.devices import Cluster, Device, device_named, gib
from megatron_dppo.cluster.planner.facts import RolloutFacts, RunFacts, facts_of
from megatron_dppo.cluster.planner.host_memory import HostBytes, NodeRoles, host_bytes, node_roles
from megatron_dppo.cluster.planner.memory import RankBytes, rank_bytes
from megatron_dppo.cluster.planner.server_memory import (
    LEAST_RESERVED,
    EngineBytes,
    engine_bytes,
    weight_bytes,
)
from megatron_dppo.cluster.planner.step_time import StepSeconds, step_seconds
from megatron_dppo.cluster.planner.traffic import STORAGE, Traffic, traffic
from megatron_dppo.cluster.planner.trainer_state import state_bytes
from megatron_dppo.config import ConfigError
from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.start_checks import StartCheck
from megatron_dppo.model.engine_layout import check_engine_layout
from megatron_dppo.model.errors import LayoutError, ModelError
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.spec import ServersSpec
from megatron_dppo.system.gpus import gpu_models


@dataclass(frozen=True)
class MemoryUse:
    """A kind of memory, with the bytes that the fullest of its kind uses, of the bytes that it has."""

    name: str
    used: float
    size: float

    @property
    def share(self) -> float:
        """The used share."""
        return self.used / self.size


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        facts: facts of the run.
        cluster: the machines.
        nodes: roles of each node's GPUs.
        ranks: memory of a trainer rank of each pipeline stage.
        engine: memory of a server's GPU; None if the run starts no servers, or if the servers cannot hold the model.
        teachers: memory of a GPU of each teacher's started servers, by the teacher's name.
        shared: memory of a GPU on which trainer and server take turns, for each pipeline stage.
        hosts: host memory of each node.
        columns: bytes of a rollout batch's columns.
        traffic: weight update and checkpoint.
        seconds: seconds of a step; None if the servers cannot hold the model.
        misplaced: the reasons why the roles do not fit the nodes, one line for each fault.
        too_large: the memories that are exceeded, one line for each fault.
    """

    facts: RunFacts
    cluster: Cluster
    nodes: tuple[NodeRoles, ...]
    ranks: tuple[RankBytes, ...]
    engine: EngineBytes | None
    teachers: Mapping[str, EngineBytes]
    shared: tuple[ColocatedBytes, ...]
    hosts: tuple[HostBytes, ...]
    columns: ColumnBytes
    traffic: Traffic
    seconds: StepSeconds | None
    misplaced: tuple[str, ...]
    too_large: tuple[str, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """All faults of the plan."""
        return self.misplaced + self.too_large

    @property
    def fits(self) -> bool:
        """Whether the plan has no fault."""
        return not self.faults

    @property
    def gpu_hours(self) -> float:
        """GPU hours of a step on all GPUs of the cluster; 0 if the time is unknown."""
        if self.seconds is None:
            return 0.0
        return self.seconds.total * self.cluster.gpus / 3600

    @property
    def gpu_idle(self) -> float:
        """Share of time that the GPUs of trainer and servers wait; 0 without servers or if the time is unknown."""
        engine = self.facts.engine
        if self.seconds is None or not engine.started:
            return 0.0
        ranks = self.facts.trainer.layout.world_size
        return self.seconds.gpu_idle(ranks, engine.started * engine.layout.tensor)

    @property
    def gpus(self) -> int:
        """The number of GPUs that train or serve; a GPU that does both counts once."""
        ranks = self.facts.trainer.layout.world_size
        engine = self.facts.engine
        serving = engine.started * engine.layout.tensor
        teaching = 0
        for teacher in self.facts.spec.roles.teachers:
            teaching += teacher.servers * teacher.server_devices
        if self.facts.schedule.is_colocated:
            return max(ranks, serving) + teaching
        return ranks + serving + teaching

    @property
    def fullest(self) -> RankBytes:
        """The trainer rank with the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def fullest_memory(self) -> MemoryUse:
        """The memory with the largest used share."""
        gpu = self.cluster.device.memory
        uses = [MemoryUse(f"GPUs of trainer stage {self.fullest.stage}", self.fullest.total, gpu)]
        for shared in self.shared:
            for moment, used in (
                ("while ranks train", shared.training),
                ("while servers generate", shared.generating),
                ("during a weight update", shared.updating),
            ):
                uses.append(MemoryUse(f"shared GPUs {moment}", used, gpu))
        for host in self.hosts:
            uses.append(MemoryUse("hosts", host.total, self.cluster.node_memory))
        return max(uses, key=lambda use: use.share)

    @property
    def memory_limit(self) -> str:
        """The memory with the largest used share, as a text of one line."""
        return f"memory of the {self.fullest_memory.name}, {self.fullest_memory.share:.0%} full"

    @property
    def time_limit(self) -> str:
        """The longest phase of a step, as a text of one line.

        If the phase is generation and a server cannot run all of its requests at once, the text has both numbers.
        """
        if self.seconds is None:
            return "time unknown"
        name, seconds = max(self.seconds.phases.items(), key=lambda phase: phase[1])
        text = f"{name}, {seconds / self.seconds.total:.0%} of a step"
        engine = self.engine
        if name == "generation" and engine is not None:
            requests = self.facts.rollout.responses // self.facts.engine.started
            if engine.sequences < requests:
                text += f"; {engine.sequences} of a server's {requests} sequences run at once (KV cache)"
        return text


def plan_run(facts: RunFacts, cluster: Cluster, storage: float = STORAGE) -> RunPlan:
    """Plan the run ``facts`` on ``cluster``; ``storage``: bytes/s of the shared file system."""
    nodes, misplaced = node_roles(facts.spec.roles, cluster)
    ranks = tuple(rank_bytes(facts, stage) for stage in range(facts.trainer.layout.pipeline))
    columns = column_bytes(facts.trainer.shape, facts.rollout)
    transfers = traffic(facts, cluster, storage)
    engine, too_large = _server_memory(
        facts.trainer.shape, facts.engine, facts.rollout, cluster, receives=facts.sends_in_group
    )
    teachers: dict[str, EngineBytes] = {}
    for teacher in facts.spec.teachers:
        memory_of_gpu, faults = _server_memory(
            teacher.model.shape, teacher.servers, facts.rollout, cluster, receives=False
        )
        too_large += [f"teacher {teacher.name}: {fault}" for fault in faults]
        if memory_of_gpu is not None:
            teachers[teacher.name] = memory_of_gpu
    is_colocated = facts.schedule.is_colocated
    shared_bytes: tuple[ColocatedBytes, ...] = ()
    if engine is not None and is_colocated:
        shared_bytes = shared_ranks(facts, cluster.device)
    parked_bytes = max((gpu.host for gpu in shared_bytes), default=0)
    hosts = [
        host_bytes(facts, columns, node, engine, parked_bytes, transfers.update) for node in nodes
    ]
    too_large += [*_rank_faults(ranks, cluster), *_host_faults(hosts, cluster)]
    if is_colocated:
        too_large += sharing_faults(shared_bytes, cluster.device)
    else:
        too_large += _base_gpu_faults(facts, ranks, engine, cluster)
    # If the servers can't hold the model, the time of generation is unknown.
    seconds = None
    if engine is not None or not facts.engine.started:
        seconds = step_seconds(facts, cluster, transfers)
    return RunPlan(
        facts=facts,
        cluster=cluster,
        nodes=nodes,
        ranks=ranks,
        engine=engine,
        teachers=teachers,
        shared=shared_bytes,
        hosts=tuple(hosts),
        columns=columns,
        traffic=transfers,
        seconds=seconds,
        misplaced=tuple(misplaced),
        too_large=tuple(too_large),
    )


def _server_memory(
    shape: ModelShape,
    engine: ServersSpec,
    rollout: RolloutFacts,
    cluster: Cluster,
    *,
    receives: bool,
) -> tuple[EngineBytes | None, list[str]]:
    """Return the memory of a server's GPU, and its faults. ``receives``: whether a group sends it weights.

    The memory is None if the run starts no server, or if the server's layout cannot hold the model.
    """
    if not engine.started:
        return None, []
    try:
        check_engine_layout(shape, engine.layout)
    except LayoutError as error:
        return None, [f"sglang: {error}"]
    memory_of_gpu = engine_bytes(shape, engine, rollout, cluster.device)
    fraction = memory_of_gpu.fraction
    sequence_tokens = rollout.longest
    faults = []
    replica_tokens = memory_of_gpu.kv_tokens // engine.layout.attention_replicas
    if replica_tokens < sequence_tokens:
        faults.append(
            f"engine GPU memory: {gib(memory_of_gpu.weights)} of weights leave a KV cache of {replica_tokens:,} tokens "
            f"in mem_fraction_static {fraction}, expected at least one sequence of {sequence_tokens:,}"
        )
    group_bytes = engine_communicator_bytes(engine.layout.tensor, receives=receives)
    least_reserved = group_bytes + LEAST_RESERVED
    if memory_of_gpu.reserved < least_reserved:
        faults.append(
            f"engine GPU memory: mem_fraction_static {fraction} leaves {gib(memory_of_gpu.reserved)} free, expected at "
            f"least {gib(least_reserved)}: {gib(group_bytes)} of communicators and "
            f"{gib(LEAST_RESERVED)} to work in"
        )
    return memory_of_gpu, faults


def _rank_faults(ranks: tuple[RankBytes, ...], cluster: Cluster) -> Iterator[str]:
    device = cluster.device
    for rank in ranks:
        if rank.total > device.memory:
            parts = ", ".join(f"{name} {gib(size)}" for name, size in rank.parts.items() if size)
            yield (
                f"trainer GPU memory: a rank of stage {rank.stage} needs {gib(rank.total)} ({parts}), "
                f"expected at most the {gib(device.memory)} of a {device.name}"
            )


def _base_gpu_faults(
    facts: RunFacts, ranks: tuple[RankBytes, ...], engine: EngineBytes | None, cluster: Cluster
) -> Iterator[str]:
    """Report a server that starts on a rank's GPU (``sglang.base_gpu_id``) if the GPU's memory cannot hold both."""
    first_device = facts.spec.roles.first_device
    # The ranks have the first devices, one device each.
    if engine is None or first_device is None or first_device >= facts.spec.roles.ranks:
        return
    rank = max(rank.total for rank in ranks)
    server = engine.weights + max(0, engine.kv_pool)
    if rank + server > cluster.device.memory:
        yield (
            f"GPU memory: sglang.base_gpu_id {first_device} puts a server on a rank's GPU, which then needs "
            f"{gib(rank + server)} ({gib(rank)} of the rank, {gib(server)} of the server), expected at "
            f"most the {gib(cluster.device.memory)} of a {cluster.device.name}"
        )


def _host_faults(hosts: Sequence[HostBytes], cluster: Cluster) -> Iterator[str]:
    for node, host in enumerate(hosts):
        if host.total > cluster.node_memory:
            yield (
                f"host memory: node {node} needs {gib(host.total)} (processes {gib(host.processes)}, "
                f"batch {gib(host.batch)}, checkpoint {gib(host.checkpoint)}, routing of the engines "
                f"{gib(host.capture)}, parked state {gib(host.parked)}, offloaded optimizer {gib(host.offloaded)}, "
                f"weight updates {gib(host.updates)}), "
                f"expected at most {gib(cluster.node_memory)}"
            )


def check_memory(config: TrainConfig, machine: Machine) -> StartCheck:
    """Check at the start that the run fits in the memory of ``machine``.

    With GPUs, the function checks every memory of the plan; it does not judge GPUs of an unknown kind. Without GPUs, it
    only compares the ranks' state and the servers' weights with the machine's memory.
    """
    gpu = machine.gpus > 0
    try:
        facts = facts_of(config, config.model.read_shape(), gpu=gpu)
    except (ConfigError, ModelError):
        # The checks of the configuration report files that cannot be read.
        return StartCheck(summary="memory: unknown")
    trainer = facts.trainer
    engine = facts.engine
    stages = range(trainer.layout.pipeline)
    rank_count = trainer.layout.world_size
    states = [state_bytes(trainer, stage) for stage in stages]
    try:
        # One tensor-parallel rank, all pipeline stages.
        bytes_per_rank = weight_bytes(trainer.shape, engine.layout, quantized=engine.is_quantized)
    except ModelError:
        # The engine rejects this layout, so that the servers' bytes are unknown. Another check reports the layout.
        bytes_per_rank = 0
    server_weights = engine.layout.tensor * bytes_per_rank if engine.started else 0
    activations = activation_bytes(trainer, 0).saved
    summary = (
        f"memory: {rank_count} ranks, each of weights {gib(states[0].weights)}, gradients {gib(states[0].gradients)}, "
        f"optimizer {gib(states[0].optimizer)}, activations up to {gib(activations)}; {engine.started} servers with "
        f"weights of {gib(server_weights)}"
    )
    if gpu:
        device = device_here()
        if device is None:
            unknown = "the GPUs are of a kind that the planner does not know"
            return StartCheck(summary=f"{summary}; whether that fits is not judged: {unknown}")
        cluster = Cluster(device, 1, machine.gpus, machine.memory_bytes)
        judged = f"judged as {device.name} of {gib(device.memory)}"
        return StartCheck(plan_run(facts, cluster).too_large, f"{summary}; {judged}")
    state_of_stages = sum(state.total + state.offloaded for state in states)
    total = state_of_stages * trainer.layout.stage_ranks + engine.started * server_weights
    for teacher in facts.spec.teachers:
        servers = teacher.servers
        rank_weights = weight_bytes(teacher.model.shape, servers.layout)
        total += servers.started * servers.layout.tensor * rank_weights
    if total <= machine.memory_bytes:
        return StartCheck(summary=summary)
    fault = (
        f"memory: weights, gradients and optimizer of {rank_count} ranks and the weights of {engine.started} servers "
        f"take {gib(total)}, this machine has {gib(machine.memory_bytes)}"
    )
    return StartCheck([fault], summary)


def device_here(folder: Path | None = None) -> Device | None:
    """Return the kind of this machine's first GPU, by the name that its driver reports; None for an unknown kind.

    ``folder`` replaces the driver's folder in /proc.
    """
    models = gpu_models(folder)
    return device_named(models[0]) if models else None
