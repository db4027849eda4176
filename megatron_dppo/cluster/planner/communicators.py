"""GPU memory of NCCL's communicators, of a trainer rank and of an engine rank."""

from __future__ import annotations

from megatron_dppo.cluster.planner import devices
from megatron_dppo.model.layout import Layout

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
