"""Plan a GPU on which a trainer rank and a server take turns: the state that the rank parks, in bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.cluster.planner.communicators import engine_communicator_bytes
from megatron_dppo.cluster.planner.devices import CONTEXT, GIB, Device, gib
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.cluster.planner.memory import RankBytes, rank_bytes
from megatron_dppo.cluster.planner.server_memory import LEAST_RESERVED, EngineBytes, engine_bytes
from megatron_dppo.cluster.planner.trainer_state import parked_bytes
from megatron_dppo.model.shape import TrainerPart

HOST_LINK = 24 * GIB
"""Bytes/s between a GPU and pinned host memory in one direction. torch_memory_saver#111 measured 24.4 GiB/s to the host
and 23.5 GiB/s back over PCIe 4 x16; PCIe 5 doubles the rate."""
SWITCH_OVERHEAD = 3.0
"""Seconds that both switches of a step add to the transfer of bytes: barriers, the requests that make the engine
release and resume its memory, the allocators' pages. Assumption."""
KEPT_BY_SERVER = 2 * GIB
"""Bytes that a server keeps after it has released weights and KV cache: CUDA graphs and workspaces. Assumption."""


_COPIES: dict[TrainerPart, int] = {"gradients": 0, "reference": 1, "optimizer": 2, "weights": 2}
"""How often ``trainer/parking.py`` copies a parked part in a step, with the cheapest part first. Gradients are freed. A
reference policy's weights are only copied back. Other state is copied to the host and back."""


@dataclass(frozen=True)
class ColocatedBytes:
    """Bytes of one GPU of a colocated run.

    Attributes:
        parked: the parts of a rank's state that leave the GPU while the server generates.
        travels: bytes that a step copies to the host and back.
        host: bytes of pinned host memory for the parked parts.
        training: bytes on the GPU while the rank trains.
        generating: bytes on the GPU while the server generates.
        updating: bytes on the GPU during a weight update.
    """

    parked: tuple[TrainerPart, ...]
    travels: int
    host: int
    training: int
    generating: int
    updating: int


def shared_bytes(
    rank: RankBytes, engine: EngineBytes, server_communicators: int, gpu_memory: int
) -> ColocatedBytes:
    """Return the bytes of a GPU that a rank and a server share. The rank parks only the parts that it must park.

    While the server generates, it holds its context, weights, KV cache, communicators and ``LEAST_RESERVED`` of working
    memory. The rank then holds its context, its communicators and the state that is not parked, but no activations. The
    parts are parked in the order of ``_COPIES``, until the GPU has room for rank and server.

    While the rank trains, the server keeps its context, communicators and ``KEPT_BY_SERVER``. During a weight update,
    the server also holds its weights. The rank then holds its own weights, its other state that is not parked, and
    ``update_buckets``.

    Args:
        rank: Memory of the rank.
        engine: Memory of the server's GPU.
        server_communicators: Bytes of the server's own communicators.
        gpu_memory: Bytes of the GPU's memory.
    """
    server_constant = CONTEXT + server_communicators
    rank_constant = rank.context + rank.communicators
    constant = server_constant + rank_constant
    generating = constant + engine.weights + max(0, engine.kv_pool) + LEAST_RESERVED
    generating += rank.state.total
    updating = constant + engine.weights + KEPT_BY_SERVER + rank.state.total + rank.update_buckets
    travels = 0
    parked_parts = []
    for part, copies in _COPIES.items():
        if generating <= gpu_memory:
            break
        size = getattr(rank.state, part)
        parked_parts.append(part)
        travels += copies * size
        generating -= size
        # During a weight update, the rank's weights are back on the GPU. The other parked parts are not.
        if part != "weights":
            updating -= size
    return ColocatedBytes(
        parked=tuple(parked_parts),
        travels=travels,
        host=parked_bytes(rank.state, parked_parts).host,
        training=rank.total + server_constant + KEPT_BY_SERVER,
        generating=generating,
        updating=updating,
    )


def shared_ranks(facts: RunFacts, device: Device) -> tuple[ColocatedBytes, ...]:
    """Return the bytes of a shared GPU for each pipeline stage; empty unless trainer and servers share GPUs."""
    if not facts.schedule.is_colocated or not facts.engine.started:
        return ()
    shape = facts.trainer.shape
    engine = engine_bytes(shape, facts.engine, facts.rollout, device)
    server_communicators = engine_communicator_bytes(facts.engine.layout.tensor, receives=False)
    shared_gpus = []
    for stage in range(facts.trainer.layout.pipeline):
        rank = rank_bytes(facts, stage)
        shared_gpus.append(shared_bytes(rank, engine, server_communicators, device.memory))
    return tuple(shared_gpus)


def switch_seconds(facts: RunFacts, device: Device) -> float:
    """Return the seconds in which a step parks state in host memory and copies it back, plus a fixed part.

    The stage that copies the most bytes counts. The server's weights are not copied: the server drops them and receives
    them again in the weight update.
    """
    shared_gpus = shared_ranks(facts, device)
    if not shared_gpus:
        return 0.0
    return max(gpu.travels for gpu in shared_gpus) / HOST_LINK + SWITCH_OVERHEAD


def sharing_faults(shared_gpus: tuple[ColocatedBytes, ...], device: Device) -> Iterator[str]:
    """Yield a line for each reason why trainer and server cannot take turns on one GPU."""
    limit = f"expected at most the {gib(device.memory)} of a {device.name}"
    for stage, sizes in enumerate(shared_gpus):
        if sizes.generating > device.memory:
            yield (
                f"GPU memory: a server takes {gib(sizes.generating)} beside a parked rank of stage {stage}, "
                f"{limit}; lower sglang.mem_fraction_static"
            )
        if sizes.updating > device.memory:
            yield (
                f"GPU memory: the weights of a rank of stage {stage} beside those of a server take "
                f"{gib(sizes.updating)} in a weight update, {limit}"
            )
        if sizes.training > device.memory:
            yield (
                f"GPU memory: a rank of stage {stage} takes {gib(sizes.training)} beside a server that released its "
                f"memory, {limit}"
            )
