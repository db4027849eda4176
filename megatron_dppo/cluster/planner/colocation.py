"""A GPU that a trainer rank and a server share in turns: what the rank must park in host memory, and its price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.cluster.planner import memory
from megatron_dppo.cluster.planner.devices import CONTEXT, GIB, Device, gib
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.model.shape import TrainerPart

HOST_LINK = 24 * GIB
"""Bytes/s between a GPU and pinned host memory in one direction: 24.4 GiB/s out and 23.5 back over PCIe 4 x16, measured
in torch_memory_saver#111. PCIe 5 doubles it."""
HAND_OVER = 3.0
"""Seconds of both switches of a step beside the bytes: barriers, the engine's requests to release and to resume, the
allocators' pages. Assumption."""
KEPT_BY_SERVER = 2 * GIB
"""Bytes that a server keeps after it released weights and KV cache: CUDA graphs and workspaces. Assumption."""


_WAYS: dict[TrainerPart, int] = {"gradients": 0, "reference": 1, "optimizer": 2, "weights": 2}
"""How often a parked part travels in a step, by ``trainer/parking.py``; the cheapest first."""


@dataclass(frozen=True)
class SharedBytes:
    """One GPU of a colocated run. ``parked``: the parts of a rank's state that leave it while the server generates;
    ``travels``: bytes that go out and that come back in a step; ``host``: that they keep pinned. ``training``,
    ``generating``: what is on the GPU in each turn; ``updating``: during a weight update between the two.
    """

    parked: tuple[TrainerPart, ...]
    travels: int
    host: int
    training: int
    generating: int
    updating: int


def shared_bytes(
    rank: memory.RankBytes, engine: memory.EngineBytes, communicators: int, room: int
) -> SharedBytes:
    """The least that a rank must park on a GPU of ``room`` bytes, beside a server whose own communicators take
    ``communicators``.

    While the server generates it holds its context, its weights, its KV cache, ``LEAST_RESERVED`` to work in and its
    communicators; the rank holds its context, its communicators and the state that isn't parked; activations are
    gone. Parked in the order of their price: gradients, which never travel; a reference policy's weights, which only
    come back; the optimizer's state; the weights. While the rank trains, the server keeps its context, communicators
    and ``KEPT_BY_SERVER``; in a weight update its weights, too, and the rank its own and
    ``update_buckets``.
    """
    fixed = CONTEXT + communicators
    server = fixed + engine.weights + max(0, engine.kv_pool) + memory.LEAST_RESERVED
    left = rank.context + rank.communicators
    generating = server + left + rank.state.total
    travels, parked = 0, []
    for part, ways in _WAYS.items():
        if generating <= room:
            break
        size = getattr(rank.state, part)
        generating -= size
        travels += ways * size
        parked.append(part)
    there = rank.state.total - sum(getattr(rank.state, p) for p in parked if p != "weights")
    return SharedBytes(
        parked=tuple(parked),
        travels=travels,
        host=memory.parked_bytes(rank.state, parked).host,
        training=rank.total + fixed + KEPT_BY_SERVER,
        generating=generating,
        updating=left + there + rank.update_buckets + fixed + engine.weights + KEPT_BY_SERVER,
    )


def shared_ranks(facts: RunFacts, device: Device) -> tuple[SharedBytes, ...]:
    """Of each pipeline stage; none where trainer and servers have GPUs of their own."""
    if not facts.schedule.is_colocated or not facts.engine.servers:
        return ()
    shape = facts.trainer.shape
    engine = memory.engine_bytes(shape, facts.engine, facts.rollout, device)
    groups = memory.engine_communicator_bytes(facts.engine.tensor, 0)
    stages = range(facts.trainer.layout.pipeline)
    return tuple(
        shared_bytes(memory.rank_bytes(facts, stage), engine, groups, device.memory)
        for stage in stages
    )


def switch_seconds(facts: RunFacts, device: Device) -> float:
    """Of a step: what is parked goes to the host and comes back, the stage with the most; and a fixed part. Weights of
    the server don't travel: they are dropped, and come with the update."""
    shared = shared_ranks(facts, device)
    if not shared:
        return 0.0
    return max(stage.travels for stage in shared) / HOST_LINK + HAND_OVER


def sharing_faults(shared: tuple[SharedBytes, ...], device: Device) -> Iterator[str]:
    """Why trainer and server don't fit on one GPU in turns, a line each."""
    room = f"expected at most the {gib(device.memory)} of a {device.name}"
    for stage, sizes in enumerate(shared):
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
