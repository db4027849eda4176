"""Updates in which every engine rank receives only the bytes that it keeps (``model/shard_plan.py``).

A trainer rank packs the slices of a message into a buffer by one call. No rank has a whole tensor. The hash of an
engine tensor is a sum, so each trainer rank hashes the slices that it sends, and rank 0 adds the sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.mapping import Segment
from megatron_dppo.model.quantization import SCALE_SUFFIX, is_quantized
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.shard_plan import Message, Slice
from megatron_dppo.tensor_hash import Place, TiledHash, add_placed
from megatron_dppo.weights.checksums import EnginePart, EngineTensors, IncompleteWeightsError
from megatron_dppo.weights.engines import Digests, Engines, foreign_host
from megatron_dppo.weights.phases import Phases
from megatron_dppo.weights.piece_scales import AllMax, PieceScales, Values
from megatron_dppo.weights.sent_weights import SentWeights
from megatron_dppo.weights.server.shards import WHOLE, PlanFacts, slices_in
from megatron_dppo.weights.source import WeightSource
from megatron_dppo.weights.strategy import Strategy, Streamed

Allocate = Callable[[int, torch.device], Tensor]
"""Returns memory for a number of bytes on a device."""


def empty_bytes(size: int, device: torch.device) -> Tensor:
    """Allocate ``size`` bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


class ServerFacts(NamedTuple):
    """What every trainer rank must know of the servers.

    Attributes:
        urls: the address of each server.
        layouts: the layout of each server.
        device: the servers' device, "cpu" or "cuda".
        quantized: whether linear layers and experts are block FP8.
    """

    urls: list[str]
    layouts: list[EngineLayout]
    device: str
    quantized: bool

    @classmethod
    def of(cls, engines: Engines) -> ServerFacts:
        """Return the facts of ``engines``. Raises EngineMismatchError for a server that cannot receive shards."""
        for engine in engines.members:
            if not engine.places_directly:
                raise EngineMismatchError(
                    f"{engine.url} loads updates by SGLang's own loader, which needs whole tensors; expected a server "
                    "that was started by megatron_dppo.engine.launch_server (its log says why if its tensors cannot be "
                    "placed directly), or weight_sync.strategy disk"
                )
        first = engines.first
        return cls(
            [engine.url for engine in engines.members],
            [engine.tensors.layout for engine in engines.members],
            first.device,
            first.tensors.quantized,
        )

    def to_json(self) -> list[Any]:
        return [self.urls, [asdict(layout) for layout in self.layouts], *self[2:]]

    @classmethod
    def of_json(cls, value: list[Any]) -> ServerFacts:
        urls, layouts, device, quantized = value
        return cls(urls, [EngineLayout(**layout) for layout in layouts], device, quantized)

    def host_numbers(self) -> tuple[int, ...]:
        """Number the hosts in the servers' URLs, and return the number of each server's host."""
        names = [urlsplit(url).hostname for url in self.urls]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return tuple(numbers[name] for name in names)

    def hosts_of_ranks(self) -> list[str | None]:
        """Return the host of each engine rank's server, its first one; None for this process's host."""
        hosts: list[str | None] = []
        for url, layout in zip(self.urls, self.layouts, strict=True):
            hosts += [foreign_host(url)] * layout.tensor
        return hosts


class Shards:
    """The messages that one trainer rank sends in an update: packed, hashed, and their checksums combined.

    Attributes:
        plan: the plan.
        facts: the facts that the engines compute the plan from.
        messages: the messages that this rank sends, in the order of their steps.
        batches: the messages, in batches that are packed and sent at the same time; see ``batches_of``.
    """

    def __init__(
        self,
        shape: ModelShape,
        facts: PlanFacts,
        device: str,
        rank: int,
        batch_bytes: int | None = None,
    ) -> None:
        self.plan = facts.plan(shape)
        self.facts = facts
        self.messages = [message for message in self.plan.messages if message.sender == rank]
        self.dtype: torch.dtype = getattr(torch, facts.dtype)
        self.use_batches(batches_of(self.messages, batch_bytes))
        self._tables: dict[EngineLayout, EngineTensors] = {}
        self._servers: list[tuple[EngineLayout, int]] = []
        """For each engine rank of the plan, its server's layout and its rank in the server."""
        for layout in facts.servers:
            if layout not in self._tables:
                self._tables[layout] = EngineTensors(
                    shape, layout, device, quantized=facts.quantized
                )
            self._servers += [(layout, engine_rank) for engine_rank in range(layout.tensor)]
        self.device = device
        self._runs: dict[int, list[_HashedRun]] = {}
        self._scales: PieceScales | None = None
        if facts.quantized:
            slices = chain.from_iterable(message.slices for message in self.messages)
            self._scales = PieceScales(shape, facts.layout, slices, device)

    def use_batches(self, batches: Sequence[Sequence[Message]]) -> None:
        """Send the messages in these batches. A batch may have no message."""
        self.batches = batches
        self._buffers = TwoBuffers(max(map(bytes_of, batches), default=0))
        self._targets: dict[tuple[int, int], list[Tensor]] = {}
        """The views of a buffer that a message's slices fill, by the ids of the message and of the buffer."""

    @property
    def table(self) -> EngineTensors:
        return self._tables[self.facts.servers[0]]

    @cached_property
    def whole_bytes(self) -> int:
        """The bytes of all weights in the form that engines receive."""
        size = 0
        for name, dims in self.table.shapes.items():
            size += math.prod(dims) * self.dtype_of(name).itemsize
        return size

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is sent."""
        return self.table.sent_dtype(name, self.dtype)

    def prepare(self, values: Values, all_max: AllMax) -> None:
        """Prepare an update with ``values``: compute the scales of block FP8. Collective.

        A rank that could not read its values passes none, and only takes part in the collective.
        """
        if self._scales is not None:
            self._scales.compute(values, all_max)

    def pack(
        self, batch: Sequence[Message], values: Values, allocate: Allocate = empty_bytes
    ) -> list[Tensor]:
        """Return the flat bytes of each message of a batch, in one of two buffers of ``allocate``.

        The result stays valid until the second call after this one for a batch with messages.
        """
        if not batch:
            return []
        buffer = self._buffers.next(allocate, next(iter(values.values())).device)
        packed = divided(buffer, batch)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for message, data in zip(batch, packed, strict=True):
            key = (id(message), id(buffer))
            if key not in self._targets:
                self._targets[key] = [v for _, v in slices_in(message, data, self.dtype_of)]
            targets += self._targets[key]
            sources += [self._value_of(part, values) for part in message.slices]
        torch._foreach_copy_(targets, sources)
        return packed

    def release_memory(self) -> None:
        """Free the buffers' memory until the next call of ``pack``; see ``TwoBuffers.release_memory``."""
        self._buffers.release_memory()

    def forget_buffers(self) -> None:
        """Drop the buffers. The next call of ``pack`` allocates new ones."""
        self._buffers.forget()
        self._targets.clear()

    def _value_of(self, part: Slice, values: Values) -> Tensor:
        """Return the slice of a trainer rank's tensor, or its quantised values or scales."""
        if self._scales is not None and is_quantized(part.name.removesuffix(SCALE_SUFFIX)):
            return self._scales.value_of(part, values)
        piece = part.piece
        return part.of_piece(piece.segment.of_local(values[piece.key].detach()))

    def checksums(self) -> ShardChecksums:
        """Return new checksums of what this rank sends."""
        return ShardChecksums(self._tables, self._hashed_runs, self.dtype)

    def _hashed_runs(self, message: Message) -> Sequence[_HashedRun]:
        """Return what is hashed of a message. The result is computed once for each message."""
        runs = self._runs.get(id(message))
        if runs is None:
            runs = self._find_hashed_runs(message)
            self._runs[id(message)] = runs
        return runs

    def _find_hashed_runs(self, message: Message) -> list[_HashedRun]:
        # Servers of one layout hold the same bytes.
        column = dict.fromkeys(self._servers[rank] for rank in message.column)
        runs: list[_HashedRun] = []
        last_runs: dict[tuple[EngineLayout, int, str], int] = {}
        start = 0
        for part in message.slices:
            sent_dtype = self.dtype_of(part.name)
            for layout, rank in column:
                table = self._tables[layout]
                for place in self._own_places[layout, rank, part.block]:
                    key = (layout, rank, place.tensor)
                    held_dtype = table.dtype_of(place.tensor, self.dtype)
                    where = _in_bytes(part.of_block(_view_of(table, place)[0]), held_dtype.itemsize)
                    is_plain = sent_dtype == held_dtype and not place.adds_one
                    if is_plain and isinstance(where, int):
                        number = last_runs.get(key)
                        if number is not None and runs[number].is_followed_by(start, where):
                            runs[number] = runs[number].longer(part.bytes)
                            continue
                        last_runs[key] = len(runs)
                        runs.append(_HashedRun(key, start, part.bytes, where))
                    else:
                        form = _HeldForm(
                            sent_dtype, held_dtype, part.shape, adds_one=place.adds_one
                        )
                        runs.append(_HashedRun(key, start, part.bytes, where, form))
            start += part.bytes
        return runs

    @cached_property
    def _own_places(self) -> Places:
        """The places of the blocks that this rank sends slices of, for each server layout."""
        sent = {part.block for message in self.messages for part in message.slices}
        places: Places = defaultdict(list)
        for layout, table in self._tables.items():
            for name in {block.hf_name for block in sent}:
                for part in table.parts[name]:
                    block = replace(part.block, local_start=0)
                    if block in sent:
                        places[layout, part.rank, block].append(part)
        return places

    def digests(self, partials: Sequence[Sequence[Any]]) -> Digests:
        """Combine the partial checksums of all ranks into the checksum of every engine tensor, by layout and device.

        Raises IncompleteWeightsError that names an engine tensor of which elements were not sent, or sent twice.
        """
        digests: dict[tuple[EngineLayout, str], Sequence[Mapping[str, str]]] = {}
        for number, (layout, table) in enumerate(self._tables.items()):
            states = [partial for rank_partials in partials for partial in rank_partials[number]]
            digests[layout, self.device] = _digests(table, states, self.dtype)
        return digests


def batches_of(messages: Iterable[Message], batch_bytes: int | None) -> list[list[Message]]:
    """Divide messages into batches of at most ``batch_bytes``, in their order. A larger message is a batch.

    ``batch_bytes`` None: each message is a batch.
    """
    batches: list[list[Message]] = []
    for message in messages:
        fits = False
        if batches and batch_bytes is not None:
            fits = bytes_of([*batches[-1], message]) <= batch_bytes
        if fits:
            batches[-1].append(message)
        else:
            batches.append([message])
    return batches


class TwoBuffers:
    """Two buffers of ``size`` bytes that are filled in turn: one can be read while the other one is filled."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: list[Tensor] = []

    def next(self, allocate: Allocate, device: torch.device) -> Tensor:
        """Return the buffer that was returned before the last one."""
        self._buffers.reverse()
        if len(self._buffers) < 2:
            self._buffers.insert(0, allocate(self._size, device))
        buffer = self._buffers[0]
        if not buffer.untyped_storage().nbytes():
            buffer.untyped_storage().resize_(self._size)
        return buffer

    def release_memory(self) -> None:
        """Free the memory until the buffers are returned again, under the same views.

        Memory that is shared as a file stays.
        """
        for buffer in self._buffers:
            storage = buffer.untyped_storage()
            is_file = not storage.is_cuda and storage.is_shared()
            if not is_file:
                storage.resize_(0)

    def forget(self) -> None:
        """Drop the buffers. The next ones are new."""
        self._buffers.clear()


def divided(buffer: Tensor, batch: Iterable[Message]) -> list[Tensor]:
    """Return the part of a batch's memory that each message has."""
    parts: list[Tensor] = []
    start = 0
    for message in batch:
        parts.append(buffer[start : start + message.bytes])
        start += _aligned(message.bytes)
    return parts


_ALIGNMENT = 16
"""Bytes at whose multiples a message begins in the memory of its batch."""


def _aligned(size: int) -> int:
    """Return the next multiple of _ALIGNMENT."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def bytes_of(batch: Iterable[Message]) -> int:
    """Return the bytes of a batch's memory."""
    return sum(_aligned(message.bytes) for message in batch)


Places = dict[tuple[EngineLayout, int, Segment], list[EnginePart]]
"""The places of a block in the tensors of an engine rank: (server layout, rank in the server, block) -> places."""


class _HeldForm(NamedTuple):
    """How an engine holds sent values in another form: their dtypes, their shape, and whether the engine adds 1."""

    sent_dtype: torch.dtype
    held_dtype: torch.dtype
    shape: tuple[int, ...]
    adds_one: bool

    def of(self, data: Tensor) -> Tensor:
        """Return the values that the engine holds, from the sent bytes."""
        values = data.view(self.sent_dtype).view(self.shape).to(self.held_dtype)
        return values + 1 if self.adds_one else values


class _HashedRun(NamedTuple):
    """A run of a message's bytes that is hashed as a part of an engine tensor.

    Attributes:
        key: the server layout, the rank in the server, and the tensor's name.
        start: the run's first byte in the message.
        bytes: the run's size.
        place: where the values lie in the engine tensor.
        form: how the engine holds the values; None: it holds the sent bytes, at one run of bytes.
    """

    key: tuple[EngineLayout, int, str]
    start: int
    bytes: int
    place: Place
    form: _HeldForm | None = None

    def is_followed_by(self, start: int, place: int) -> bool:
        """Return whether a run that begins at ``start``, and at byte ``place`` of the same tensor, follows this one."""
        is_next = self.start + self.bytes == start
        return is_next and isinstance(self.place, int) and self.place + self.bytes == place

    def longer(self, size: int) -> _HashedRun:
        return self._replace(bytes=self.bytes + size)


class ShardChecksums:
    """Partial checksums of the engine tensors that one trainer rank sends slices of."""

    def __init__(
        self,
        tables: Mapping[EngineLayout, EngineTensors],
        runs_of: Callable[[Message], Sequence[_HashedRun]],
        dtype: torch.dtype,
    ) -> None:
        self._tables = tables
        self._runs_of = runs_of
        self._dtype = dtype
        self._hashes: dict[tuple[EngineLayout, int, str], TiledHash] = {}
        self._bytes: dict[tuple[EngineLayout, int, str], int] = defaultdict(int)
        self._unfinished: list[Callable[[], None]] = []

    def add(self, batch: Sequence[Message], data: Sequence[Tensor]) -> None:
        """Start to hash the flat bytes of each message of a batch, as the engine ranks of its column hold them."""
        placed: list[tuple[TiledHash, Tensor, Place]] = []
        for message, message_bytes in zip(batch, data, strict=True):
            for run in self._runs_of(message):
                tensor_hash = self._hashes.get(run.key)
                if tensor_hash is None:
                    layout, rank, name = run.key
                    tensor_hash = _new_hash(self._tables[layout], rank, name, self._dtype)
                    self._hashes[run.key] = tensor_hash
                held = message_bytes[run.start : run.start + run.bytes]
                if run.form is not None:
                    held = run.form.of(held)
                placed.append((tensor_hash, held, run.place))
                self._bytes[run.key] += held.nbytes
        self._unfinished.append(add_placed(placed))

    def partials(self) -> list[Any]:
        """Return, for each server layout, a list of (rank, tensor, bytes, sums), as JSON."""
        for finish in self._unfinished:
            finish()
        self._unfinished.clear()
        partials: dict[EngineLayout, list[Any]] = {layout: [] for layout in self._tables}
        for key, tensor_hash in self._hashes.items():
            layout, rank, name = key
            partials[layout].append([rank, name, self._bytes[key], tensor_hash.state()])
        return list(partials.values())


def _in_bytes(view: Tensor, item_bytes: int) -> Place:
    """Return the first byte of a view of a vector if the view is one run of elements, else the view."""
    if view.is_contiguous():
        return int(view.storage_offset()) * item_bytes
    return view


def _new_hash(table: EngineTensors, rank: int, tensor: str, dtype: torch.dtype) -> TiledHash:
    return TiledHash(table.sizes[rank][tensor] * table.dtype_of(tensor, dtype).itemsize)


def _view_of(table: EngineTensors, place: EnginePart) -> tuple[Tensor, Tensor | None]:
    """Return where a block, and its padding, lie in the vector of an engine tensor: views on the device "meta"."""
    return place.views(
        table.shapes[place.block.hf_name], _vector(table.sizes[place.rank][place.tensor])
    )


def _vector(size: int) -> Tensor:
    return torch.empty(size, device="meta")


def _digests(
    table: EngineTensors, states: Iterable[tuple[int, str, int, Any]], dtype: torch.dtype
) -> list[dict[str, str]]:
    """Return the checksum of every tensor, for each rank of a server."""
    hashes: list[dict[str, TiledHash]] = []
    missing: list[dict[str, int]] = []
    for rank, sizes in enumerate(table.sizes):
        hashes.append({name: _new_hash(table, rank, name, dtype) for name in sizes})
        missing.append(
            {name: size * table.dtype_of(name, dtype).itemsize for name, size in sizes.items()}
        )
    for rank, name, size, state in states:
        hashes[rank][name].merge(state)
        missing[rank][name] -= size
    filled = {(part.rank, part.tensor) for parts in table.parts.values() for part in parts}
    for parts in table.parts.values():
        for place in parts:
            if place.width == place.block.length:
                continue
            _, padding = _view_of(table, place)
            if padding is not None:
                zeros = _add_zeros(hashes[place.rank][place.tensor], padding, table, place, dtype)
                missing[place.rank][place.tensor] -= zeros
    for rank, rank_hashes in enumerate(hashes):
        for name, tensor_hash in rank_hashes.items():
            if (rank, name) not in filled:
                # The whole tensor is padding.
                tensor_hash.add(torch.zeros(missing[rank][name], dtype=torch.uint8), 0)
            elif missing[rank][name]:
                size = missing[rank][name]
                fault = "were not sent" if size > 0 else "were sent twice"
                raise IncompleteWeightsError(
                    f"weight update: {abs(size)} bytes of {name} on engine rank {rank} {fault}"
                )
    return [{name: h.hexdigest() for name, h in by_name.items()} for by_name in hashes]


def _add_zeros(
    tensor_hash: TiledHash,
    view: Tensor,
    table: EngineTensors,
    place: EnginePart,
    dtype: torch.dtype,
) -> int:
    """Hash the zeros at ``view`` of an engine tensor. Returns their number of bytes."""
    zeros = torch.zeros(view.shape, dtype=table.dtype_of(place.tensor, dtype))
    add_placed([(tensor_hash, zeros, _in_bytes(view, zeros.element_size()))])()
    return zeros.nbytes


class Sent(NamedTuple):
    """A message as it is sent: its flat bytes, or their changes since the last update (``weights/changes.py``).

    Attributes:
        message: the message.
        data: the bytes to send.
        changed: the number of changes; WHOLE if ``data`` is the whole message.
    """

    message: Message
    data: Tensor
    changed: int


class ShardStrategy(Strategy):
    """Sends the messages of a plan from one trainer rank. A subclass brings them to the engine ranks of their columns.

    ``weight_sync.timeout_s`` bounds the whole transfer of an update.

    Attributes:
        allocate: allocates the memory of messages.
        sent_weights: the bytes that this rank sent last; None if every update sends all weights.
        planned: this rank's messages; None before ``plan``.
    """

    allocate: Allocate = staticmethod(empty_bytes)

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self.sent_weights = SentWeights() if config.changes_only else None
        self.planned: Shards | None = None
        self._servers: ServerFacts | None = None
        self._hosts: list[str | None] = []

    def attach(self, engines: Engines) -> None:
        self._servers = ServerFacts.of(engines)
        super().attach(engines)

    def plan(self, source: WeightSource) -> None:
        own_facts = None if self._servers is None else self._servers.to_json()
        self._servers = ServerFacts.of_json(source.all_gather(own_facts)[0])
        self._hosts = self._servers.hosts_of_ranks()
        hosts = self._servers.host_numbers()
        largest_server = max(layout.tensor for layout in self._servers.layouts)
        facts = PlanFacts(
            source.layout,
            tuple(self._servers.layouts),
            self.config.message_bytes(largest_server, len(set(hosts))),
            source.dtype_name,
            self._servers.quantized,
            hosts,
        )
        if self.planned is None or self.planned.facts != facts:
            self.planned = Shards(
                source.shape, facts, self._servers.device, self.rank, self.batch_bytes
            )
            if self.sent_weights is not None:
                # The kept bytes are of messages of another plan.
                self.sent_weights = SentWeights()

    @property
    def batch_bytes(self) -> int | None:
        """The largest size of a batch; None: each message is a batch."""
        return None

    def hops_between_nodes(self, hosts: Sequence[str | None]) -> int:
        """Return how often a message of this rank enters a host. ``hosts``: those of its column; None: this host."""
        return sum(host != before for before, host in pairwise([None, *hosts]))

    def send(self, batch: Sequence[Sent]) -> None:
        """Wait until this rank's previous batch has arrived, then start to send this one.

        The caller may change the bytes after the next call.
        """
        raise NotImplementedError

    @property
    def shards(self) -> Shards:
        """The messages of this rank to the attached engines."""
        assert self.planned is not None
        return self.planned

    @property
    def servers(self) -> ServerFacts:
        """The attached servers."""
        assert self._servers is not None
        return self._servers

    @property
    def foreign_hosts(self) -> list[str]:
        if not self.shards.messages:
            return []
        return list(dict.fromkeys(host for host in self._hosts if host is not None))

    @property
    def whole_bytes(self) -> int:
        return self.shards.whole_bytes

    @property
    def fewest_bytes(self) -> int:
        return self.shards.plan.bound

    @property
    def busiest_over_mean(self) -> tuple[float, float]:
        plan = self.shards.plan
        trainer_ranks = self.shards.facts.layout.world_size
        return (
            max(plan.sent.values()) * trainer_ranks / plan.sent.total(),
            max(plan.received.values()) * len(plan.kept) / plan.received.total(),
        )

    def digests(self, partials: Sequence[list[Any]]) -> Digests:
        return self.shards.digests(partials)

    def stream(
        self, source: WeightSource, phases: Phases, *, verify: bool, sends_changes: bool
    ) -> Streamed:
        shards = self.shards
        checksums = shards.checksums() if verify else None
        if self.sent_weights is not None:
            self.sent_weights.begin(is_base=sends_changes)
        values = phases.run("gather", source.values)
        with phases.timed("gather"):
            # After a failure too: the other ranks wait in this collective.
            shards.prepare(values or {}, source.all_max)
        if values is None:
            self.abort()
            return Streamed(0, 0, 0, None)
        sent = forwarded = between_nodes = 0
        for batch in shards.batches:
            data = phases.run("gather", shards.pack, batch, values, self.allocate)
            if data is None:
                break
            for message, sent_data, _ in phases.run("transfer", self._send, batch, data) or ():
                size = sent_data.numel()
                sent += size
                forwarded += size * (len(message.column) - 1)
                hosts = [self._hosts[rank] for rank in message.column]
                between_nodes += size * self.hops_between_nodes(hosts)
            if checksums is not None and batch:
                phases.run("hash", checksums.add, batch, data)
            if phases.error is not None:
                break
        if phases.error is not None:
            self.abort()
            return Streamed(sent, forwarded, between_nodes, None)
        partials = checksums.partials() if checksums is not None else None
        return Streamed(sent, forwarded, between_nodes, partials)

    def _send(self, batch: Sequence[Message], data: Sequence[Tensor]) -> list[Sent]:
        """Start to send a batch with these flat bytes. Returns the messages as they are sent."""
        sent_batch = list(map(self._as_sent, batch, data))
        self.send(sent_batch)
        return sent_batch

    def _as_sent(self, message: Message, data: Tensor) -> Sent:
        changes = None
        if self.sent_weights is not None:
            changes = self.sent_weights.changes(data, message.item_bytes)
        if changes is None:
            return Sent(message, data, WHOLE)
        pieces = changes.pieces()
        changed = self.allocate(sum(piece.numel() for piece in pieces), data.device)
        return Sent(message, torch.cat(pieces, out=changed), changes.count)

    def arrive(self) -> None:
        self.wait_for_all()
        # Until the next update, the memory belongs to training. Handles of CUDA IPC also stay as long as the memory.
        self.shards.release_memory()

    def wait_for_all(self) -> None:
        """Wait until the engines have received this rank's messages; on rank 0, all messages."""
        raise NotImplementedError

    def end(self) -> None:
        self.attached.each(lambda engine: engine.end())

    def close(self) -> None:
        super().close()
        self._servers = None
