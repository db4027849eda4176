"""A batch's way from the leaders that generate it to the ranks that train on it.

``announce`` tells every rank the outlines of all trajectories: lengths, scores, weight versions. Tokens and columns
stay with the leader that generated them (recorded routing alone takes 384 bytes a token for Qwen3-30B-A3B). Once the
plan of the step says which replica trains on what, ``ColumnExchange`` sends each array once to every host of that
replica, into memory that the replica's ranks there share, and every receiver compares a hash with the owner's.

What travels is a ``ColumnPart``: one array of one trajectory. Recorded routing has a part for each pipeline stage,
which needs no other layers; other columns go to the stages that read them (``data/columns.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.data.columns import Form, declared, digest
from megatron_dppo.data.trajectory import Outline, Trajectory, check_complete, row_count, sizes_of
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.scratch import SharedBuffer, aligned, free_bytes, mapped, memory_name
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import all_gather_json, any_rank, barrier, first_failure
from megatron_dppo.trainer.topology import Topology

TOKENS = {"token_ids": Form("int32", ()), "loss_mask": Form("bool", ())}
"""What a trajectory has beside columns; a row a token."""
LAYERS = "moe_layers"
"""The trailing size of columns that are cut by pipeline stage."""
# Arrays travel in pieces of at most this size, or of one: no device has room for a step's.
PIECE_BYTES = 64 * 2**20


class ExchangeError(RunError):
    """A column is missing, belongs to another model, or changed on its way."""


def owner(position: int, topology: Topology) -> int:
    """Data-parallel rank whose leader answers the problem at ``position`` of a batch."""
    return position % topology.dp_size


def own_positions(positions: Sequence[int], topology: Topology) -> list[int]:
    """Those of ``positions`` that this rank answers: none on ranks that are no leader."""
    return [p for p in positions if topology.is_leader and owner(p, topology) == topology.dp_rank]


def announce(
    trajectories: Sequence[Trajectory],
    topology: Topology,
    group_size: int,
    positions: Sequence[int],
) -> tuple[list[Outline], dict[int, Trajectory]]:
    """Outlines of all leaders' trajectories, and this rank's ``trajectories`` by position. Collective.

    Groups are in the order of ``positions``: those of the groups in the batch as generated, which say who has them.
    """
    rows_by_rank = all_gather_json([Outline.of(t) for t in trajectories])
    rows = {leader: iter(rows_by_rank[leader]) for leader in topology.leaders}
    remaining = iter(trajectories if topology.is_leader else ())
    outlines: list[Outline] = []
    by_position: dict[int, Trajectory] = {}
    for position in positions:
        leader = topology.leaders[owner(position, topology)]
        for _ in range(group_size):
            outlines.append(Outline.from_json(next(rows[leader])))
            if leader == topology.rank:
                by_position[len(outlines) - 1] = next(remaining)
    return outlines, by_position


# --- what travels


class ColumnPart(NamedTuple):
    """One array of the trajectory at ``position``. ``stage``: the pipeline stage whose layers it holds; 0 of what is
    not cut by layers."""

    position: int
    name: str
    stage: int = 0


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a replica. ``count``: how many. ``layers``: by stage, the indices in a recording that it
    replays; empty: recordings are not cut."""

    count: int = 1
    layers: Sequence[Sequence[int]] = ()

    def cuts(self, name: str) -> bool:
        """Whether the column has a part for each stage."""
        return bool(self.layers) and name not in TOKENS and LAYERS in declared(name).trailing[:1]

    def parts(self, position: int, name: str) -> list[ColumnPart]:
        stages = range(self.count if self.cuts(name) else 1)
        return [ColumnPart(position, name, stage) for stage in stages]

    def needs(self, part: ColumnPart, stage: int) -> bool:
        if part.name in TOKENS:
            return True
        is_read = declared(part.name).read_by.includes(stage, self.count)
        return is_read and (not self.cuts(part.name) or part.stage == stage)

    def form(self, part: ColumnPart, forms: Mapping[str, Form]) -> Form:
        """Type and trailing shape of the part's array."""
        form = TOKENS.get(part.name) or forms[part.name]
        if not self.cuts(part.name):
            return form
        return form._replace(trailing=(len(self.layers[part.stage]), *form.trailing[1:]))

    def split(self, position: int, trajectory: Trajectory) -> dict[ColumnPart, np.ndarray]:
        arrays: dict[ColumnPart, np.ndarray] = {
            ColumnPart(position, "token_ids"): trajectory.token_ids,
            ColumnPart(position, "loss_mask"): trajectory.loss_mask,
        }
        for name, array in trajectory.columns.items():
            for part in self.parts(position, name):
                cut = array[:, list(self.layers[part.stage])] if self.cuts(name) else array
                arrays[part] = np.ascontiguousarray(cut)
        return arrays

    def trajectory(self, outline: Outline, arrays: Mapping[ColumnPart, np.ndarray]) -> Trajectory:
        columns: dict[str, dict[int, np.ndarray]] = {}
        for part, array in arrays.items():
            columns.setdefault(part.name, {})[part.stage] = array
        return Trajectory(
            problem_id=outline.problem_id,
            sample_index=outline.sample_index,
            token_ids=columns.pop("token_ids")[0],
            loss_mask=columns.pop("loss_mask")[0],
            columns={name: self._joined(by_stage) for name, by_stage in columns.items()},
            finish_reason=outline.finish_reason,
            reward=outline.reward,
            advantage=outline.advantage,
        )

    def _joined(self, by_stage: Mapping[int, np.ndarray]) -> np.ndarray:
        """A column: the one part there is, or all layers in their order."""
        first = next(iter(by_stage.values()))
        if len(by_stage) == 1:
            return first
        whole = np.empty((len(first), sum(map(len, self.layers)), *first.shape[2:]), first.dtype)
        for stage, array in by_stage.items():
            whole[:, list(self.layers[stage])] = array
        return whole


@dataclass(frozen=True)
class Share:
    """One buffer for all that a host group receives: by part the first byte and the one after its last."""

    spans: Mapping[ColumnPart, tuple[int, int]]
    size: int

    def pieces(self, parts: Iterable[ColumnPart], limit: int) -> Iterator[list[ColumnPart]]:
        """``parts``, neighbours in the buffer, in runs of at most ``limit`` bytes, or of one part."""
        piece: list[ColumnPart] = []
        for part in parts:
            if piece and self.spans[part][1] - self.spans[piece[0]][0] > limit:
                yield piece
                piece = []
            piece.append(part)
        if piece:
            yield piece

    def extent(self, piece: Sequence[ColumnPart]) -> tuple[int, int]:
        """The first byte of a piece and the one after its last."""
        return self.spans[piece[0]][0], self.spans[piece[-1]][1]


@dataclass(frozen=True)
class PartDirectory:
    """The parts of a batch, their forms, and who holds them: the same on every rank.

    ``forms``: by column what all its whole arrays have in common. ``positions``: by column, of the trajectories that
    have it. ``holders``: by part the global ranks of the leaders that hold it, with the hash of it.
    """

    outlines: Sequence[Outline]
    stages: Stages
    forms: Mapping[str, Form]
    positions: Mapping[str, Collection[int]] = field(default_factory=dict)
    holders: Mapping[ColumnPart, Mapping[int, str]] = field(default_factory=dict)

    @classmethod
    def gather(
        cls,
        outlines: Sequence[Outline],
        trajectories: Mapping[int, Trajectory],
        arrays: Mapping[ColumnPart, np.ndarray],
        topology: Topology,
        stages: Stages,
        sizes: Mapping[str, int],
    ) -> Self:
        """Of what every leader has: its ``trajectories`` by position, and the ``arrays`` of their parts. Collective.

        ``sizes``: what trailing sizes must be, by their declared names. Raises ExchangeError, on all
        ranks, where arrays do not fit them or each other.
        """
        columns: dict[tuple[str, Form], list[int]] = {}
        for position, t in trajectories.items():
            for name, array in t.columns.items():
                columns.setdefault((name, Form.of(array)), []).append(position)
        hashes: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for part, array in arrays.items():
            hashes.setdefault((part.name, part.stage), []).append((part.position, digest(array)))
        rows_by_rank = all_gather_json([list(columns.items()), list(hashes.items())])
        forms, faults = dict[str, Form](), list[str]()
        present: dict[str, set[int]] = {}
        for (name, row), positions in (c for r in topology.leaders for c in rows_by_rank[r][0]):
            form = Form(row[0], tuple(row[1]))
            if fault := _misfit(name, form, forms.setdefault(name, form), sizes):
                faults += [f"{_name_of(position, outlines)}: {fault}" for position in positions]
            present.setdefault(name, set()).update(positions)
        faults = faults or _incomplete(forms, present, len(outlines))
        if faults:
            # Several leaders may hold the same trajectory, and say the same of it.
            raise ExchangeError("\n".join(dict.fromkeys(faults)))
        holders: dict[ColumnPart, dict[int, str]] = {}
        for leader in topology.leaders:
            for (name, stage), entries in rows_by_rank[leader][1]:
                for position, hashed in entries:
                    holders.setdefault(ColumnPart(position, name, stage), {})[leader] = hashed
        return cls(outlines, stages, dict(sorted(forms.items())), present, holders)

    def source(self, part: ColumnPart, target: int) -> int:
        """The rank that ``target`` has the part from: itself, or the first that holds it."""
        holders = self.holders[part]
        return target if target in holders else min(holders)

    def shape(self, part: ColumnPart) -> tuple[int, ...]:
        """Of the part's array: the rows are known from the outline, the rest from ``forms``."""
        outline = self.outlines[part.position]
        rows = outline.length if part.name in TOKENS else row_count(declared(part.name), outline)
        return (rows, *self.stages.form(part, self.forms).trailing)

    def share(self, parts: Sequence[ColumnPart]) -> Share:
        """A buffer for ``parts`` in their order; whoever knows them knows where they lie."""
        sizes = [self.shape(p)[0] * self.stages.form(p, self.forms).row_bytes for p in parts]
        starts, total = aligned(sizes)
        spans = {
            part: (start, start + size)
            for part, start, size in zip(parts, starts, sizes, strict=True)
        }
        return Share(spans, total)

    def views(self, share: Share, buffer: np.ndarray) -> dict[ColumnPart, np.ndarray]:
        """The arrays in a ``buffer`` of uint8 [size]; writing to them writes to it."""
        return {
            part: buffer[begin:end]
            .view(self.stages.form(part, self.forms).dtype)
            .reshape(self.shape(part))
            for part, (begin, end) in share.spans.items()
        }

    def altered(self, received: Mapping[ColumnPart, np.ndarray], rank: int) -> list[str]:
        """A line for each array that no holder has sent so."""
        lines = []
        for part, array in received.items():
            holders, hashed = self.holders[part], digest(array)
            if hashed not in holders.values():
                source = min(holders)
                lines.append(
                    f"{_name_of(part.position, self.outlines)}: the {part.name} that rank {rank} received "
                    f"has the hash {hashed}, expected {holders[source]}, which rank {source} holds"
                )
        return lines


def _name_of(position: int, outlines: Sequence[Outline]) -> str:
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
    for size, value in zip(declared(name).trailing, form.trailing, strict=True):
        if value != sizes.get(size, value):
            return f"{name} has {size} {value}, expected {sizes[size]}"
    if form != first:
        shown, others = (
            f"{f.dtype} [rows, {', '.join(map(str, f.trailing))}]" for f in (form, first)
        )
        return f"{name} is {shown}, that of others {others}"
    return None


# --- who receives


@dataclass(frozen=True)
class HostGroup:
    """Ranks of one replica that share a host's memory: the lowest, ``head``, receives for all.

    ``stages``: pipeline stages that are there. ``free``: bytes that may be taken of the ``memory``.
    """

    replica: int
    ranks: tuple[int, ...]
    stages: frozenset[int]
    memory: str
    free: int

    @property
    def head(self) -> int:
        """The lowest rank; where a replica's leader is, the leader."""
        return self.ranks[0]


def host_groups(rows: Sequence[Sequence]) -> list[HostGroup]:
    """In the order of their heads, from (replica, stage, memory, free bytes) of each rank."""
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, (replica, _, memory, _) in enumerate(rows):
        ranks_of.setdefault((replica, memory), []).append(rank)
    return [
        HostGroup(
            replica,
            tuple(ranks),
            frozenset(rows[rank][1] for rank in ranks),
            memory,
            min(rows[rank][3] for rank in ranks),
        )
        for (replica, memory), ranks in ranks_of.items()
    ]


def with_room(
    groups: Sequence[HostGroup], sizes: Mapping[int, int], stage_of: Sequence[int]
) -> list[HostGroup]:
    """``groups`` where each memory takes what its groups want (``sizes`` by head); others as single
    ranks, which receive for themselves. ``stage_of``: by rank."""
    needed: dict[str, int] = {}
    for group in groups:
        if len(group.ranks) > 1:
            needed[group.memory] = needed.get(group.memory, 0) + sizes[group.head]
    fitting: list[HostGroup] = []
    for group in groups:
        if needed.get(group.memory, 0) <= group.free:
            fitting.append(group)
            continue
        fitting += [
            replace(group, ranks=(rank,), stages=frozenset([stage_of[rank]]))
            for rank in group.ranks
        ]
    return sorted(fitting, key=lambda group: group.head)


# --- the way


@dataclass(frozen=True)
class Delivery:
    """A batch as this rank has it.

    ``trajectories``: by position, those that it needs, with the columns that its pipeline stage reads and
    recorded routing of the stage's layers. ``forms``: of all columns of the batch, whole, the same on every
    rank. ``positions``: by column, of the trajectories that have it, wherever that is.
    """

    outlines: Sequence[Outline]
    trajectories: Mapping[int, Trajectory]
    forms: Mapping[str, Form]
    positions: Mapping[str, Collection[int]]


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
        trajectories: Mapping[int, Trajectory],
        needed: Sequence[Collection[int]],
        *,
        gather: bool = False,
    ) -> Delivery:
        """The batch with the trajectories that this rank needs, and no others. Collective.

        ``trajectories``: by position, what this rank has if it is a leader. ``needed``: positions by data-parallel
        rank. ``gather``: global rank 0 gets all. Raises ExchangeError, on all ranks, naming the trajectory.
        """
        topology, stages = self.topology, self.stages
        mine = trajectories if topology.is_leader else {}
        arrays: dict[ColumnPart, np.ndarray] = {}
        for position, trajectory in mine.items():
            arrays |= stages.split(position, trajectory)
        directory = PartDirectory.gather(outlines, mine, arrays, topology, stages, self.sizes)
        positions_of = [frozenset(positions) for positions in needed]

        def parts_for(
            ranks: Sequence[int], replica: int, of_stages: Collection[int]
        ) -> list[ColumnPart]:
            """What the ranks of a replica, in these pipeline stages, need together; in order."""
            if gather and 0 in ranks:
                return sorted(directory.holders)
            kinds = {part[1:]: part for part in directory.holders}
            read = {k for k, p in kinds.items() if any(stages.needs(p, s) for s in of_stages)}
            positions = positions_of[replica]
            return sorted(p for p in directory.holders if p.position in positions and p[1:] in read)

        @cache
        def share_of(group: HostGroup) -> Share:
            parts = parts_for(group.ranks, group.replica, group.stages)
            # What comes from one rank lies together, so that it travels in one piece.
            return directory.share(sorted(parts, key=lambda p: directory.source(p, group.head)))

        rows = all_gather_json([topology.dp_rank, topology.pp_rank, memory_name(), free_bytes()])
        groups = host_groups(rows)
        sizes = {group.head: share_of(group).size for group in groups}
        groups = with_room(groups, sizes, [stage for _, stage, *_ in rows])
        received = self._received(
            next(group for group in groups if topology.rank in group.ranks),
            {group.head: share_of(group) for group in groups},
            directory,
            arrays,
        )
        by_position: dict[int, dict[ColumnPart, np.ndarray]] = {}
        for part in parts_for([topology.rank], topology.dp_rank, [topology.pp_rank]):
            by_position.setdefault(part.position, {})[part] = received[part]
        delivered = {
            position: stages.trajectory(outlines[position], parts)
            for position, parts in by_position.items()
        }
        return Delivery(outlines, delivered, directory.forms, directory.positions)

    def _received(
        self,
        group: HostGroup,
        shares: Mapping[int, Share],
        directory: PartDirectory,
        arrays: Mapping[ColumnPart, np.ndarray],
    ) -> dict[ColumnPart, np.ndarray]:
        """The arrays of this rank's ``group``, checked by its head. ``shares``: by head."""
        rank, share = self.topology.rank, shares[group.head]
        is_head = rank == group.head
        shared = _shared_buffer(share.size if is_head and len(group.ranks) > 1 else None)
        try:
            buffer = np.empty(0, np.uint8)
            if is_head:
                buffer = np.empty(share.size, np.uint8) if shared is None else shared.array
            transfer(directory, shares, arrays, buffer, rank)
            views = directory.views(share, buffer) if is_head else {}
            altered = directory.altered(views, rank)
            if any_rank(bool(altered)):
                lines = [line for of_rank in all_gather_json(altered) for line in of_rank]
                raise ExchangeError("\n".join(lines))
            paths = all_gather_json(None if shared is None else str(shared.path))
            if not is_head:
                views = directory.views(share, mapped(paths[group.head], share.size))
            # The file loses its name below, and all must have it mapped by then.
            barrier()
        finally:
            if shared is not None:
                shared.hide()
        return views


def _shared_buffer(size: int | None) -> SharedBuffer | None:
    """One for this rank's group; None: it shares nothing. Collective. Raises ExchangeError on all ranks
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


def transfer(
    directory: PartDirectory,
    shares: Mapping[int, Share],
    arrays: Mapping[ColumnPart, np.ndarray],
    buffer: np.ndarray,
    rank: int,
) -> None:
    """Fill ``buffer``, of this rank's share if it heads a group. Collective.

    ``shares``: by the rank of each group's head. In rounds: everybody sends to the one ``distance`` further on,
    among those that send or receive.
    """
    if rank in shares:
        for part, (begin, end) in shares[rank].spans.items():
            if part in arrays:
                buffer[begin:end] = _bytes(arrays[part])
    sources = {min(holders) for holders in directory.holders.values()}
    members = sorted({*sources, *shares})
    if rank not in members:
        return
    index = members.index(rank)
    # One buffer for all pieces that are sent: memory that is new each time costs more than the copy.
    outbox = np.empty(0, np.uint8)

    def pieces(source: int, target: int) -> list[list[ColumnPart]]:
        if target not in shares:
            return []
        share = shares[target]
        parts = [part for part in share.spans if directory.source(part, target) == source]
        return list(share.pieces(parts, PIECE_BYTES))

    for distance in range(1, len(members)):
        target = members[(index + distance) % len(members)]
        origin = members[(index - distance) % len(members)]
        for leaving, coming in zip_longest(pieces(rank, target), pieces(origin, rank)):
            payload = landing = None
            if leaving is not None:
                begin, end = shares[target].extent(leaving)
                if len(outbox) < end - begin:
                    outbox = np.zeros(end - begin, np.uint8)
                payload = outbox[: end - begin]
                for part in leaving:
                    first, last = shares[target].spans[part]
                    payload[first - begin : last - begin] = _bytes(arrays[part])
            if coming is not None:
                landing = buffer[slice(*shares[rank].extent(coming))]
            _send_and_receive(payload, target, landing, origin)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _send_and_receive(
    payload: np.ndarray | None, target: int, landing: np.ndarray | None, origin: int
) -> None:
    """Send ``payload`` and fill ``landing`` at the same time."""
    device = platform.current().device
    operations = []
    if payload is not None:
        operations.append(dist.P2POp(dist.isend, torch.from_numpy(payload).to(device), target))
    if landing is not None:
        here = torch.from_numpy(landing)
        received = here if here.device == device else torch.empty_like(here, device=device)
        operations.append(dist.P2POp(dist.irecv, received, origin))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    if landing is not None and received is not here:
        here.copy_(received)
