"""GPU memory of the NCCL communicators of a trainer rank and of an engine rank."""

from __future__ import annotations

from megatron_dppo.cluster.planner.devices import MIB
from megatron_dppo.model.layout import Layout

CHANNELS = 16
"""Channels of a communicator over NVLink and InfiniBand. Assumption: NCCL chooses between 8 and 32."""


CONNECTIONS = 2
"""Receiving connections of a rank in each channel: one for the ring and one for the tree. Assumption."""


# Buffers of NCCL's three protocols (src/include/device.h and src/init.cc of NCCL 2.29).
_LL = 8 * 512 * 8 * 16
"""Bytes: 8 lines x 512 threads x 8 steps x 16 bytes of a line."""
_LL128 = 120 * 640 * 8 * 8
"""Bytes: 120 elements x 640 threads x 8 steps x 8 bytes of an element."""
_SIMPLE = 4 * MIB
"""NCCL_BUFFSIZE."""

PER_COMMUNICATOR = CHANNELS * CONNECTIONS * (_LL + _LL128 + _SIMPLE)
"""Bytes of one communicator on a rank: channels x connections x the buffers of the three protocols."""


def trainer_communicator_bytes(layout: Layout, *, sends: bool) -> int:
    """Return the bytes of the communicators that a trainer rank uses.

    A rank uses these communicators:

    - one of all trainer ranks;
    - one for each of the dimensions tensor, context, pipeline, data, expert and expert data with more than one rank;
    - one for data and context together, if both have more than one rank: gradients are reduced over it;
    - one for expert and expert tensor together, if both have more than one rank;
    - with ``sends``, one with all engine ranks, for weight updates; with ``weight_sync.strategy: tensor`` one of all
      trainer ranks, which is used if engines are on several hosts, and always counted.

    Megatron-Core makes more groups, but NCCL allocates memory only for groups that are used.
    """
    if layout.world_size == 1:
        return int(sends) * PER_COMMUNICATOR
    sizes = (
        layout.tensor,
        layout.context,
        layout.pipeline,
        layout.data,
        layout.expert,
        layout.expert_data,
    )
    count = 1 + sum(size > 1 for size in sizes)
    if layout.expert_tensor > 1 and layout.expert > 1:
        count += 1
    if layout.context > 1 and layout.data > 1:
        count += 1
    if sends:
        count += 1
    return count * PER_COMMUNICATOR


def engine_communicator_bytes(tensor: int, *, receives: bool) -> int:
    """Return the bytes of an engine rank's communicators.

    They are its server's own, and with ``receives`` one with the trainer ranks that send, for weight updates.
    """
    return (int(tensor > 1) + int(receives)) * PER_COMMUNICATOR
