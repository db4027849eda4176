"""Send the tokens and columns of a batch from the leaders that generate it to the ranks that train on it.

Tokens and columns are large: recorded routing alone takes 384 bytes a token for Qwen3-30B-A3B. So they stay with the
leader that generated them until the plan of the step assigns trajectories to replicas. Then ``ColumnExchange`` sends
each array once to every host of the replica that trains on it, into memory that the replica's ranks on that host share.
The receiving rank compares the array's hash with the owner's hash.

The unit of transfer is a ``ColumnPart``: one array of one trajectory. Recorded routing has one part for each pipeline
stage, because a stage needs only its own layers. Other columns go to the stages that read them (``data/columns.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, zip_longest
from operator import attrgetter
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.data.columns import Form, declared_column, digest
from megatron_dppo.data.trajectory import Outline, Trajectory, check_complete, row_count, sizes_of
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.scratch import (
    SharedBuffer,
    aligned_offsets,
    free_bytes,
    map_buffer,
    memory_name,
)
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import all_gather_json, any_rank, barrier, first_failure
from megatron_dppo.trainer.topology import Topology

TOKENS = {"token_ids": Form("int32", ()), "loss_mask": Form("bool", ())}
"""The arrays of a trajectory that are not columns, with one row for each token."""
LAYERS = "moe_layers"
"""Name of a trailing dimension. The columns with this dimension are split by pipeline stage."""
# Arrays are sent in pieces, because the arrays of a whole step do not fit on a device. A piece has at most this many
# bytes, unless it is a single larger array.
PIECE_BYTES = 64 * 2**20


class ExchangeError(RunError):
    """A column is missing, belongs to another model, or changed during the transfer."""


class ColumnPart(NamedTuple):
    """One array of the trajectory at ``position``.

    ``stage``: the pipeline stage whose layers the array holds; 0 for a column that is not split by layers.
    """

    position: int
    name: str
    stage: int = 0


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a replica.

    ``count``: number of stages. ``layers``: for each stage, the indices of the recorded layers that the stage replays;
    empty if recordings are not split.
    """

    count: int = 1
    layers: Sequence[Sequence[int]] = ()

    def is_split(self, name: str) -> bool:
        """Return whether the column has one part for each stage."""
        if name in TOKENS or not self.layers:
            return False
        trailing = declared_column(name).trailing
        return bool(trailing) and trailing[0] == LAYERS

    def parts(self, position: int, name: str) -> list[ColumnPart]:
        """Return the parts of the column ``name`` of the trajectory at ``position``."""
        part_count = self.count if self.is_split(name) else 1
        return [ColumnPart(position, name, stage) for stage in range(part_count)]

    def needs(self, part: ColumnPart, stage: int) -> bool:
        """Return whether the ranks of the pipeline stage ``stage`` read the part."""
        if part.name in TOKENS:
            return True
        if self.is_split(part.name) and part.stage != stage:
            return False
        return declared_column(part.name).read_by.includes(stage, self.count)

    def form(self, part: ColumnPart, forms: Mapping[str, Form]) -> Form:
        """Return the dtype and the trailing shape of the part's array. ``forms``: forms of unsplit columns, by name."""
        form = TOKENS.get(part.name) or forms[part.name]
        if not self.is_split(part.name):
            return form
        return form._replace(trailing=(len(self.layers[part.stage]), *form.trailing[1:]))

    def split(self, position: int, trajectory: Trajectory) -> dict[ColumnPart, np.ndarray]:
        """Return the arrays of the trajectory at ``position``, by part."""
        arrays: dict[ColumnPart, np.ndarray] = {
            ColumnPart(position, "token_ids"): trajectory.token_ids,
            ColumnPart(position, "loss_mask"): trajectory.loss_mask,
        }
        for name, array in trajectory.columns.items():
            for part in self.parts(position, name):
                part_array = array
                if self.is_split(name):
                    part_array = array[:, list(self.layers[part.stage])]
                arrays[part] = np.ascontiguousarray(part_array)
        return arrays

    def trajectory(self, outline: Outline, arrays: Mapping[ColumnPart, np.ndarray]) -> Trajectory:
        """Return the trajectory with these arrays. With all parts, this is the inverse of ``split``."""
        arrays_by_name: dict[str, dict[int, np.ndarray]] = {}
        for part, array in arrays.items():
            arrays_by_name.setdefault(part.name, {})[part.stage] = array
        token_ids = arrays_by_name.pop("token_ids")[0]
        loss_mask = arrays_by_name.pop("loss_mask")[0]
        columns: dict[str, np.ndarray] = {}
        for name, by_stage in arrays_by_name.items():
            columns[name] = self._joined(by_stage)
        return Trajectory(
            problem_id=outline.problem_id,
            sample_index=outline.sample_index,
            token_ids=token_ids,
            loss_mask=loss_mask,
            columns=columns,
            finish_reason=outline.finish_reason,
            reward=outline.reward,
            advantage=outline.advantage,
        )

    def _joined(self, by_stage: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the column: its only part, or the layers of all parts in the model's order."""
        first_part = next(iter(by_stage.values()))
        if len(by_stage) == 1:
            return first_part
        rows, _, *further_sizes = first_part.shape
        layer_count = sum(map(len, self.layers))
        column = np.empty((rows, layer_count, *further_sizes), first_part.dtype)
        for stage, array in by_stage.items():
            column[:, list(self.layers[stage])] = array
        return column


@dataclass(frozen=True)
class Share:
    """The layout of a host group's receive buffer.

    ``spans``: for each part, its first byte in the buffer and the byte after its last byte. ``size``: bytes of the
    buffer.
    """

    spans: Mapping[ColumnPart, tuple[int, int]]
    size: int

    def pieces(self, parts: Iterable[ColumnPart], limit: int) -> Iterator[list[ColumnPart]]:
        """Split ``parts`` into pieces of at most ``limit`` bytes. The parts are adjacent in the buffer.

        A part of more than ``limit`` bytes is one piece.
        """
        piece: list[ColumnPart] = []
        for part in parts:
            if piece and self.spans[part][1] - self.spans[piece[0]][0] > limit:
                yield piece
                piece = []
            piece.append(part)
        if piece:
            yield piece

    def extent(self, piece: Sequence[ColumnPart]) -> tuple[int, int]:
        """Return the first byte of a piece and the byte after its last byte."""
        return self.spans[piece[0]][0], self.spans[piece[-1]][1]


@dataclass(frozen=True)
class PartDirectory:
    """The parts of a batch, their forms, and the ranks that hold them; the same on every rank.

    ``forms``: for each column, the form that all its unsplit arrays share. ``positions``: for each column, the
    positions of the trajectories that have it. ``holders``: for each part, the global ranks of the leaders that hold
    it, each with the hash of its array.
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
        """Build the directory from the trajectories of all leaders. Collective.

        Args:
            outlines: outlines of all trajectories of the batch, by position.
            trajectories: this leader's trajectories, by position.
            arrays: the arrays of this leader's trajectories, by part.
            topology: the layout of ranks.
            stages: the pipeline stages of a replica.
            sizes: the required trailing sizes, by their declared names, e.g. ``moe_layers``.

        Raises:
            ExchangeError: on all ranks, if an array does not match ``sizes``, if the forms of a column differ between
                trajectories, or if some trajectories lack a column.
        """
        # Group positions by column and form, and hashes by column and stage. This shortens the text that every rank
        # receives.
        own_positions: dict[tuple[str, Form], list[int]] = {}
        for position, t in trajectories.items():
            for name, array in t.columns.items():
                own_positions.setdefault((name, Form.of(array)), []).append(position)
        own_hashes: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for part, array in arrays.items():
            position_and_hash = (part.position, digest(array))
            own_hashes.setdefault((part.name, part.stage), []).append(position_and_hash)
        rows_by_rank = all_gather_json([list(own_positions.items()), list(own_hashes.items())])
        forms: dict[str, Form] = {}
        faults: list[str] = []
        positions_of: dict[str, set[int]] = {}
        for leader in topology.leaders:
            leader_positions, _ = rows_by_rank[leader]
            for (name, (dtype, trailing)), positions in leader_positions:
                form = Form(dtype, tuple(trailing))
                first_form = forms.setdefault(name, form)
                fault = _misfit(name, form, first_form, sizes)
                if fault:
                    faults += [f"{_name_of(position, outlines)}: {fault}" for position in positions]
                positions_of.setdefault(name, set()).update(positions)
        faults = faults or _incomplete(forms, positions_of, len(outlines))
        if faults:
            # Several leaders may hold the same trajectory and report the same fault.
            raise ExchangeError("\n".join(dict.fromkeys(faults)))
        holders: dict[ColumnPart, dict[int, str]] = {}
        for leader in topology.leaders:
            _, leader_hashes = rows_by_rank[leader]
            for (name, stage), entries in leader_hashes:
                for position, array_hash in entries:
                    part_holders = holders.setdefault(ColumnPart(position, name, stage), {})
                    part_holders[leader] = array_hash
        return cls(outlines, stages, dict(sorted(forms.items())), positions_of, holders)

    def source(self, part: ColumnPart, target: int) -> int:
        """Return the rank that sends the part to ``target``: the lowest holder, or ``target`` if it is a holder."""
        holders = self.holders[part]
        if target in holders:
            return target
        return min(holders)

    def shape(self, part: ColumnPart) -> tuple[int, ...]:
        """Return the shape of the part's array: the rows from the outline, the trailing shape from ``forms``."""
        outline = self.outlines[part.position]
        rows = outline.length
        if part.name not in TOKENS:
            rows = row_count(declared_column(part.name), outline)
        return (rows, *self.stages.form(part, self.forms).trailing)

    def share(self, parts: Sequence[ColumnPart]) -> Share:
        """Lay out a buffer for ``parts`` in their order; every rank computes the same layout from the same parts."""
        sizes: list[int] = []
        for part in parts:
            rows = self.shape(part)[0]
            sizes.append(rows * self.stages.form(part, self.forms).row_bytes)
        starts, total = aligned_offsets(sizes)
        spans: dict[ColumnPart, tuple[int, int]] = {}
        for part, start, size in zip(parts, starts, sizes, strict=True):
            spans[part] = (start, start + size)
        return Share(spans, total)

    def views(self, share: Share, buffer: np.ndarray) -> dict[ColumnPart, np.ndarray]:
        """Return the arrays as views of ``buffer``, uint8 [size]."""
        arrays: dict[ColumnPart, np.ndarray] = {}
        for part, (begin, end) in share.spans.items():
            dtype = self.stages.form(part, self.forms).dtype
            array = buffer[begin:end].view(dtype)
            arrays[part] = array.reshape(self.shape(part))
        return arrays

    def altered(self, received: Mapping[ColumnPart, np.ndarray], rank: int) -> list[str]:
        """Return one fault for each received array whose hash differs from the hashes of all its holders."""
        faults = []
        for part, array in received.items():
            holders = self.holders[part]
            received_hash = digest(array)
            if received_hash not in holders.values():
                source = min(holders)
                faults.append(
                    f"{_name_of(part.position, self.outlines)}: the {part.name} that rank {rank} received "
                    f"has the hash {received_hash}, expected {holders[source]}, which rank {source} holds"
                )
        return faults


def _name_of(position: int, outlines: Sequence[Outline]) -> str:
    return f"sample {position} ({outlines[position]})"


def _incomplete(
    forms: Mapping[str, Form], positions_of: Mapping[str, set[int]], trajectory_count: int
) -> list[str]:
    """Return why the columns cannot form a batch of ``trajectory_count`` trajectories; empty if they can."""
    try:
        sizes_of(forms)
        for name, positions in positions_of.items():
            check_complete(declared_column(name), len(positions), trajectory_count)
    except ValueError as error:
        return [str(error)]
    return []


def _form_text(form: Form) -> str:
    """Return the form of a column's arrays as text, e.g. ``int32 [rows, 48, 8]``."""
    trailing = ", ".join(map(str, form.trailing))
    return f"{form.dtype} [rows, {trailing}]"


def _misfit(name: str, form: Form, first_form: Form, sizes: Mapping[str, int]) -> str | None:
    """Return how ``form`` differs from ``sizes`` or from the ``first_form`` of the column; None if it fits both."""
    for size, value in zip(declared_column(name).trailing, form.trailing, strict=True):
        # A size that is not in ``sizes`` may have any value.
        if size in sizes and value != sizes[size]:
            return f"{name} has {size} {value}, expected {sizes[size]}"
    if form != first_form:
        form_text = _form_text(form)
        first_text = _form_text(first_form)
        return f"{name} is {form_text}, expected {first_text} as in other trajectories"
    return None


@dataclass(frozen=True)
class HostGroup:
    """The ranks of one replica that share a host's memory; the lowest rank, ``head``, receives for all of them.

    ``stages``: the pipeline stages of these ranks. ``memory``: the name of the host's shared memory. ``free``: the
    bytes of this memory that are free.
    """

    replica: int
    ranks: tuple[int, ...]
    stages: frozenset[int]
    memory: str
    free: int

    @property
    def head(self) -> int:
        """The lowest rank of the group: the replica's leader, if the group contains it."""
        return self.ranks[0]


def host_groups(rows: Sequence[Sequence]) -> list[HostGroup]:
    """Return the host groups, ordered by head, from each rank's (replica, stage, memory, free bytes)."""
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, (replica, _, memory, _) in enumerate(rows):
        ranks_of.setdefault((replica, memory), []).append(rank)
    groups: list[HostGroup] = []
    for (replica, memory), ranks in ranks_of.items():
        stages = frozenset(rows[rank][1] for rank in ranks)
        free_bytes_of_group = min(rows[rank][3] for rank in ranks)
        groups.append(HostGroup(replica, tuple(ranks), stages, memory, free_bytes_of_group))
    return groups


def with_room(
    groups: Sequence[HostGroup], sizes: Mapping[int, int], stage_of: Sequence[int]
) -> list[HostGroup]:
    """Return the groups, ordered by head; a group whose shared memory has no room is split into single ranks.

    A single rank needs no shared memory: it receives into private memory.

    Args:
        groups: the host groups of all replicas.
        sizes: for each head, the bytes that its group receives.
        stage_of: for each rank, its pipeline stage.
    """
    # Groups of several replicas may use the shared memory of one host, so add up their bytes.
    needed_bytes: dict[str, int] = {}
    for group in groups:
        if len(group.ranks) > 1:
            needed_bytes[group.memory] = needed_bytes.get(group.memory, 0) + sizes[group.head]
    fitting_groups: list[HostGroup] = []
    for group in groups:
        if needed_bytes.get(group.memory, 0) <= group.free:
            fitting_groups.append(group)
            continue
        for rank in group.ranks:
            stages = frozenset([stage_of[rank]])
            fitting_groups.append(replace(group, ranks=(rank,), stages=stages))
    return sorted(fitting_groups, key=attrgetter("head"))


@dataclass(frozen=True)
class Delivery:
    """A batch as this rank receives it.

    ``trajectories``: by position, the trajectories that this rank needs, with the columns that its pipeline stage reads
    and the recorded routing of the stage's layers. ``forms``: the forms of all columns of the batch before they are
    split by stage. ``positions``: for each column, the positions of all trajectories that have it. ``outlines``,
    ``forms`` and ``positions`` are the same on every rank.
    """

    outlines: Sequence[Outline]
    trajectories: Mapping[int, Trajectory]
    forms: Mapping[str, Form]
    positions: Mapping[str, Collection[int]]


@dataclass(frozen=True)
class ColumnExchange:
    """Moves trajectories between the replicas of ``topology``.

    ``sizes``: the required trailing sizes of columns, by the sizes' declared names; a size without an entry may have
    any value. ``stages``: the pipeline stages, and the layers of a recording that each stage replays.
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
        """Return the batch with exactly the trajectories that this rank needs. Collective.

        Args:
            outlines: outlines of all trajectories of the batch, by position.
            trajectories: the trajectories of this rank if it is a leader, by position.
            needed: for each data-parallel rank, the positions that it trains on.
            gather: whether global rank 0 receives all trajectories.

        Raises:
            ExchangeError: on all ranks, naming the trajectory at fault.
        """
        topology = self.topology
        stages = self.stages
        own_trajectories: Mapping[int, Trajectory] = {}
        if topology.is_leader:
            own_trajectories = trajectories
        arrays: dict[ColumnPart, np.ndarray] = {}
        for position, trajectory in own_trajectories.items():
            arrays |= stages.split(position, trajectory)
        directory = PartDirectory.gather(
            outlines, own_trajectories, arrays, topology, stages, self.sizes
        )
        positions_by_replica = [frozenset(positions) for positions in needed]

        def parts_for(
            ranks: Sequence[int], replica: int, rank_stages: Collection[int]
        ) -> list[ColumnPart]:
            """Return all parts, sorted, that ``ranks`` of ``replica`` need. ``rank_stages``: the ranks' stages."""
            if gather and 0 in ranks:
                return sorted(directory.holders)
            # Which stages need a part depends only on its name and stage, so check one part of each (name, stage).
            example_parts = {(part.name, part.stage): part for part in directory.holders}
            needed_keys = set()
            for key, part in example_parts.items():
                if any(stages.needs(part, stage) for stage in rank_stages):
                    needed_keys.add(key)
            positions = positions_by_replica[replica]
            parts = []
            for part in directory.holders:
                if part.position in positions and (part.name, part.stage) in needed_keys:
                    parts.append(part)
            return sorted(parts)

        @cache
        def share_of(group: HostGroup) -> Share:
            parts = parts_for(group.ranks, group.replica, group.stages)
            # Sort by source: parts from one source are then adjacent in the buffer, and one piece holds many of them.
            return directory.share(sorted(parts, key=lambda p: directory.source(p, group.head)))

        rows = all_gather_json([topology.dp_rank, topology.pp_rank, memory_name(), free_bytes()])
        groups = host_groups(rows)
        share_sizes = {group.head: share_of(group).size for group in groups}
        stage_of = [stage for _, stage, *_ in rows]
        groups = with_room(groups, share_sizes, stage_of)
        own_group = next(group for group in groups if topology.rank in group.ranks)
        shares = {group.head: share_of(group) for group in groups}
        received = self._received(own_group, shares, directory, arrays)
        # The group's buffer may also have parts that only other ranks of the group need.
        by_position: dict[int, dict[ColumnPart, np.ndarray]] = {}
        for part in parts_for([topology.rank], topology.dp_rank, [topology.pp_rank]):
            by_position.setdefault(part.position, {})[part] = received[part]
        delivered: dict[int, Trajectory] = {}
        for position, own_arrays in by_position.items():
            delivered[position] = stages.trajectory(outlines[position], own_arrays)
        return Delivery(outlines, delivered, directory.forms, directory.positions)

    def _received(
        self,
        group: HostGroup,
        shares: Mapping[int, Share],
        directory: PartDirectory,
        arrays: Mapping[ColumnPart, np.ndarray],
    ) -> dict[ColumnPart, np.ndarray]:
        """Receive the arrays of this rank's ``group``. The group's head verifies the arrays. Collective.

        ``shares``: the layout of each group's buffer, by the group's head.
        """
        rank = self.topology.rank
        share = shares[group.head]
        is_head = rank == group.head
        shared_size = None
        if is_head and len(group.ranks) > 1:
            shared_size = share.size
        shared_buffer = _shared_buffer(shared_size)
        try:
            # Only heads receive; the other ranks map the memory of their head afterwards.
            buffer = np.empty(share.size if is_head else 0, np.uint8)
            if shared_buffer is not None:
                buffer = shared_buffer.array
            transfer(directory, shares, arrays, buffer, rank)
            views = directory.views(share, buffer) if is_head else {}
            own_faults = directory.altered(views, rank)
            if any_rank(bool(own_faults)):
                faults = chain.from_iterable(all_gather_json(own_faults))
                raise ExchangeError("\n".join(faults))
            paths = all_gather_json(None if shared_buffer is None else str(shared_buffer.path))
            if not is_head:
                views = directory.views(share, map_buffer(paths[group.head], share.size))
            # ``hide`` below unlinks the file, so all ranks of the group must have mapped it before.
            barrier()
        finally:
            if shared_buffer is not None:
                shared_buffer.hide()
        return views


def _shared_buffer(size: int | None) -> SharedBuffer | None:
    """Allocate the shared buffer of this rank's group; return None if ``size`` is None. Collective.

    Raises ExchangeError, on all ranks, if the memory is no longer free.
    """
    buffer = None
    own_fault = None
    if size is not None:
        try:
            buffer = SharedBuffer(size)
        except OSError as error:
            own_fault = str(error)
    first_fault = first_failure(own_fault)
    if first_fault is not None:
        if buffer is not None:
            buffer.hide()
        raise ExchangeError(f"the batch found no room in shared memory: {first_fault}")
    return buffer


def transfer(
    directory: PartDirectory,
    shares: Mapping[int, Share],
    arrays: Mapping[ColumnPart, np.ndarray],
    buffer: np.ndarray,
    rank: int,
) -> None:
    """Fill ``buffer`` with this rank's share, if this rank is the head of a group. Collective.

    The members are the ranks that send or receive, in a ring. In round ``distance``, each member sends to the member
    ``distance`` places after it and receives from the member ``distance`` places before it.

    Args:
        directory: the parts of the batch and their holders.
        shares: the layout of each host group's buffer, by the rank of the group's head.
        arrays: the arrays that this rank holds.
        buffer: uint8 [size of this rank's share].
        rank: this process's global rank.
    """
    if rank in shares:
        # Copy the parts that this rank holds itself.
        for part, (begin, end) in shares[rank].spans.items():
            if part in arrays:
                buffer[begin:end] = _bytes(arrays[part])
    sources = {min(holders) for holders in directory.holders.values()}
    members = sorted({*sources, *shares})
    if rank not in members:
        return
    index = members.index(rank)
    # Reuse one buffer for all sent pieces: allocating memory for each piece costs more than the copy.
    send_buffer = np.empty(0, np.uint8)

    def pieces_between(source: int, target: int) -> list[list[ColumnPart]]:
        """Return the pieces that ``source`` sends to ``target``."""
        if target not in shares:
            return []
        share = shares[target]
        parts = [part for part in share.spans if directory.source(part, target) == source]
        return list(share.pieces(parts, PIECE_BYTES))

    for distance in range(1, len(members)):
        target = members[(index + distance) % len(members)]
        source = members[(index - distance) % len(members)]
        sent_pieces = pieces_between(rank, target)
        received_pieces = pieces_between(source, rank)
        for sent_piece, received_piece in zip_longest(sent_pieces, received_pieces):
            sent = received = None
            if sent_piece is not None:
                begin, end = shares[target].extent(sent_piece)
                if len(send_buffer) < end - begin:
                    send_buffer = np.zeros(end - begin, np.uint8)
                sent = send_buffer[: end - begin]
                for part in sent_piece:
                    part_begin, part_end = shares[target].spans[part]
                    sent[part_begin - begin : part_end - begin] = _bytes(arrays[part])
            if received_piece is not None:
                begin, end = shares[rank].extent(received_piece)
                received = buffer[begin:end]
            _send_and_receive(sent, target, received, source)


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of ``array`` as uint8 [bytes]."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _send_and_receive(
    sent: np.ndarray | None, target: int, received: np.ndarray | None, source: int
) -> None:
    """Send the bytes ``sent`` to ``target`` while receiving bytes from ``source`` into ``received``."""
    device = platform.current().device
    operations = []
    if sent is not None:
        operations.append(dist.P2POp(dist.isend, torch.from_numpy(sent).to(device), target))
    if received is not None:
        host_tensor = torch.from_numpy(received)
        # NCCL receives only on the GPU. The bytes are copied from the GPU to the host afterwards.
        device_tensor = host_tensor
        if host_tensor.device != device:
            device_tensor = torch.empty_like(host_tensor, device=device)
        operations.append(dist.P2POp(dist.irecv, device_tensor, source))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    if received is not None and device_tensor is not host_tensor:
        host_tensor.copy_(device_tensor)
