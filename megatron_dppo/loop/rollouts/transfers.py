"""Parts from the leaders that hold them to the heads of the sites that need them, in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.loop.rollouts.part_directory import PartDirectory
from megatron_dppo.loop.rollouts.parts import Part, Room
from megatron_dppo.trainer import platform

PIECE_BYTES = 64 * 2**20
"""Arrays travel in pieces of at most this size, or of one: no device has room for a step's."""


def transfer(
    directory: PartDirectory,
    rooms: Mapping[int, Room],
    local: Mapping[Part, np.ndarray],
    into: Mapping[Part, np.ndarray],
    rank: int,
) -> None:
    """Fill ``into``, this rank's views of its room if it heads a site. Collective.

    ``rooms``: by the rank of each site's head. In rounds: everybody sends to the one ``distance``
    further on, among those that send or receive.
    """
    for part in into:
        if part in local:
            np.copyto(into[part], local[part])
    sources = {min(holders) for holders in directory.holders.values()}
    members = sorted({*sources, *rooms})
    if rank not in members:
        return
    place = members.index(rank)

    def sent(source: int, target: int) -> list[list[Part]]:
        if target not in rooms:
            return []
        parts = [
            part
            for part in rooms[target].parts
            if target not in directory.holders[part] and min(directory.holders[part]) == source
        ]
        return list(Room(rooms[target].shapes, parts).pieces(PIECE_BYTES))

    for distance in range(1, len(members)):
        to = members[(place + distance) % len(members)]
        origin = members[(place - distance) % len(members)]
        for out, incoming in zip_longest(sent(rank, to), sent(origin, rank), fillvalue=()):
            _exchange(out, to, local, incoming, origin, into)


def _exchange(
    out: Sequence[Part],
    to: int,
    local: Mapping[Part, np.ndarray],
    incoming: Sequence[Part],
    origin: int,
    into: Mapping[Part, np.ndarray],
) -> None:
    """Send one piece and receive another at the same time."""
    device = platform.current().device
    operations, received = [], torch.empty(0, dtype=torch.uint8, device=device)
    if out:
        flat = [local[part].reshape(-1).view(np.uint8) for part in out]
        payload = torch.from_numpy(np.concatenate(flat)).to(device)
        operations.append(dist.P2POp(dist.isend, payload, to))
    if incoming:
        size = sum(into[part].nbytes for part in incoming)
        received = torch.empty(size, dtype=torch.uint8, device=device)
        operations.append(dist.P2POp(dist.irecv, received, origin))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    brought, start = received.cpu().numpy(), 0
    for part in incoming:
        target = into[part].reshape(-1).view(np.uint8)
        target[:] = brought[start : start + len(target)]
        start += len(target)
