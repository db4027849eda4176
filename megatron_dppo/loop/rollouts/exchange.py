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
from itertools import zip_longest
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.data.batch_file import digest
from megatron_dppo.data.columns import Form, declared
from megatron_dppo.data.trajectory import Outline, Trajectory, check_complete, sizes_of
from megatron_dppo.loop.rollouts.parts import TOKENS, Part, PartShapes, Piece, Room, Stages
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.scratch import SharedBuffer, free_bytes, mapped, memory_name
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import all_gather_json, any_rank, barrier, first_failure
from megatron_dppo.trainer.topology import Topology

# Which ranks of a replica share a host's memory: one of them receives for all.


@dataclass(frozen=True)
class Site:
    """Ranks of one replica that share memory. ``head``: the one that receives; ``stages``: pipeline
    stages that are there; ``free``: bytes that may be taken of the memory."""

    replica: int
    ranks: tuple[int, ...]
    stages: frozenset[int]
    memory: str
    free: int

    @property
    def head(self) -> int:
        """The lowest rank; where a replica's leader is, the leader."""
        return self.ranks[0]


@dataclass(frozen=True)
class Sites:
    """All sites, in the order of their heads; the same on every rank."""

    all: tuple[Site, ...]

    @classmethod
    def gather(cls, at: Topology) -> Self:
        """Ask every rank where it is. Collective."""
        told = all_gather_json([at.dp_rank, at.pp_rank, memory_name(), free_bytes()])
        return cls.of(told)

    @classmethod
    def of(cls, told: Sequence[Sequence]) -> Self:
        """From (replica, stage, memory, free bytes) of each rank."""
        groups: dict[tuple[int, str], list[int]] = {}
        for rank, (replica, _, memory, _) in enumerate(told):
            groups.setdefault((replica, memory), []).append(rank)
        return cls(
            tuple(
                Site(
                    replica,
                    tuple(ranks),
                    frozenset(told[rank][1] for rank in ranks),
                    memory,
                    min(told[rank][3] for rank in ranks),
                )
                for (replica, memory), ranks in groups.items()
            )
        )

    def within(self, sizes: Mapping[int, int], stage_of: Sequence[int]) -> Sites:
        """The same where each memory takes what its sites want (``sizes`` by head); other sites in single
        ranks, which receive for themselves. ``stage_of``: by rank."""
        wanted: dict[str, int] = {}
        for site in self.all:
            if len(site.ranks) > 1:
                wanted[site.memory] = wanted.get(site.memory, 0) + sizes[site.head]
        kept: list[Site] = []
        for site in self.all:
            if wanted.get(site.memory, 0) <= site.free:
                kept.append(site)
                continue
            kept += [
                Site(site.replica, (r,), frozenset([stage_of[r]]), site.memory, site.free)
                for r in site.ranks
            ]
        return Sites(tuple(sorted(kept, key=lambda site: site.head)))

    def at(self, rank: int) -> Site:
        """The site of a rank."""
        return next(site for site in self.all if rank in site.ranks)


# Who holds which part of which trajectory of a batch, and in what form: the same on every rank.


class ExchangeError(RunError):
    """A column is missing, belongs to another model, or changed on its way."""


@dataclass(frozen=True)
class PartDirectory:
    """``holders``: by part the global ranks of the leaders that hold it, with the hash of it.
    ``forms``: by column what all its whole arrays have in common.
    """

    holders: Mapping[Part, Mapping[int, str]]
    forms: Mapping[str, Form]

    @classmethod
    def gather(
        cls,
        outlines: Sequence[Outline],
        own: Mapping[int, Trajectory],
        parts: Mapping[Part, np.ndarray],
        at: Topology,
        stages: Stages,
        sizes: Mapping[str, int],
    ) -> Self:
        """Of what every leader has: its ``own`` trajectories by position, and the ``parts`` of them.
        Collective.

        ``sizes``: what trailing sizes must be, by their declared names. Raises ExchangeError, on all
        ranks, where arrays do not fit them or each other.
        """
        columns: dict[tuple[str, Form], list[int]] = {}
        for position, t in own.items():
            for name, array in t.columns.items():
                columns.setdefault((name, Form.of(array)), []).append(position)
        hashes: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for part, array in parts.items():
            hashes.setdefault((part.name, part.stage), []).append((part.position, digest(array)))
        shares = all_gather_json([list(columns.items()), list(hashes.items())])
        forms, problems = dict[str, Form](), list[str]()
        present: dict[str, set[int]] = {}
        for (name, told), positions in (c for leader in at.leaders for c in shares[leader][0]):
            form = Form(told[0], tuple(told[1]))
            problem = _misfit(name, form, forms.setdefault(name, form), sizes)
            if problem:
                problems += [f"{name_of(position, outlines)}: {problem}" for position in positions]
            present.setdefault(name, set()).update(positions)
        problems = problems or _incomplete(forms, present, len(outlines))
        if problems:
            raise ExchangeError("\n".join(dict.fromkeys(problems)))  # holders may be several
        holders: dict[Part, dict[int, str]] = {}
        for leader in at.leaders:
            for (name, stage), held in shares[leader][1]:
                for position, found in held:
                    holders.setdefault(Part(position, name, stage), {})[leader] = found
        return cls(holders, dict(sorted(forms.items())))

    @property
    def held(self) -> dict[str, frozenset[int]]:
        """By column, the positions that somebody holds."""
        found: dict[str, set[int]] = {name: set() for name in self.forms}
        for part in self.holders:
            if part.name in found:
                found[part.name].add(part.position)
        return {name: frozenset(positions) for name, positions in found.items()}

    def source(self, part: Part, target: int) -> int:
        """The rank that ``target`` has the part from: itself, or the first that holds it."""
        holders = self.holders[part]
        return target if target in holders else min(holders)

    def changed(
        self, received: Mapping[Part, np.ndarray], outlines: Sequence[Outline], rank: int
    ) -> list[str]:
        """A line for each array that no holder has sent so."""
        lines = []
        for part, array in received.items():
            holders, found = self.holders[part], digest(array)
            if found not in holders.values():
                source = min(holders)
                lines.append(
                    f"{name_of(part.position, outlines)}: the {part.name} that rank {rank} received "
                    f"has the hash {found}, expected {holders[source]}, which rank {source} holds"
                )
        return lines


def name_of(position: int, outlines: Sequence[Outline]) -> str:
    """The trajectory at ``position`` in an error."""
    return f"sample {position} ({outlines[position]})"


def _incomplete(
    forms: Mapping[str, Form], present: Mapping[str, set[int]], trajectories: int
) -> list[str]:
    """What makes the columns no batch of that many trajectories."""
    try:
        sizes_of(forms)
        for name, positions in present.items():
            check_complete(declared(name), len(positions), trajectories)
    except ValueError as error:
        return [str(error)]
    return []


def _misfit(name: str, form: Form, first: Form, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with the form of an array, beside the first one's of this column."""
    assert name not in TOKENS
    for size, found in zip(declared(name).trailing, form.trailing, strict=True):
        if found != sizes.get(size, found):
            return f"{name} has {size} {found}, expected {sizes[size]}"
    if form != first:
        return f"{name} is {_told(form)}, that of others {_told(first)}"
    return None


def _told(form: Form) -> str:
    return f"{form.dtype} [rows, {', '.join(map(str, form.trailing))}]"


# Parts from the leaders that hold them to the heads of the sites that need them, in pieces.

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


def owner(position: int, topology: Topology) -> int:
    """Data-parallel rank whose leader answers the problem at ``position`` of a batch."""
    return position % topology.dp_size


def own_positions(positions: Sequence[int], topology: Topology) -> list[int]:
    """Those of ``positions`` that this rank answers: none on ranks that are no leader."""
    return [p for p in positions if topology.is_leader and owner(p, topology) == topology.dp_rank]


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
