"""The engine's side of an update in which every engine rank receives only what it keeps (``model/shard_plan.py``).

A request has the facts of the plan and the plan's fingerprint. Each engine rank computes the plan from the facts, and
compares the fingerprint. It copies each message to its places by one call.

With ``distributed`` a server gets one request for a whole update (``IncomingShards``). An engine rank receives its
messages in the order of their steps, and sends those of longer columns on. While a message is copied, the next message
is on its way. A message of changes (``weights/changes.py``) follows a message of 8 bytes with the number of changes.

With ``tensor`` a request has messages for each engine rank, in shared memory (``SharedMessage``).

The part for NCCL is not yet run on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from megatron_dppo.checkpoint_conversion.gathering import Buffers
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import Segment
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.model.shard_plan import Message, MessageKey, ShardPlan, Slice, shard_plan
from megatron_dppo.weights.changes import (
    Changes,
    apply_changes,
    changes_bytes,
    item_dtype,
    kept_changes,
)
from megatron_dppo.weights.checksums import EngineTensors
from megatron_dppo.weights.links import BUSY_CONNECT_S, Link, connect_store
from megatron_dppo.weights.server.weight_groups import limit_of

WHOLE = -1
"""Sent in place of the number of changes of a message that is sent whole."""
Blocks = Mapping[Segment, Sequence[tuple[Tensor, bool]]]
"""The places of each block on an engine rank: a view with the block's shape, and whether it holds 1 + the block."""
DtypeOf = Callable[[str], torch.dtype]
"""Returns the dtype in which a tensor of a checkpoint is sent."""


class OtherPlanError(EngineError, ValueError):
    """Trainer and engine have different plans, or the engine rank has no place in the plan."""

    attempts = 1


@dataclass(frozen=True)
class PlanFacts:
    """What trainer and engines compute the plan of an update from, in addition to the model.

    Attributes:
        layout: the trainer's layout.
        servers: the layout of each server.
        message_bytes: the largest size of a message.
        dtype: the dtype of the weights, a key of ITEM_BYTES.
        quantized: whether linear layers and experts of the servers are block FP8.
        hosts: the number of each server's host. By default each server has a host of its own.
    """

    layout: Layout
    servers: tuple[EngineLayout, ...]
    message_bytes: int
    dtype: str
    quantized: bool
    hosts: tuple[int, ...] = ()

    def plan(self, shape: ModelShape) -> ShardPlan:
        return shard_plan(
            shape,
            self.layout,
            self.servers,
            self.message_bytes,
            ITEM_BYTES[self.dtype],
            quantized=self.quantized,
            hosts=self.hosts,
        )


@dataclass(frozen=True)
class Instruction:
    """The request to receive an update.

    Attributes:
        facts: the facts of the plan.
        fingerprint: the fingerprint of the trainer's plan.
        address: host of the group's rendezvous.
        port: port of the rendezvous.
        has_changes: whether a number precedes each message: how many changes it has, or WHOLE.
    """

    facts: PlanFacts
    fingerprint: str
    address: str
    port: int
    has_changes: bool = False


INSTRUCTION = TypeAdapter(Instruction)


@dataclass(frozen=True)
class SharedInstruction:
    """The request to load one message of an update from shared memory.

    Attributes:
        facts: the facts of the plan.
        fingerprint: the fingerprint of the trainer's plan.
        rank: the engine rank in the plan.
        sender: the trainer rank that sends the message.
        step: the message's step. Sender and step identify a message.
        changed: the number of changes; WHOLE if the memory has the whole message.
    """

    facts: PlanFacts
    fingerprint: str
    rank: int
    sender: int
    step: int
    changed: int


SHARED_INSTRUCTION = TypeAdapter(SharedInstruction)


@dataclass
class ShardStep:
    """What an engine rank does in a step of the plan.

    Attributes:
        receives: the messages that it receives, each with the sender's rank in the group.
        sends: the messages of the step before that it sends on, each with the receiver's rank in the group.
    """

    receives: list[tuple[Message, int]] = field(default_factory=list)
    sends: list[tuple[Message, int]] = field(default_factory=list)


def steps_of(plan: ShardPlan, rank: int) -> list[ShardStep]:
    """Return the steps of an engine rank. In the group the plan's trainer ranks come before the engine ranks."""
    first_engine = len(plan.members)
    group_ranks = {("trainer", member): number for number, member in enumerate(plan.members)}
    for engine_rank in range(len(plan.hosts)):
        group_ranks["engine", engine_rank] = first_engine + engine_rank
    steps: dict[int, ShardStep] = defaultdict(ShardStep)
    for message, hop in plan.hops:
        step = message.step + hop.steps
        if hop.receiver == rank:
            steps[step].receives.append((message, group_ranks[hop.sender_kind, hop.sender]))
        if (hop.sender_kind, hop.sender) == ("engine", rank):
            steps[step].sends.append((message, group_ranks["engine", hop.receiver]))
    return [steps[step] for step in sorted(steps)]


@lru_cache(maxsize=1)
def _own_steps(shape: ModelShape, facts: PlanFacts, group_rank: int) -> tuple[str, list[ShardStep]]:
    """Return the fingerprint of the plan, and the steps of the engine rank with this rank in the group."""
    plan = facts.plan(shape)
    return plan.fingerprint, steps_of(plan, group_rank - len(plan.members))


@lru_cache(maxsize=1)
def _own_messages(
    shape: ModelShape, facts: PlanFacts, rank: int
) -> tuple[str, dict[MessageKey, Message]]:
    """Return the fingerprint of the plan, and the messages of an engine rank, by sender and step."""
    plan = facts.plan(shape)
    own = {message.key: message for message in plan.messages if rank in message.column}
    return plan.fingerprint, own


def _check_fingerprint(own: str, of_trainer: str) -> None:
    if own != of_trainer:
        raise OtherPlanError(
            f"weight update: the engine's plan has the fingerprint {own}, the trainer's plan has {of_trainer}: "
            "expected one version of megatron_dppo and one model on both sides"
        )


def slices_in(message: Message, data: Tensor, dtype_of: DtypeOf) -> Iterator[tuple[Slice, Tensor]]:
    """Yield the slices of a message, each with its view of the message's flat bytes, in the slice's shape."""
    chunks = data.split([part.bytes for part in message.slices])
    for part, chunk in zip(message.slices, chunks, strict=True):
        yield part, chunk.view(dtype_of(part.name)).view(part.shape)


class MessagePlacement:
    """The copies that place a message in an engine rank's tensors.

    Slices that follow each other in the message and in an engine tensor are one copy of bytes.

    Args:
        message: the message.
        blocks: the places of the blocks.
        dtype_of: the dtype of each tensor.
    """

    def __init__(self, message: Message, blocks: Blocks, dtype_of: DtypeOf) -> None:
        self.message = message
        self._runs: list[_ByteRun] = []
        """Copies of bytes."""
        self._others: list[tuple[Slice, int, torch.dtype, Tensor, bool]] = []
        """Other slices: the slice, its first byte in the message, its dtype, its place, and whether 1 is added."""
        start = 0
        for part in message.slices:
            dtype = dtype_of(part.name)
            for block, adds_one in blocks[part.block]:
                target = part.of_block(block)
                if adds_one or target.dtype != dtype or not target.is_contiguous():
                    self._others.append((part, start, dtype, target, adds_one))
                else:
                    self._add_run(start, target.view(-1).view(torch.uint8))
            start += part.bytes

    def _add_run(self, start: int, target: Tensor) -> None:
        if self._runs:
            last = self._runs[-1]
            is_next = last.start + last.target.numel() == start
            joined = adjacent([last.target, target]) if is_next else None
            if joined is not None:
                self._runs[-1] = _ByteRun(last.start, joined)
                return
        self._runs.append(_ByteRun(start, target))

    def place(self, data: Tensor) -> None:
        """Copy the flat bytes of the message to their places."""
        targets = [run.target for run in self._runs]
        sources = [run.of(data) for run in self._runs]
        for part, start, dtype, target, adds_one in self._others:
            received = data[start : start + part.bytes].view(dtype).view(part.shape)
            targets.append(target)
            sources.append(received.to(target.dtype) + 1 if adds_one else received)
        torch._foreach_copy_(targets, sources)

    def apply(self, changes: Changes) -> None:
        """Apply changes of the message to the weights that the engine holds."""
        first_target = self._runs[0].target if self._runs else self._others[0][3]
        data = torch.empty(self.message.bytes, dtype=torch.uint8, device=first_target.device)
        targets = [run.of(data) for run in self._runs]
        sources = [run.target for run in self._runs]
        for part, start, dtype, target, adds_one in self._others:
            if not adds_one:
                targets.append(data[start : start + part.bytes].view(dtype).view(part.shape))
                sources.append(target)
        torch._foreach_copy_(targets, sources)
        apply_changes(data, changes)
        self.place(data)


class _ByteRun(NamedTuple):
    """Bytes of a message that go to one run of bytes in an engine tensor: the first byte, and the run."""

    start: int
    target: Tensor

    def of(self, data: Tensor) -> Tensor:
        return data[self.start : self.start + self.target.numel()]


def adjacent(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return one view of all 1-D ``uint8`` ``pieces`` if they follow each other in memory, else None."""
    first_piece = pieces[0]
    end = first_piece.data_ptr()
    storage = first_piece.untyped_storage().data_ptr()
    for piece in pieces:
        # Neighbours in memory can be two allocations, and no view spans both.
        if piece.data_ptr() != end or piece.untyped_storage().data_ptr() != storage:
            return None
        end += piece.numel()
    size = end - first_piece.data_ptr()
    return first_piece.as_strided((size,), (1,), first_piece.storage_offset())


class MessagePlacements:
    """The placements of an engine rank's messages. They are made once for a plan.

    Args:
        table: the tensors of the served model.
        blocks: the places of the blocks on this rank.
    """

    def __init__(self, table: EngineTensors, blocks: Blocks) -> None:
        self.shape = table.shape
        self.blocks = blocks
        self._sent_dtype = table.sent_dtype
        self._fingerprint = ""
        self._placements: dict[MessageKey, MessagePlacement] = {}

    def of(self, fingerprint: str, message: Message, dtype: torch.dtype) -> MessagePlacement:
        """Return the placement of a message of the plan with this fingerprint. ``dtype``: the dtype of the weights."""
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            self._placements.clear()
        if message.key not in self._placements:
            dtype_of = partial(self._sent_dtype, weights_dtype=dtype)
            self._placements[message.key] = MessagePlacement(message, self.blocks, dtype_of)
        return self._placements[message.key]

    @property
    def device(self) -> torch.device:
        """The device of the engine's tensors."""
        return next(iter(self.blocks.values()))[0][0].device


class Incoming:
    """Messages of an update that arrive at this engine rank.

    ``text``: the request in JSON, of the type of ``form``. Raises OtherPlanError for a text of another form.
    """

    def __init__(self, text: str, form: TypeAdapter[Any]) -> None:
        try:
            self._instruction = form.validate_json(text)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"]))
            raise OtherPlanError(
                f"weight update: instruction {key}: {fault['msg']}, expected one version of megatron_dppo on both sides"
            ) from error

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = getattr(torch, self._instruction.facts.dtype)
        return dtype

    def receive(
        self, placements: MessagePlacements, *, keeps_whole: bool = False
    ) -> list[Callable[[], None]]:
        """Receive the messages, and copy them to their places.

        Args:
            placements: the placements of this engine rank.
            keeps_whole: whether whole messages are kept in host memory.

        Returns functions that apply the changes, and the whole messages that were kept, in the order of the messages.
        Raises OtherPlanError, PositionError, and in a group CalledOffError, if a trainer rank calls the update off, and
        ConnectionBrokenError.
        """
        raise NotImplementedError


class SharedMessage(Incoming):
    """A message in memory that a trainer rank shares. ``text``: a SharedInstruction in JSON."""

    def __init__(self, text: str, data: Tensor) -> None:
        super().__init__(text, SHARED_INSTRUCTION)
        self._data = data

    def receive(
        self, placements: MessagePlacements, *, keeps_whole: bool = False
    ) -> list[Callable[[], None]]:
        """Copy the message to its places. The sender may use the memory again afterwards."""
        instruction = self._instruction
        fingerprint, messages = _own_messages(placements.shape, instruction.facts, instruction.rank)
        _check_fingerprint(fingerprint, instruction.fingerprint)
        message = messages.get((instruction.sender, instruction.step))
        if message is None or self._data.numel() != _sent_bytes(message, instruction.changed):
            raise OtherPlanError(
                f"weight update: trainer rank {instruction.sender} sent {self._data.numel()} bytes in step "
                f"{instruction.step} to engine rank {instruction.rank}, which has no such message in the plan"
            )
        placement = placements.of(fingerprint, message, self.dtype)
        received = _Received(placement, self._data, instruction.changed)
        kept = received.load(keeps_whole=keeps_whole)
        if self._data.is_cuda:
            torch.cuda.current_stream(self._data.device).synchronize()
        return kept


class IncomingShards(Incoming):
    """All messages of an update, from the ranks of a group. ``text``: an Instruction in JSON."""

    def __init__(self, text: str, group: dist.ProcessGroup, group_name: str) -> None:
        super().__init__(text, INSTRUCTION)
        self._group = group
        self._limit = limit_of(group_name) or timedelta(minutes=30)

    def receive(
        self, placements: MessagePlacements, *, keeps_whole: bool = False
    ) -> list[Callable[[], None]]:
        """Receive this rank's messages step by step. While messages are copied, the next ones are on their way."""
        instruction = self._instruction
        fingerprint, steps = _own_steps(placements.shape, instruction.facts, self._group.rank())
        _check_fingerprint(fingerprint, instruction.fingerprint)
        device = placements.device
        store = connect_store(instruction.address, instruction.port, BUSY_CONNECT_S)
        link = Link(self._group, store, self._limit, device)
        kept: list[Callable[[], None]] = []
        # A rank receives at most two messages in a step. Those of the step before are placed and sent on meanwhile.
        buffers = [Buffers(), Buffers()]
        flat_bytes = torch.empty(0, dtype=torch.uint8, device=device)
        last: dict[MessageKey, _Received] = {}
        for step in steps:
            counts = [WHOLE] * len(step.receives)
            if instruction.has_changes:
                counts = self._exchange_counts(link, step, last, device)
            received: dict[MessageKey, _Received] = {}
            for number, (message, _) in enumerate(step.receives):
                placement = placements.of(fingerprint, message, self.dtype)
                size = _sent_bytes(message, counts[number])
                data = buffers[number].next(size, flat_bytes)
                received[message.key] = _Received(placement, data, counts[number])
            sends = [(last[m.key].data, target) for m, target in step.sends]
            receives = [(received[m.key].data, source) for m, source in step.receives]
            exchanged = link.start(sends, receives)
            kept += _load(last, keeps_whole=keeps_whole)
            link.wait(exchanged)
            last = received
        kept += _load(last, keeps_whole=keeps_whole)
        return kept

    def _exchange_counts(
        self,
        link: Link,
        step: ShardStep,
        last: Mapping[MessageKey, _Received],
        device: torch.device,
    ) -> list[int]:
        """Exchange the numbers of changes of a step's messages. Returns those of the incoming messages."""
        sends = []
        for message, target in step.sends:
            sends.append((torch.tensor([last[message.key].changed], device=device), target))
        counts = torch.zeros(len(step.receives), 1, dtype=torch.int64, device=device)
        sources = [source for _, source in step.receives]
        link.wait(link.start(sends, list(zip(counts, sources, strict=True))))
        return counts[:, 0].tolist()


class _Received(NamedTuple):
    """The flat bytes of a message; ``changed`` is its number of changes, or WHOLE."""

    placement: MessagePlacement
    data: Tensor
    changed: int

    def load(self, *, keeps_whole: bool) -> list[Callable[[], None]]:
        """Copy the message to its places. Or return a function that does so later, and owns a copy of the bytes."""
        message = self.placement.message
        if self.changed != WHOLE:
            positions, values = self.data.split(changes_bytes(self.changed, message.item_bytes))
            received = Changes(
                positions.view(torch.int32), values.view(item_dtype(message.item_bytes))
            )
            return [partial(self.placement.apply, kept_changes(received, message.bytes))]
        if keeps_whole:
            return [partial(self.placement.place, self.data.to("cpu", copy=True))]
        self.placement.place(self.data)
        return []


def _sent_bytes(message: Message, changed: int) -> int:
    """Return the bytes of a message that is sent whole, or of its changes."""
    if changed == WHOLE:
        return message.bytes
    return sum(changes_bytes(changed, message.item_bytes))


def _load(
    messages: Mapping[MessageKey, _Received], *, keeps_whole: bool
) -> list[Callable[[], None]]:
    """Place all messages; see ``_Received.load``."""
    kept: list[Callable[[], None]] = []
    for message in messages.values():
        kept += message.load(keeps_whole=keeps_whole)
    return kept
