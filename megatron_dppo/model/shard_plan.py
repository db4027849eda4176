"""The plan of a weight update in which every engine rank receives only the bytes that it keeps.

A slice is the intersection of a trainer rank's piece of a Hugging Face tensor (``gather_plan``) with an engine's block
of the tensor. The engine ranks that hold equal blocks, in one server or in several, form a column. A trainer rank packs
slices for one column into a message, and sends the message to the column's first rank. Each rank of the column sends
the message on to the next. Trainer ranks and engines compute the plan from the same facts, so only weights are sent.

A column visits each host once. If several ranks of a host hold equal blocks, they take turns: of n ranks, each receives
every n-th message through its network port, and the others from a rank of its host. So all ports of the host work.

If several trainer ranks hold a piece, they share its bytes: the slices of all pieces with the same holders are put in a
row, and the row is cut into equal parts, one for each holder. So a column receives from few senders, and each holder
sends equally much.

The messages have steps. In a step each rank sends at most one message within its host and one over the network, and
receives as many. A rank that handles its messages in the order of their steps never waits for itself.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from megatron_dppo.model import mapping, quantization
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.gather_plan import Piece, TensorSources, gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import Segment
from megatron_dppo.model.quantization import BLOCK, SCALE_SUFFIX
from megatron_dppo.model.resharding import check_tiling
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.model.splits import Dims
from megatron_dppo.system.garbage import paused_collection
from megatron_dppo.system.groups import consecutive_groups

Column = tuple[int, ...]
"""Engine ranks that hold equal blocks, in the order in which a message visits them. The ranks of all servers are
numbered in the order of the servers."""
MessageKey = tuple[int, int]
"""Sender and step of a message, which identify it."""
_CUT = 128
"""A slice that is too large for a message is cut at multiples of this number of indices."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of ``piece`` that lies in an engine's ``block``: the piece's indices ``start .. start + length``.

    If piece and block divide the tensor along different dimensions, the slice has the block's part of these indices.
    """

    piece: Piece
    block: Segment
    start: int
    length: int
    item_bytes: int

    @property
    def name(self) -> str:
        """Name of the tensor in a checkpoint."""
        return self.block.hf_name

    @property
    def is_crossed(self) -> bool:
        """Whether piece and block divide the tensor along different dimensions."""
        return self.piece.segment.dim != self.block.dim

    @property
    def shape(self) -> Dims:
        """Shape of the slice."""
        dims = list(self.piece.shape)
        dims[self.piece.segment.dim] = self.length
        if self.is_crossed:
            dims[self.block.dim] = self.block.length
        return tuple(dims)

    @property
    def bytes(self) -> int:
        """Size of the slice."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def block_part(self) -> Segment:
        """The slice as a segment of the block: ``hf_start`` counts from the block's first index."""
        segment = self.piece.segment
        start = segment.hf_start + self.start * segment.hf_step
        if not self.is_crossed:
            start -= self.block.hf_start
        return Segment(self.name, segment.dim, start, 0, self.length, segment.hf_step)

    def of_piece(self, tensor: mapping.T) -> mapping.T:
        """Return the slice's view of the piece's tensor."""
        view: mapping.T = tensor.narrow(self.piece.segment.dim, self.start, self.length)
        if self.is_crossed:
            crossed: mapping.T = view.narrow(self.block.dim, self.block.hf_start, self.block.length)
            return crossed
        return view

    def of_block(self, tensor: mapping.T) -> mapping.T:
        """Return the slice's view of the block's tensor."""
        return self.block_part.of_hf(tensor)


@dataclass(frozen=True, slots=True)
class Message:
    """Slices that trainer rank ``sender`` packs, one after another, for the ranks of ``column``.

    Rank number i of the column receives the message in step ``step`` + i.
    """

    sender: int
    column: Column
    slices: tuple[Slice, ...]
    bytes: int
    step: int = 0

    @property
    def key(self) -> MessageKey:
        return self.sender, self.step

    @property
    def item_bytes(self) -> int:
        """The size of the smallest items. The message has a whole number of such items."""
        return self.slices[-1].item_bytes


class Hop(NamedTuple):
    """The way of a message from one rank to the next.

    Attributes:
        steps: the number of steps after the message's own step.
        sender_kind: "trainer" or "engine".
        sender: the rank that sends.
        receiver: the engine rank that receives.
        is_local: whether both are engine ranks of one host.
    """

    steps: int
    sender_kind: str
    sender: int
    receiver: int
    is_local: bool


def hops_of(message: Message, hosts: Sequence[int]) -> Iterator[Hop]:
    """Yield the hops of a message. ``hosts``: the number of each engine rank's host."""
    yield Hop(0, "trainer", message.sender, message.column[0], is_local=False)
    for number, (sender, receiver) in enumerate(pairwise(message.column), start=1):
        yield Hop(number, "engine", sender, receiver, hosts[sender] == hosts[receiver])


@dataclass(frozen=True)
class ShardPlan:
    """All messages of an update, in the order of their steps.

    Attributes:
        messages: the messages.
        hosts: for each engine rank, the number of its host.
        kept: for each engine rank, the bytes of weights that it holds; an element that it holds twice counts once. No
            plan moves fewer bytes to the rank.
    """

    messages: tuple[Message, ...]
    hosts: tuple[int, ...]
    kept: tuple[int, ...]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The trainer ranks that take part in the update: those that send, and rank 0, which controls it."""
        return tuple(sorted({0, *(message.sender for message in self.messages)}))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all messages. Two plans with equal fingerprints send the same slices in the same order."""
        content = hashlib.sha256()
        for message in self.messages:
            line = f"{message.step} {message.sender} {message.column} {message.bytes}"
            for part in message.slices:
                block, piece = part.block, part.piece.segment
                line += f"\n{part.name} {block.dim} {block.hf_start} {block.length} {block.hf_step} {part.item_bytes}"
                line += f" {piece.dim} {piece.hf_start} {piece.hf_step} {part.start} {part.length}"
            content.update(line.encode())
        return content.hexdigest()

    @property
    def bound(self) -> int:
        """The fewest bytes that any plan moves into the engines."""
        return sum(self.kept)

    @property
    def sent(self) -> Counter[int]:
        """The bytes that each trainer rank sends, by rank."""
        sent = Counter[int]()
        for message in self.messages:
            sent[message.sender] += message.bytes
        return sent

    @property
    def received(self) -> Counter[int]:
        """The bytes that each engine rank receives, by rank."""
        received = Counter[int]()
        for message in self.messages:
            for rank in message.column:
                received[rank] += message.bytes
        return received

    @property
    def hops(self) -> Iterator[tuple[Message, Hop]]:
        """All hops of all messages."""
        for message in self.messages:
            for hop in hops_of(message, self.hosts):
                yield message, hop

    @property
    def connections(self) -> set[tuple[str, int, int]]:
        """The pairs of ranks that exchange messages: ("trainer" or "engine", sending rank, receiving rank)."""
        return {(hop.sender_kind, hop.sender, hop.receiver) for _, hop in self.hops}

    @property
    def step_bytes(self) -> list[int]:
        """The sizes of the steps' largest messages that enter a host, in the order of the steps."""
        largest = Counter[int]()
        for message, hop in self.hops:
            if not hop.is_local:
                step = message.step + hop.steps
                largest[step] = max(largest[step], message.bytes)
        return [largest[step] for step in sorted(largest)]


@paused_collection()
def shard_plan(
    shape: ModelShape,
    layout: Layout,
    servers: Sequence[EngineLayout],
    message_bytes: int,
    item_bytes: int,
    *,
    quantized: bool = False,
    hosts: Sequence[int] = (),
) -> ShardPlan:
    """Plan an update of ``servers`` in messages of at most ``message_bytes``. One index of a slice may be larger.

    Args:
        shape: The model.
        layout: The trainer's layout.
        servers: The layout of each server.
        message_bytes: Largest size of a message.
        item_bytes: Bytes of an element of the model's type.
        quantized: Whether linear layers and experts of the servers are block FP8.
        hosts: The number of each server's host. By default each server has a host of its own.
    """
    rank_hosts: list[int] = []
    for server, host in zip(servers, hosts or range(len(servers)), strict=True):
        rank_hosts += [host] * server.tensor
    engine_blocks = _engine_blocks(shape, servers, quantized=quantized)
    first_ranks = _first_ranks(servers)
    columns = _columns(first_ranks, engine_blocks)
    order = _engine_order(engine_blocks)
    # Servers of one layout keep the same, so the ranks of the first of them are counted.
    counted_ranks: set[int] = set()
    for server, (first_rank, *_) in first_ranks.items():
        counted_ranks.update(range(first_rank, first_rank + server.tensor))
    slices: dict[range, dict[Column, list[_Sized]]] = {}
    kept = Counter[int]()
    for tensor, tensor_item_bytes in _sent_tensors(shape, layout, item_bytes, quantized=quantized):
        blocks = columns[tensor.name]
        held = (
            (rank, block) for block, column in blocks for rank in counted_ranks.intersection(column)
        )
        for rank, elements in kept_elements(tensor.shape, held).items():
            kept[rank] += elements * tensor_item_bytes
        for block, column in blocks:
            for piece in tensor.pieces:
                for part, size in _intersection(piece, block, message_bytes, tensor_item_bytes):
                    by_column = slices.setdefault(piece.holders, {})
                    position = (order[block], part.block_part.hf_start)
                    by_column.setdefault(column, []).append(_Sized(position, size, part))
    by_pair: dict[tuple[int, Column], list[_Sized]] = {}
    for holders, by_column in slices.items():
        for sender, column, sized in _shared(holders, by_column, message_bytes):
            by_pair.setdefault((sender, column), []).append(sized)
    # The first messages of all pairs come before the second messages of all pairs.
    messages: list[tuple[int, Message]] = []
    for (sender, column), pair_slices in by_pair.items():
        pair_slices.sort(key=attrgetter("position"))
        groups = consecutive_groups(pair_slices, attrgetter("bytes"), message_bytes)
        for number, group in enumerate(groups):
            messages.append((number, _message(sender, column, group)))
    messages.sort(key=lambda entry: (entry[0], entry[1].sender, entry[1].column))
    turned = _with_turns((message for _, message in messages), rank_hosts)
    kept_by_rank: list[int] = []
    for server in servers:
        kept_by_rank += [kept[first_ranks[server][0] + rank] for rank in range(server.tensor)]
    return ShardPlan(tuple(_with_steps(turned, rank_hosts)), tuple(rank_hosts), tuple(kept_by_rank))


class _Sized(NamedTuple):
    """A slice, the position of its block in the engine and of the slice in the block, and its size."""

    position: tuple[int, int]
    bytes: int
    part: Slice


def _message(sender: int, column: Column, slices: list[_Sized]) -> Message:
    # Larger items come first, so that each slice begins at a multiple of its items' size.
    slices.sort(key=lambda sized: -sized.part.item_bytes)
    size = sum(sized.bytes for sized in slices)
    return Message(sender, column, tuple(sized.part for sized in slices), size)


def kept_elements(dims: Dims, held: Iterable[tuple[int, Segment]]) -> Counter[int]:
    """Count the different elements of a tensor of the shape ``dims`` that each engine rank holds.

    ``held``: (rank, block), in the order of the blocks' first indices. A rank may hold two blocks that overlap: the
    embedding of a tied model, and its output matrix.
    """
    elements = Counter[int]()
    ends = Counter[int]()
    for rank, block in held:
        new_indices = block.hf_end - max(block.hf_start, ends[rank])
        if new_indices > 0:
            elements[rank] += new_indices * math.prod(dims) // dims[block.dim]
            ends[rank] = block.hf_end
    return elements


EngineBlocks = Mapping[EngineLayout, list[list[Segment]]]
"""The blocks that each rank of a server holds, for each layout of servers."""


def _engine_blocks(
    shape: ModelShape, servers: Iterable[EngineLayout], *, quantized: bool
) -> EngineBlocks:
    """Return the blocks that each engine rank holds, in the order in which they lie in its tensors."""
    blocks: dict[EngineLayout, list[list[Segment]]] = {}
    for server in dict.fromkeys(servers):
        ranks = range(server.tensor)
        blocks[server] = [_rank_blocks(shape, server, rank, quantized=quantized) for rank in ranks]
    return blocks


def _rank_blocks(
    shape: ModelShape, server: EngineLayout, rank: int, *, quantized: bool
) -> list[Segment]:
    """Return the blocks of an engine rank, tensor by tensor, with 0 as their place in the rank's tensors."""
    by_tensor: dict[str, list[mapping.EngineParameter]] = {}
    for parameter in mapping.engine_parameters(shape, server, rank):
        # The name of an expert's parameter is the engine tensor's name, followed by the expert's number in brackets.
        by_tensor.setdefault(parameter.name.partition("[")[0], []).append(parameter)
    blocks: list[Segment] = []
    for parameter in chain.from_iterable(by_tensor.values()):
        segments = parameter.segments
        if quantized and quantization.holds_quantized(parameter):
            segments += quantization.scale_parameter(parameter).segments
        blocks += [replace(segment, local_start=0) for segment in segments]
    return blocks


def _first_ranks(servers: Iterable[EngineLayout]) -> Mapping[EngineLayout, list[int]]:
    """Return the number of each server's first rank, by the servers' layouts."""
    first_ranks: dict[EngineLayout, list[int]] = defaultdict(list)
    next_rank = 0
    for server in servers:
        first_ranks[server].append(next_rank)
        next_rank += server.tensor
    return first_ranks


def _columns(
    first_ranks: Mapping[EngineLayout, list[int]], engine_blocks: EngineBlocks
) -> Mapping[str, list[tuple[Segment, Column]]]:
    """Return the different blocks of each tensor that servers hold, each with the ranks that hold it.

    ``first_ranks``: the result of ``_first_ranks``.
    """
    holders: dict[Segment, list[int]] = {}
    """A block -> the ranks that hold it in the first server of each layout."""
    ranks_of: dict[int, list[int]] = {}
    """A rank of the first server of a layout -> the ranks in its place in all servers of this layout."""
    for server, server_starts in first_ranks.items():
        for rank, blocks in enumerate(engine_blocks[server]):
            ranks = [start + rank for start in server_starts]
            ranks_of[ranks[0]] = ranks
            for block in set(blocks):
                holders.setdefault(block, []).append(ranks[0])
    columns: dict[str, list[tuple[Segment, Column]]] = defaultdict(list)
    column_of: dict[tuple[int, ...], Column] = {}
    for block, block_holders in sorted(holders.items(), key=lambda entry: entry[0].hf_start):
        key = tuple(block_holders)
        if key not in column_of:
            column_of[key] = tuple(sorted(chain.from_iterable(ranks_of[rank] for rank in key)))
        columns[block.hf_name].append((block, column_of[key]))
    return columns


def _engine_order(engine_blocks: EngineBlocks) -> dict[Segment, int]:
    """Number the blocks of all engine ranks in the order in which they lie in the engines' tensors.

    So a message has neighbours in an engine tensor one after another, and one copy places them.
    """
    order: dict[Segment, int] = {}
    for blocks in chain.from_iterable(engine_blocks.values()):
        for block in blocks:
            order.setdefault(block, len(order))
    return order


def _sent_tensors(
    shape: ModelShape, layout: Layout, item_bytes: int, *, quantized: bool
) -> Iterator[tuple[TensorSources, int]]:
    """Yield the tensors that the engines receive, each with the size of its items."""
    for tensor in gather_plan(shape, layout):
        if quantized and quantization.is_quantized(tensor.name):
            yield tensor, 1
            yield scales_of(tensor), quantization.SCALE_BYTES
        else:
            yield tensor, item_bytes if tensor.dtype is None else ITEM_BYTES[tensor.dtype]


def scales_of(tensor: TensorSources) -> TensorSources:
    """Return the block-FP8 scales of ``tensor``, in the pieces of ``scale_piece``."""
    pieces = [scale_piece(tensor.name, piece) for piece in tensor.pieces]
    return TensorSources(
        tensor.name + SCALE_SUFFIX,
        quantization.scale_dims(tensor.shape),
        tuple(piece for piece in pieces if piece is not None),
        "float32",
    )


def scale_piece(name: str, piece: Piece) -> Piece | None:
    """Return the scales of the blocks whose first elements are in ``piece``, a piece of the tensor ``name``.

    The result has the name of the piece's parameter with SCALE_SUFFIX. It is a segment of all scales of the piece's
    blocks, also of blocks that begin in another piece. It is None if no block begins in the piece.
    """
    segment = piece.segment
    first_block = segment.hf_start // BLOCK
    first_own_block = -(-segment.hf_start // BLOCK)
    end_block = -(-segment.hf_end // BLOCK)
    if first_own_block == end_block:
        return None
    dims = list(quantization.scale_dims(piece.shape))
    dims[segment.dim] = end_block - first_block
    scales = Segment(
        name + SCALE_SUFFIX,
        segment.dim,
        first_own_block,
        first_own_block - first_block,
        end_block - first_own_block,
    )
    return replace(piece, name=piece.name + SCALE_SUFFIX, local_shape=tuple(dims), segment=scales)


def _intersection(
    piece: Piece, block: Segment, message_bytes: int, item_bytes: int
) -> Iterator[tuple[Slice, int]]:
    """Yield the slices of ``piece`` that fill a part of ``block``, each with its size.

    A slice has at most ``message_bytes`` if possible.
    """
    segment = piece.segment
    start = 0
    length = segment.length
    if segment.dim == block.dim:
        start, length = segment.within(block.hf_start, block.length)
    if length < 1:
        return
    whole = Slice(piece, block, start, length, item_bytes)
    index_bytes = whole.bytes // length
    step = max(message_bytes // index_bytes // _CUT, 1) * _CUT
    if step >= length:
        yield whole, index_bytes * length
        return
    for offset in range(0, length, step):
        part_length = min(step, length - offset)
        part = replace(whole, start=start + offset, length=part_length)
        yield part, index_bytes * part_length


def _shared(
    holders: range, by_column: Mapping[Column, Iterable[_Sized]], message_bytes: int
) -> Iterator[tuple[int, Column, _Sized]]:
    """Yield each slice with its sender, one of ``holders``, and its column."""
    row = [(column, sized) for column in sorted(by_column) for sized in by_column[column]]
    total = sum(sized.bytes for _, sized in row)
    # Do not cut less than the bytes of a message into several messages.
    count = min(len(holders), -(-total // message_bytes))
    end = 0
    for column, sized in row:
        middle = end + sized.bytes // 2
        end += sized.bytes
        yield holders[middle * count // total], column, sized


def _with_turns(messages: Iterable[Message], hosts: Sequence[int]) -> Iterator[Message]:
    """Order the ranks of each message's column by hosts. In every host, another rank comes first with each message."""
    turns = Counter[Column]()
    for message in messages:
        by_host: dict[int, list[int]] = {}
        for rank in message.column:
            by_host.setdefault(hosts[rank], []).append(rank)
        column: list[int] = []
        for ranks in by_host.values():
            first = turns[message.column] % len(ranks)
            column += ranks[first:] + ranks[:first]
        turns[message.column] += 1
        yield replace(message, column=tuple(column))


def _with_steps(messages: Iterable[Message], hosts: Sequence[int]) -> list[Message]:
    """Give each message the first step in which its ranks are free, and return the messages in the order of steps."""
    # Bit t of a number is 1 if the rank sends, or receives, in step t. Key: the rank, and whether the hop is local.
    sends: dict[tuple[str, int, bool], int] = defaultdict(int)
    receives: dict[tuple[int, bool], int] = defaultdict(int)
    planned: list[Message] = []
    for message in messages:
        hops = list(hops_of(message, hosts))
        taken = 0
        for hop in hops:
            taken |= sends[hop.sender_kind, hop.sender, hop.is_local] >> hop.steps
            taken |= receives[hop.receiver, hop.is_local] >> hop.steps
        # The position of the lowest bit that is 0.
        step = (~taken & (taken + 1)).bit_length() - 1
        for hop in hops:
            sends[hop.sender_kind, hop.sender, hop.is_local] |= 1 << (step + hop.steps)
            receives[hop.receiver, hop.is_local] |= 1 << (step + hop.steps)
        planned.append(replace(message, step=step))
    planned.sort(key=lambda message: message.step)
    return planned


def prove_shards(
    plan: ShardPlan,
    shape: ModelShape,
    layout: Layout,
    servers: Sequence[EngineLayout],
    *,
    quantized: bool = False,
) -> None:
    """Check that every element of every engine tensor arrives exactly once, from a rank that holds it. Raises
    ProofError.

    Also check that each rank sends and receives at most one message in a step, locally and over the network.
    ``megatron_dppo.model.resharding`` proves that the pieces and the engine's blocks tile the tensors.
    """
    arrived: dict[Segment, dict[Column, list[Segment]]] = defaultdict(dict)
    steps = Counter[tuple[str, int, int, bool]]()
    for message, hop in plan.hops:
        step = message.step + hop.steps
        steps[f"{hop.sender_kind} sends", hop.sender, step, hop.is_local] += 1
        steps["engine receives", hop.receiver, step, hop.is_local] += 1
    for message in plan.messages:
        ranks = tuple(sorted(message.column))
        for part in message.slices:
            _check_slice(part, message.sender)
            arrived[part.block].setdefault(ranks, []).append(part.block_part)
    for (action, rank, step, _), count in steps.items():
        if count > 1:
            raise ProofError(f"{action}: rank {rank} has {count} messages in step {step}")
    dims_of = mapping.hf_tensors(shape)
    if quantized:
        dims_of = quantization.stored_tensors(dims_of)
    engine_blocks = _engine_blocks(shape, servers, quantized=quantized)
    for name, columns in _columns(_first_ranks(servers), engine_blocks).items():
        for block, ranks in columns:
            location = f"{name} from index {block.hf_start} of dim {block.dim}"
            parts_by_column = arrived.pop(block, {})
            served = Counter(rank for column in parts_by_column for rank in column)
            if served != Counter(ranks):
                raise ProofError(
                    f"{location}: engine ranks {sorted(served.elements())} receive it, expected {sorted(ranks)}"
                )
            dims = list(dims_of[name])
            dims[block.dim] = block.length
            for parts in parts_by_column.values():
                check_tiling(location, tuple(dims), parts)
    for block in arrived:
        raise ProofError(f"{block.hf_name} arrives, and no engine rank keeps it")


def _check_slice(part: Slice, sender: int) -> None:
    """Check that ``sender`` holds the slice."""
    piece = part.piece
    if sender not in piece.holders:
        raise ProofError(f"{part.name}: trainer rank {sender} sends a slice of rank {piece.rank}")
    if part.start < 0 or part.start + part.length > piece.segment.length:
        raise ProofError(
            f"{part.name}: indices {part.start} to {part.start + part.length} are sent of a piece of "
            f"{piece.segment.length}"
        )
