"""Parts from the leaders that hold them to the heads of the sites that need them, in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.loop.rollouts.part_directory import PartDirectory
from megatron_dppo.loop.rollouts.parts import Part, Piece, Room
from megatron_dppo.trainer import platform

PIECE_BYTES = 64 * 2**20
"""Arrays travel in pieces of at most this size, or of one: no device has room for a step's."""


def transfer(
    directory: PartDirectory,
    rooms: Mapping[int, Room],
    local: Mapping[Part, np.ndarray],
    buffer: np.ndarray,
    rank: int,
) -> None:
    """Fill ``buffer``, of this rank's room if it heads a site. Collective.

    ``rooms``: by the rank of each site's head, its parts in the order of whom they come from. In rounds:
    everybody sends to the one ``distance`` further on, among those that send or receive.
    """
    if rank in rooms:
        for part, (begin, end) in rooms[rank].places.items():
            if part in local:
                buffer[begin:end] = _bytes(local[part])
    sources = {min(holders) for holders in directory.holders.values()}
    members = sorted({*sources, *rooms})
    if rank not in members:
        return
    place = members.index(rank)
    outbox = _Outbox(local)

    def sent(source: int, target: int) -> list[Piece]:
        if target not in rooms:
            return []
        room = rooms[target]
        parts = [part for part in room.parts if directory.source(part, target) == source]
        return list(room.pieces(parts, PIECE_BYTES))

    for distance in range(1, len(members)):
        to = members[(place + distance) % len(members)]
        origin = members[(place - distance) % len(members)]
        for out, incoming in zip_longest(sent(rank, to), sent(origin, rank)):
            payload = None if out is None else outbox.pack(out, rooms[to])
            target = None if incoming is None else buffer[incoming.begin : incoming.end]
            _exchange(payload, to, target, origin)


class _Outbox:
    """One buffer for all pieces that are sent: memory that is new each time costs more than the copy."""

    def __init__(self, local: Mapping[Part, np.ndarray]) -> None:
        self._local = local
        self._buffer = np.empty(0, np.uint8)

    def pack(self, piece: Piece, room: Room) -> np.ndarray:
        """The bytes of ``piece`` as they lie in ``room``; valid until the next call."""
        size = piece.end - piece.begin
        if len(self._buffer) < size:
            self._buffer = np.zeros(size, np.uint8)
        for part in piece.parts:
            begin, end = room.places[part]
            self._buffer[begin - piece.begin : end - piece.begin] = _bytes(self._local[part])
        return self._buffer[:size]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _exchange(payload: np.ndarray | None, to: int, target: np.ndarray | None, origin: int) -> None:
    """Send ``payload`` and receive ``target`` at the same time."""
    device = platform.current().device
    operations = []
    if payload is not None:
        operations.append(dist.P2POp(dist.isend, torch.from_numpy(payload).to(device), to))
    if target is not None:
        here = torch.from_numpy(target)
        received = here if here.device == device else torch.empty_like(here, device=device)
        operations.append(dist.P2POp(dist.irecv, received, origin))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    if target is not None and received is not here:
        here.copy_(received)
