"""A batch's way from the leaders that generate it to the ranks that train on it.

``share`` gives every rank the tokens, the scores and the columns that all ranks need. The others are
far larger (recorded routing alone takes 384 bytes a token for Qwen3-30B-A3B) and stay with the leader
that generated the trajectory. Once the plan of the step says which replica trains on what,
``ColumnExchange`` sends each column to that replica's leader, which shares it with its ranks. Every
receiver compares a hash with the owner's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch.distributed as dist

from megatron_dppo.data.columns import COLUMNS, Form, Reach
from megatron_dppo.data.trajectory import Trajectory, forms_of
from megatron_dppo.data.trajectory_codec import decode, encode
from megatron_dppo.loop.rollouts.column_bytes import ColumnBytes
from megatron_dppo.loop.rollouts.column_directory import ColumnDirectory, ExchangeError, Key
from megatron_dppo.loop.rollouts.sources import owner
from megatron_dppo.trainer.collectives import all_gather_json, any_rank, broadcast_bytes
from megatron_dppo.trainer.topology import Topology


def held_back() -> list[str]:
    """The columns that ``share`` leaves where they are."""
    return [name for name, c in COLUMNS.items() if c.reach is Reach.TRAINING_REPLICA]


def share(
    trajectories: Sequence[Trajectory],
    topology: Topology,
    group_size: int,
    positions: Sequence[int],
) -> list[Trajectory]:
    """All leaders' trajectories on every rank, groups in the order of ``positions``. Collective.

    ``positions``: of the groups in the batch as generated, which say who has them. Every rank
    decodes the same bytes, its own included, so that all see the same values. Columns for the
    training replica stay with their leader.
    """
    kept = held_back()
    blob = encode([t.without(*kept) for t in trajectories]) if topology.is_leader else b""
    shares = [decode(broadcast_bytes(blob, leader)) for leader in topology.leaders]
    if topology.is_leader:
        shares[topology.dp_rank] = [
            light.with_columns(**{n: own.columns[n] for n in kept if n in own.columns})
            for light, own in zip(shares[topology.dp_rank], trajectories, strict=True)
        ]
    groups = [
        iter([part[i : i + group_size] for i in range(0, len(part), group_size)]) for part in shares
    ]
    return [t for p in positions for t in next(groups[owner(p, topology)])]


@dataclass(frozen=True)
class Delivery:
    """A batch in which this rank has the columns it needs.

    ``forms``: of all columns of the batch, the same on every rank. ``held``: by column that was
    delivered, the positions of the trajectories that have it, wherever that is.
    """

    trajectories: list[Trajectory]
    forms: Mapping[str, Form]
    held: Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class ColumnExchange:
    """Moves columns between the replicas of ``topology``.

    ``sizes``: what trailing sizes of columns must be, by their declared names; others are free.
    """

    topology: Topology
    sizes: Mapping[str, int]

    def deliver(
        self,
        trajectories: Sequence[Trajectory],
        needed: Sequence[Collection[int]],
        *,
        gather: bool = False,
    ) -> Delivery:
        """The batch with the columns of the trajectories that this rank needs, and no others'.

        Collective; ``trajectories`` are the same on all ranks but for the columns that ``share``
        left with the leaders. ``needed``: positions by data-parallel rank. ``gather``: global rank
        0 gets all. Raises ExchangeError, on all ranks, naming the trajectory.
        """
        at, moved = self.topology, held_back()
        arrays = {
            (position, name): t.columns[name]
            for position, t in enumerate(trajectories)
            for name in moved
            if at.is_leader and name in t.columns
        }
        directory = ColumnDirectory.gather(trajectories, arrays, at, self.sizes)
        wanted = [sorted(k for k in directory.holders if k[0] in part) for part in needed]
        by_leader = list(wanted)
        if gather:  # rank 0 leads replica 0
            by_leader[0] = sorted(directory.holders)
        wire = ColumnBytes(trajectories, directory.forms)
        received = self._between_leaders(wire, directory, by_leader, arrays)
        arrays |= received
        received |= self._within_replica(wire, wanted[at.dp_rank], arrays)
        arrays |= received
        self._verify(directory, received, trajectories)
        columns: list[dict[str, np.ndarray]] = [{} for _ in trajectories]
        for position, name in by_leader[0] if at.rank == 0 else wanted[at.dp_rank]:
            columns[position][name] = arrays[position, name]
        light = [t.without(*moved) for t in trajectories]
        delivered = [t.with_columns(**c) for t, c in zip(light, columns, strict=True)]
        return Delivery(delivered, {**forms_of(light), **directory.forms}, directory.held)

    def _between_leaders(
        self,
        wire: ColumnBytes,
        directory: ColumnDirectory,
        wanted: Sequence[Sequence[Key]],
        local: Mapping[Key, np.ndarray],
    ) -> dict[Key, np.ndarray]:
        """In rounds: every leader sends to the one ``distance`` further on."""
        at, received = self.topology, dict[Key, np.ndarray]()
        if not at.is_leader:
            return received

        def sent(source: int, target: int) -> list[list[Key]]:
            return wire.pieces(
                key
                for key in wanted[target]
                if target not in directory.holders[key] and min(directory.holders[key]) == source
            )

        for distance in range(1, at.dp_size):
            to, origin = (at.dp_rank + distance) % at.dp_size, (at.dp_rank - distance) % at.dp_size
            outgoing, incoming = sent(at.dp_rank, to), sent(origin, at.dp_rank)
            for out, into in zip_longest(outgoing, incoming, fillvalue=()):
                operations, buffer = [], wire.empty(into)
                if out:
                    payload = wire.joined(out, local)
                    operations.append(dist.P2POp(dist.isend, payload, at.leaders[to]))
                if into:
                    operations.append(dist.P2POp(dist.irecv, buffer, at.leaders[origin]))
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                received |= wire.split(into, buffer)
        return received

    def _within_replica(
        self, wire: ColumnBytes, keys: Sequence[Key], arrays: Mapping[Key, np.ndarray]
    ) -> dict[Key, np.ndarray]:
        """From the leader to the other ranks that hold the replica's model."""
        at, received = self.topology, dict[Key, np.ndarray]()
        if at.tp_size * at.pp_size == 1:
            return received
        for piece in wire.pieces(keys):
            if at.is_leader:
                dist.broadcast(wire.joined(piece, arrays), at.rank, at.model_group)
            else:
                buffer = wire.empty(piece)
                dist.broadcast(buffer, at.leader, at.model_group)
                received |= wire.split(piece, buffer)
        return received

    def _verify(
        self,
        directory: ColumnDirectory,
        received: Mapping[Key, np.ndarray],
        trajectories: Sequence[Trajectory],
    ) -> None:
        changed = directory.changed(received, trajectories, self.topology)
        if any_rank(bool(changed)):
            told = [line for part in all_gather_json(changed) for line in part]
            raise ExchangeError("\n".join(told))
