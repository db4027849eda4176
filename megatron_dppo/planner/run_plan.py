"""Whether a run fits its machines: every part of the plan in one record, and what is wrong, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.errors import LayoutError, ModelError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import EngineLayout, check_engine_layout
from megatron_dppo.planner.activations import activation_bytes
from megatron_dppo.planner.devices import Cluster, Device, device_named, gib
from megatron_dppo.planner.facts import Batches, Job, batches, job_of
from megatron_dppo.planner.memory import (
    LEAST_RESERVED,
    ColumnBytes,
    EngineBytes,
    HostBytes,
    NodeRoles,
    RankBytes,
    capture_host_bytes,
    column_bytes,
    engine_bytes,
    engine_communicator_bytes,
    host_bytes,
    node_roles,
    rank_bytes,
    state_bytes,
    weight_bytes,
)
from megatron_dppo.planner.step_time import StepSeconds, step_seconds
from megatron_dppo.planner.traffic import STORAGE, Transfer, transfer


@dataclass(frozen=True)
class Verdict:
    """A plan. ``engine`` None: the run starts no servers, or they can't hold the model. ``hosts``: of the nodes, in
    order. ``misplaced``: why the roles don't fit the nodes; ``too_large``: what exceeds a memory; a line each."""

    job: Job
    cluster: Cluster
    nodes: tuple[NodeRoles, ...]
    batches: Batches
    ranks: tuple[RankBytes, ...]
    engine: EngineBytes | None
    hosts: tuple[HostBytes, ...]
    columns: ColumnBytes
    transfer: Transfer
    seconds: StepSeconds | None
    misplaced: tuple[str, ...]
    too_large: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that stands against it."""
        return self.misplaced + self.too_large

    @property
    def fits(self) -> bool:
        """Whether nothing stands against it."""
        return not self.problems

    @property
    def gpu_hours(self) -> float:
        """Of a step, on all GPUs of the cluster; 0 where the time is unknown."""
        return 0.0 if self.seconds is None else self.seconds.total * self.cluster.gpus / 3600

    @property
    def fullest(self) -> RankBytes:
        """The trainer rank with the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def memory_limit(self) -> str:
        """The memory that is nearest to its bound, in a line."""
        device = self.cluster.device
        shares = {f"GPUs of trainer stage {self.fullest.stage}": self.fullest.total / device.memory}
        if self.hosts:
            shares["hosts"] = max(host.total for host in self.hosts) / self.cluster.node_memory
        name = max(shares, key=lambda key: shares[key])
        return f"memory of the {name}, {shares[name]:.0%} full"

    @property
    def time_limit(self) -> str:
        """The longest phase of a step, and what makes a server's sequences wait."""
        if self.seconds is None:
            return "time unknown"
        name, longest = max(self.seconds.phases.items(), key=lambda phase: phase[1])
        text = f"{name}, {longest / self.seconds.total:.0%} of a step"
        engine = self.engine
        if name == "generation" and engine is not None:
            asked = self.batches.responses // self.job.engine.servers
            if engine.sequences < asked:
                text += (
                    f"; {engine.sequences} of a server's {asked} sequences run at once (KV cache)"
                )
        return text


def verdict(job: Job, cluster: Cluster, storage: float = STORAGE) -> Verdict:
    """The plan of ``job`` on ``cluster``; ``storage``: bytes/s of the shared file system."""
    nodes, misplaced = node_roles(job.roles, cluster)
    ranks = tuple(rank_bytes(job, stage) for stage in range(job.trainer.layout.pipeline))
    columns, moved = (
        column_bytes(job.trainer.shape, job.rollout),
        transfer(job, cluster.device, storage),
    )
    engine, problems = _engine(job, cluster)
    hosts = _hosts(job, nodes, columns, engine)
    problems += [*_gpu_problems(ranks, cluster), *_host_problems(hosts, cluster)]
    problems += _sharing_problems(job, ranks, engine, cluster)
    seconds = None if job.engine.servers and engine is None else step_seconds(job, cluster, moved)
    return Verdict(
        job=job,
        cluster=cluster,
        nodes=nodes,
        batches=batches(job),
        ranks=ranks,
        engine=engine,
        hosts=hosts,
        columns=columns,
        transfer=moved,
        seconds=seconds,
        misplaced=tuple(misplaced),
        too_large=tuple(problems),
    )


def _engine(job: Job, cluster: Cluster) -> tuple[EngineBytes | None, list[str]]:
    engine, shape = job.engine, job.trainer.shape
    if not engine.servers:
        return None, []
    try:
        check_engine_layout(shape, EngineLayout(engine.tensor, engine.expert))
    except LayoutError as error:
        return None, [f"sglang: {error}"]
    found = engine_bytes(shape, engine, job.rollout, cluster.device)
    return found, list(_engine_problems(found, job))


def _engine_problems(found: EngineBytes, job: Job) -> Iterator[str]:
    longest = job.rollout.longest_prompt + job.rollout.longest_response
    if found.kv_tokens < longest:
        yield (
            f"engine GPU memory: {gib(found.weights)} of weights leave a KV cache of "
            f"{found.kv_tokens:,} tokens in mem_fraction_static {found.fraction}, expected at least "
            f"one sequence of {longest:,}"
        )
    groups = engine_communicator_bytes(job.engine.tensor, job.senders)
    if found.reserved < groups + LEAST_RESERVED:
        yield (
            f"engine GPU memory: mem_fraction_static {found.fraction} leaves {gib(found.reserved)} "
            f"free, expected at least {gib(groups + LEAST_RESERVED)}: {gib(groups)} of communicators "
            f"and {gib(LEAST_RESERVED)} to work in"
        )


def _gpu_problems(ranks: tuple[RankBytes, ...], cluster: Cluster) -> Iterator[str]:
    device = cluster.device
    for rank in ranks:
        if rank.total > device.memory:
            parts = ", ".join(f"{name} {gib(size)}" for name, size in rank.parts.items() if size)
            yield (
                f"trainer GPU memory: a rank of stage {rank.stage} needs {gib(rank.total)} ({parts}), "
                f"expected at most the {gib(device.memory)} of a {device.name}"
            )


def _sharing_problems(
    job: Job, ranks: tuple[RankBytes, ...], engine: EngineBytes | None, cluster: Cluster
) -> Iterator[str]:
    """Servers that begin at a rank's GPU (``sglang.base_gpu_id``) share its memory."""
    first = job.roles.first_device
    if engine is None or first is None or first >= job.roles.ranks:
        return
    rank, server = max(rank.total for rank in ranks), engine.weights + max(0, engine.kv_pool)
    if rank + server > cluster.device.memory:
        yield (
            f"GPU memory: sglang.base_gpu_id {first} puts a server on a rank's GPU, which then needs "
            f"{gib(rank + server)} ({gib(rank)} of the rank, {gib(server)} of the server), expected at "
            f"most the {gib(cluster.device.memory)} of a {cluster.device.name}"
        )


def _hosts(
    job: Job, nodes: tuple[NodeRoles, ...], columns: ColumnBytes, engine: EngineBytes | None
) -> tuple[HostBytes, ...]:
    capture = 0
    if engine is not None and job.rollout.routing:
        capture = capture_host_bytes(job.trainer.shape, engine.kv_tokens)
    return tuple(host_bytes(job, columns, node, capture) for node in nodes)


def _host_problems(hosts: tuple[HostBytes, ...], cluster: Cluster) -> Iterator[str]:
    for node, host in enumerate(hosts):
        if host.total > cluster.node_memory:
            yield (
                f"host memory: node {node} needs {gib(host.total)} (processes {gib(host.processes)}, "
                f"batch {gib(host.batch)}, checkpoint {gib(host.checkpoint)}, routing of the engines "
                f"{gib(host.capture)}), expected at most {gib(cluster.node_memory)}"
            )


# The planner's verdict on the machine that a run would be started on.

NVIDIA = Path("/proc/driver/nvidia/gpus")


def memory_problems(config: TrainConfig, machine: Machine) -> Iterator[str]:
    """What does not fit the memory of ``machine``, a line each; nothing where its GPUs are of an unknown kind, and
    where the checkpoint's config.json can't be read, which other checks tell."""
    if machine.gpus:
        device = device_here()
        if device is not None and (job := _job(config, gpu=True)) is not None:
            cluster = Cluster(device, 1, machine.gpus, machine.memory_bytes)
            yield from verdict(job, cluster).too_large
        return
    job = _job(config, gpu=False)
    if job is None:
        return
    needed = _state(job) + _engines(job)
    if needed > machine.memory_bytes:
        yield (
            f"memory: weights, gradients and optimizer of {job.trainer.layout.world_size} ranks and the weights of "
            f"{job.engine.servers} servers take {gib(needed)}, this machine has {gib(machine.memory_bytes)}"
        )


def memory_here(config: TrainConfig, machine: Machine) -> str:
    """What the run takes of this machine's memory, in a line."""
    gpu = machine.gpus > 0
    job = _job(config, gpu=gpu)
    if job is None:
        return "memory: unknown"
    layout = job.trainer.layout
    first, live = state_bytes(job.trainer, 0), activation_bytes(job.trainer, 0)
    return (
        f"memory: {layout.world_size} ranks, each of weights {gib(first.weights)}, gradients {gib(first.gradients)}, "
        f"optimizer {gib(first.optimizer)}, activations up to {gib(live.saved)}; {job.engine.servers} servers with "
        f"weights of {gib(_engines(job) / max(1, job.engine.servers))}{_judged() if gpu else ''}"
    )


def _judged() -> str:
    device = device_here()
    if device is None:
        return "; whether that fits is not judged: the GPUs are of a kind that the planner does not know"
    return f"; judged as {device.name} of {gib(device.memory)}"


def device_here(folder: Path = NVIDIA) -> Device | None:
    """The kind of this machine's first GPU, by the name that its driver gives it; None for an unknown one."""
    for entry in sorted(folder.glob("*/information")):
        return device_named(entry.read_text(encoding="utf-8"))
    return None


def _job(config: TrainConfig, *, gpu: bool) -> Job | None:
    try:
        return job_of(config, load_model_shape(config.model.hf_checkpoint), gpu=gpu)
    except ModelError:
        return None


def _state(job: Job) -> int:
    """Weights, gradients and optimizer of all ranks."""
    layout = job.trainer.layout
    return sum(
        state_bytes(job.trainer, s).total * layout.stage_ranks for s in range(layout.pipeline)
    )


def _engines(job: Job) -> int:
    engine = job.engine
    try:
        layout = EngineLayout(engine.tensor, engine.expert)
        return engine.servers * engine.tensor * weight_bytes(job.trainer.shape, layout)
    except ModelError:
        return 0
