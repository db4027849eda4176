"""GPU memory of NCCL's communicators, of a trainer rank and of an engine rank."""

from __future__ import annotations

from megatron_dppo.model.layout import Layout
from megatron_dppo.planner.units import MIB

CHANNELS = 16
"""Channels of a communicator over NVLink and InfiniBand. Assumption: NCCL chooses between 8 and 32."""
CONNECTIONS = 2
"""Receiving connections of a rank in each channel: of the ring and of the tree. Assumption."""
_LL = 8 * 512 * 8 * 16
_LL128 = 120 * 640 * 8 * 8
_SIMPLE = 4 * MIB
PER_COMMUNICATOR = CHANNELS * CONNECTIONS * (_LL + _LL128 + _SIMPLE)
"""Bytes: channels x connections x the buffers of NCCL's three protocols (src/include/device.h and src/init.cc of NCCL
2.29: LL 8 lines x 512 threads x 8 steps x 16 bytes, LL128 120 x 640 x 8 x 8, Simple NCCL_BUFFSIZE = 4 MiB)."""


def trainer_communicators(layout: Layout, *, sends: bool) -> int:
    """Communicators that a trainer rank uses: the world's, one for each parallel dimension of more than one rank, and
    (``sends``) its own with all engine ranks. Megatron-Core makes more groups; NCCL allocates for those that are used.
    """
    sizes = (layout.tensor, layout.pipeline, layout.data, layout.expert, layout.expert_data)
    used = sum(size > 1 for size in sizes) + (layout.expert_tensor > 1 and layout.expert > 1)
    return int(layout.world_size > 1) + used + int(sends)


def trainer_bytes(layout: Layout, *, sends: bool) -> int:
    """Bytes on a trainer rank."""
    return trainer_communicators(layout, sends=sends) * PER_COMMUNICATOR


def senders(layout: Layout, ranks_per_sender: int = 1) -> int:
    """Trainer ranks that send weights: the first holder of each shard of the experts, or of each stage where they are
    not spread; of those, one in each run of ``ranks_per_sender`` ranks (``weight_sync/strategies/distributed.py``,
    ``model.gather_plan.node_receivers``)."""
    holders = (
        stage * layout.stage_ranks + expert * layout.expert_tensor
        for stage in range(layout.pipeline)
        for expert in range(layout.expert)
    )
    return len({rank // ranks_per_sender for rank in holders})


def engine_bytes(tensor: int, senders: int) -> int:
    """Bytes on an engine rank: its server's own group, and one with every sender of weights."""
    return (int(tensor > 1) + senders) * PER_COMMUNICATOR
