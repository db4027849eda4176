"""A batch's way from the leaders that generate it to the ranks that train on it.

``announce`` tells every rank the outlines of all trajectories: lengths, scores, weight versions. Tokens
and columns stay with the leader that generated them (recorded routing alone takes 384 bytes a token for
Qwen3-30B-A3B). Once the plan of the step says which replica trains on what, ``ColumnExchange`` sends
each array once to every host of that replica, into memory that the replica's ranks there share, and
every receiver compares a hash with the owner's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from megatron_dppo.data.columns import Form
from megatron_dppo.data.outline import Outline
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.rollouts.hosts import Site, Sites
from megatron_dppo.loop.rollouts.part_directory import ExchangeError, PartDirectory
from megatron_dppo.loop.rollouts.parts import Part, PartShapes, Room, Stages
from megatron_dppo.loop.rollouts.sources import owner
from megatron_dppo.loop.rollouts.transfers import transfer
from megatron_dppo.system.shared_buffer import SharedBuffer, mapped
from megatron_dppo.trainer.collectives import all_gather_json, any_rank, barrier, first_failure
from megatron_dppo.trainer.topology import Topology


def announce(
    own: Sequence[Trajectory], topology: Topology, group_size: int, positions: Sequence[int]
) -> tuple[list[Outline], dict[int, Trajectory]]:
    """Outlines of all leaders' trajectories, and this rank's ``own`` by position. Collective.

    Groups are in the order of ``positions``: those of the groups in the batch as generated, which say
    who has them.
    """
    told = all_gather_json([Outline.of(t).to_json() for t in own])
    rows = {leader: iter(told[leader]) for leader in topology.leaders}
    mine = iter(own if topology.is_leader else ())
    outlines: list[Outline] = []
    kept: dict[int, Trajectory] = {}
    for position in positions:
        leader = topology.leaders[owner(position, topology)]
        for _ in range(group_size):
            outlines.append(Outline.from_json(next(rows[leader])))
            if leader == topology.rank:
                kept[len(outlines) - 1] = next(mine)
    return outlines, kept


@dataclass(frozen=True)
class Delivery:
    """A batch as this rank has it.

    ``trajectories``: by position, those that it needs, with the columns that its pipeline stage reads and
    recorded routing of the stage's layers. ``forms``: of all columns of the batch, whole, the same on every
    rank. ``held``: by column, the positions of the trajectories that have it, wherever that is.
    """

    outlines: Sequence[Outline]
    trajectories: Mapping[int, Trajectory]
    forms: Mapping[str, Form]
    held: Mapping[str, frozenset[int]]


def _shared_buffer(size: int | None) -> SharedBuffer | None:
    """One for this rank's site; None: it shares nothing. Collective. Raises ExchangeError on all ranks
    where the memory was taken meanwhile."""
    buffer, fault = None, None
    try:
        buffer = None if size is None else SharedBuffer(size)
    except OSError as error:
        fault = str(error)
    if (failure := first_failure(fault)) is not None:
        if buffer is not None:
            buffer.hide()
        raise ExchangeError(f"the batch found no room in shared memory: {failure}")
    return buffer


@dataclass(frozen=True)
class _Needs:
    """Which parts ranks need. ``positions``: by replica. ``gather``: global rank 0 needs all."""

    directory: PartDirectory
    positions: Sequence[frozenset[int]]
    stages: Stages
    gather: bool

    def of(self, ranks: Sequence[int], replica: int, stages: Collection[int]) -> list[Part]:
        """What the ``ranks`` of a replica, in these pipeline ``stages``, need together; in order."""
        if self.gather and 0 in ranks:
            return sorted(self.directory.holders)
        wanted = self.positions[replica]
        kinds = {part[1:]: part for part in self.directory.holders}
        needed = {
            kind
            for kind, part in kinds.items()
            if any(self.stages.needs(part, stage) for stage in stages)
        }
        return sorted(
            part
            for part in self.directory.holders
            if part.position in wanted and part[1:] in needed
        )


@dataclass(frozen=True)
class ColumnExchange:
    """Moves trajectories between the replicas of ``topology``.

    ``sizes``: what trailing sizes of columns must be, by their declared names; others are free.
    ``stages``: the pipeline stages, and which layers of a recording each replays.
    """

    topology: Topology
    sizes: Mapping[str, int]
    stages: Stages = field(default_factory=Stages)

    def deliver(
        self,
        outlines: Sequence[Outline],
        own: Mapping[int, Trajectory],
        needed: Sequence[Collection[int]],
        *,
        gather: bool = False,
    ) -> Delivery:
        """The batch with the trajectories that this rank needs, and no others. Collective.

        ``own``: by position, what this rank holds if it is a leader. ``needed``: positions by
        data-parallel rank. ``gather``: global rank 0 gets all. Raises ExchangeError, on all ranks,
        naming the trajectory.
        """
        at = self.topology
        held = own if at.is_leader else {}
        local: dict[Part, np.ndarray] = {}
        for position, trajectory in held.items():
            local |= self.stages.split(position, trajectory)
        directory = PartDirectory.gather(outlines, held, local, at, self.stages, self.sizes)
        needs = _Needs(directory, [frozenset(part) for part in needed], self.stages, gather)
        shapes = PartShapes(outlines, directory.forms, self.stages)

        @cache
        def room_of(site: Site) -> Room:
            parts = needs.of(site.ranks, site.replica, site.stages)
            return Room(shapes, sorted(parts, key=lambda p: directory.source(p, site.head)))

        def rooms_of(sites: Sites) -> dict[int, Room]:
            return {site.head: room_of(site) for site in sites.all}

        sites = Sites.gather(at)
        sizes = {head: room.size for head, room in rooms_of(sites).items()}
        sites = sites.within(sizes, all_gather_json(at.pp_rank))
        arrays = self._received(sites.at(at.rank), rooms_of(sites), directory, local)
        by_position: dict[int, dict[Part, np.ndarray]] = {}
        for part in needs.of([at.rank], at.dp_rank, [at.pp_rank]):
            by_position.setdefault(part.position, {})[part] = arrays[part]
        delivered = {
            position: self.stages.trajectory(outlines[position], found)
            for position, found in by_position.items()
        }
        return Delivery(outlines, delivered, directory.forms, directory.held)

    def _received(
        self,
        site: Site,
        rooms: Mapping[int, Room],
        directory: PartDirectory,
        local: Mapping[Part, np.ndarray],
    ) -> dict[Part, np.ndarray]:
        """The arrays of this rank's site, checked by its head."""
        at, room = self.topology, rooms[site.head]
        shared = _shared_buffer(room.size if at.rank == site.head and len(site.ranks) > 1 else None)
        try:
            buffer = np.empty(0, np.uint8)
            if at.rank == site.head:
                buffer = np.empty(room.size, np.uint8) if shared is None else shared.array
            transfer(directory, rooms, local, buffer, at.rank)
            views = room.views(buffer) if at.rank == site.head else {}
            changed = directory.changed(views, room.shapes.outlines, at.rank)
            if any_rank(bool(changed)):
                told = [line for part in all_gather_json(changed) for line in part]
                raise ExchangeError("\n".join(told))
            paths = all_gather_json(None if shared is None else str(shared.path))
            if at.rank != site.head:
                views = room.views(mapped(paths[site.head], room.size))
            barrier()  # all have it mapped
        finally:
            if shared is not None:
                shared.hide()
        return views
