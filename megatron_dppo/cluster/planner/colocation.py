"""Plan a GPU on which a trainer rank and a server take turns: the state that the rank parks, its bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.cluster.planner import communicators, memory, server_memory, trainer_state
from megatron_dppo.cluster.planner.devices import CONTEXT, GIB, Device, gib
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.model.shape import TrainerPart

HOST_LINK = 24 * GIB
"""Bytes/s between a GPU and pinned host memory in one direction. torch_memory_saver#111 measured 24.4 GiB/s to the host
and 23.5 back over PCIe 4 x16; PCIe 5 doubles the rate."""
HAND_OVER = 3.0
"""Seconds that both switches of a step add to the transfer of bytes: barriers, the requests that make the engine
release and resume its memory, the allocators' pages. Assumption."""
KEPT_BY_SERVER = 2 * GIB
"""Bytes that a server keeps after it has released weights and KV cache: CUDA graphs and workspaces. Assumption."""


_WAYS: dict[TrainerPart, int] = {"gradients": 0, "reference": 1, "optimizer": 2, "weights": 2}
"""The number of times that ``trainer/parking.py`` copies a parked part in a step; the cheapest part first."""


@dataclass(frozen=True)
class SharedBytes:
    """Bytes of one GPU of a colocated run.

    ``parked``: the parts of a rank's state that leave the GPU while the server generates. ``travels``: bytes that a
    step copies to the host and back. ``host``: bytes of pinned host memory for the parked parts. ``training``,
    ``generating``: bytes on the GPU in each turn; ``updating``: bytes during the weight update between the turns.
    """

    parked: tuple[TrainerPart, ...]
    travels: int
    host: int
    training: int
    generating: int
    updating: int


def shared_bytes(
    rank: memory.RankBytes,
    engine: server_memory.EngineBytes,
    communicators: int,
    room: int,
) -> SharedBytes:
    """Return the smallest set of parts that a rank must park so that it shares a GPU with a server.

    While the server generates, it holds its context, weights, KV cache, communicators and ``LEAST_RESERVED`` of working
    memory. The rank then holds its context, its communicators and the state that is not parked, but no activations.

    The parts are parked in the order of their cost: gradients, which are never copied; a reference policy's weights,
    which are only copied back; the optimizer's state; the weights.

    While the rank trains, the server keeps its context, communicators and ``KEPT_BY_SERVER``. During a weight update,
    the server also holds its weights, and the rank its own weights and ``update_buckets``.

    Args:
        rank: Memory of the rank.
        engine: Memory of the server's GPU.
        communicators: Bytes of the server's own communicators.
        room: Bytes of the GPU's memory.
    """
    fixed = CONTEXT + communicators
    server = fixed + engine.weights + max(0, engine.kv_pool) + server_memory.LEAST_RESERVED
    rank_fixed = rank.context + rank.communicators
    generating = server + rank_fixed + rank.state.total
    travels, parked_parts = 0, []
    for part, copies in _WAYS.items():
        if generating <= room:
            break
        size = getattr(rank.state, part)
        generating -= size
        travels += copies * size
        parked_parts.append(part)
    # The weights of the rank are back on the GPU during a weight update.
    update_state = rank.state.total - sum(
        getattr(rank.state, p) for p in parked_parts if p != "weights"
    )
    return SharedBytes(
        parked=tuple(parked_parts),
        travels=travels,
        host=trainer_state.parked_bytes(rank.state, parked_parts).host,
        training=rank.total + fixed + KEPT_BY_SERVER,
        generating=generating,
        updating=rank_fixed
        + update_state
        + rank.update_buckets
        + fixed
        + engine.weights
        + KEPT_BY_SERVER,
    )


def shared_ranks(facts: RunFacts, device: Device) -> tuple[SharedBytes, ...]:
    """Return the shared GPU of each pipeline stage; empty where trainer and servers have GPUs of their own."""
    if not facts.schedule.is_colocated or not facts.engine.servers:
        return ()
    shape = facts.trainer.shape
    engine = server_memory.engine_bytes(shape, facts.engine, facts.rollout, device)
    groups = communicators.engine_communicator_bytes(facts.engine.layout.tensor, 0)
    stages = range(facts.trainer.layout.pipeline)
    return tuple(
        shared_bytes(memory.rank_bytes(facts, stage), engine, groups, device.memory)
        for stage in stages
    )


def switch_seconds(facts: RunFacts, device: Device) -> float:
    """Return the seconds in which a step parks state in host memory and copies it back, plus a fixed part.

    The stage with the most bytes counts. The server's weights are not copied: the server drops them and receives them
    again in the weight update.
    """
    stages = shared_ranks(facts, device)
    if not stages:
        return 0.0
    return max(stage.travels for stage in stages) / HOST_LINK + HAND_OVER


def sharing_faults(shared_gpus: tuple[SharedBytes, ...], device: Device) -> Iterator[str]:
    """List the reasons why trainer and server cannot take turns on one GPU, one line for each."""
    room = f"expected at most the {gib(device.memory)} of a {device.name}"
    for stage, sizes in enumerate(shared_gpus):
        if sizes.generating > device.memory:
            yield (
                f"GPU memory: a server takes {gib(sizes.generating)} beside a parked rank of stage {stage}, "
                f"{room}; lower sglang.mem_fraction_static"
            )
        if sizes.updating > device.memory:
            yield (
                f"GPU memory: the weights of a rank of stage {stage} beside those of a server take "
                f"{gib(sizes.updating)} in a weight update, {room}"
            )
        if sizes.training > device.memory:
            yield (
                f"GPU memory: a rank of stage {stage} takes {gib(sizes.training)} beside a server that released its "
                f"memory, {room}"
            )
