"""The engine's side of an update in which every engine rank receives only what it keeps (``model/shard_plan.py``).

The trainer sends each server one request for a whole update. The request has the facts of the plan and the plan's
fingerprint. Each engine rank computes the plan from the facts, and compares the fingerprint. Then it receives its
messages in the order of their steps, sends those of longer columns on, and copies each message to its places by one
call. While a message is copied, the next message is on its way.

A message of changes (``engine/changes.py``) follows a message of 8 bytes with the number of changes.

The part for NCCL is not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from megatron_dppo.engine.broadcast_group import limit_of
from megatron_dppo.engine.changes import (
    Changes,
    apply_changes,
    changes_bytes,
    item_dtype,
    own_changes,
)
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.links import Link, Operation, connect_store
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import Segment
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.model.shard_plan import Message, ShardPlan, Slice, shard_plan

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
        bucket_bytes: the largest size of a message.
        dtype: the dtype of the weights, a key of ITEM_BYTES.
        quantized: whether linear layers and experts of the servers are block FP8.
    """

    layout: Layout
    servers: tuple[EngineLayout, ...]
    bucket_bytes: int
    dtype: str
    quantized: bool

    def plan(self, shape: ModelShape) -> ShardPlan:
        return shard_plan(
            shape,
            self.layout,
            self.servers,
            self.bucket_bytes,
            ITEM_BYTES[self.dtype],
            quantized=self.quantized,
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


class ShardStep(NamedTuple):
    """What an engine rank does in a step of the plan.

    Attributes:
        incoming: the message that it receives, or None.
        source: rank in the group of the message's sender.
        target: rank in the group that it sends the message of the step before to, or None.
    """

    incoming: Message | None
    source: int
    target: int | None


def steps_of(plan: ShardPlan, rank: int) -> list[ShardStep]:
    """Return the steps of an engine rank. In the group the plan's trainer ranks come before the engine ranks."""
    first_engine = len(plan.members)
    incoming: dict[int, tuple[Message, int]] = {}
    targets: dict[int, int] = {}
    for message in plan.messages:
        if rank not in message.column:
            continue
        number = message.column.index(rank)
        source = plan.members.index(message.sender)
        if number:
            source = first_engine + message.column[number - 1]
        incoming[message.step + number] = (message, source)
        if number + 1 < len(message.column):
            targets[message.step + number + 1] = first_engine + message.column[number + 1]
    steps: list[ShardStep] = []
    for step in sorted({*incoming, *targets}):
        message_or_none, source = incoming.get(step, (None, 0))
        steps.append(ShardStep(message_or_none, source, targets.get(step)))
    return steps


@lru_cache(maxsize=1)
def _own_steps(shape: ModelShape, facts: PlanFacts, group_rank: int) -> tuple[str, list[ShardStep]]:
    """Return the fingerprint of the plan, and the steps of the engine rank with this rank in the group."""
    plan = facts.plan(shape)
    return plan.fingerprint, steps_of(plan, group_rank - len(plan.members))


def slices_in(message: Message, data: Tensor, dtype_of: DtypeOf) -> Iterator[tuple[Slice, Tensor]]:
    """Yield the slices of a message, each with its view of the message's flat bytes, in the slice's shape."""
    chunks = data.split([part.bytes for part in message.slices])
    for part, chunk in zip(message.slices, chunks, strict=True):
        yield part, chunk.view(dtype_of(part.name)).view(part.shape)


def place(message: Message, data: Tensor, blocks: Blocks, dtype_of: DtypeOf) -> None:
    """Copy the slices of a message to their places."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for part, received in slices_in(message, data, dtype_of):
        for block, adds_one in blocks[part.block]:
            target = part.of_block(block)
            targets.append(target)
            sources.append(received.to(target.dtype) + 1 if adds_one else received)
    torch._foreach_copy_(targets, sources)


def _apply(message: Message, changes: Changes, blocks: Blocks, dtype_of: DtypeOf) -> None:
    """Apply changes of a message to the weights that the engine holds."""
    device = next(iter(blocks.values()))[0][0].device
    data = torch.empty(message.bytes, dtype=torch.uint8, device=device)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for part, present in slices_in(message, data, dtype_of):
        block = next(block for block, adds_one in blocks[part.block] if not adds_one)
        targets.append(present)
        sources.append(part.of_block(block))
    torch._foreach_copy_(targets, sources)
    apply_changes(data, changes)
    place(message, data, blocks, dtype_of)


class IncomingShards:
    """An update that the ranks of a group send to this engine rank.

    ``text``: an Instruction in JSON. Raises OtherPlanError for a text of another form.
    """

    def __init__(self, text: str, group: dist.ProcessGroup, group_name: str) -> None:
        try:
            self._instruction = INSTRUCTION.validate_json(text)
        except ValidationError as error:
            raise OtherPlanError(f"weight update: {error.errors()[0]['msg']}") from error
        self._group = group
        self._limit = limit_of(group_name) or timedelta(minutes=30)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = getattr(torch, self._instruction.facts.dtype)
        return dtype

    def receive(
        self, shape: ModelShape, blocks: Blocks, dtype_of: DtypeOf, *, keeps_whole: bool = False
    ) -> list[Callable[[], None]]:
        """Receive all messages of this rank, and copy them to their places.

        Args:
            shape: the model.
            blocks: the places.
            dtype_of: the dtype of each tensor.
            keeps_whole: whether whole messages are kept in host memory.

        Returns functions that apply the changes, and the whole messages that were kept, in the order of the messages.
        Raises OtherPlanError, CalledOffError if a trainer rank calls the update off, and ConnectionBrokenError.
        """
        instruction = self._instruction
        fingerprint, steps = _own_steps(shape, instruction.facts, self._group.rank())
        if fingerprint != instruction.fingerprint:
            raise OtherPlanError(
                f"weight update: the engine's plan has the fingerprint {fingerprint}, the trainer's plan has "
                f"{instruction.fingerprint}: expected one version of megatron_dppo and one model on both sides"
            )
        device = next(iter(blocks.values()))[0][0].device
        store = connect_store(instruction.address, instruction.port)
        link = Link(self._group, store, self._limit, device)
        kept: list[Callable[[], None]] = []
        buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        last: _Received | None = None
        for step in steps:
            buffers.reverse()
            counts = None
            if instruction.has_changes:
                counts = self._exchange_counts(link, step, last, device)
            received = _receive_buffer(step, counts, buffers)
            exchanged = link.start(_outgoing(step, last), _incoming(step, received))
            if last is not None:
                kept += last.load(blocks, dtype_of, keeps_whole=keeps_whole)
            link.wait(exchanged)
            last = received
        if last is not None:
            kept += last.load(blocks, dtype_of, keeps_whole=keeps_whole)
        return kept

    def _exchange_counts(
        self, link: Link, step: ShardStep, last: _Received | None, device: torch.device
    ) -> int | None:
        """Exchange the numbers of changes of a step's messages. Returns the number of the incoming message."""
        sends = []
        if step.target is not None and last is not None:
            sends.append((torch.tensor([last.changed], device=device), step.target))
        receives = []
        count = torch.zeros(1, dtype=torch.int64, device=device)
        if step.incoming is not None:
            receives.append((count, step.source))
        link.wait(link.start(sends, receives))
        return int(count)


class _Received(NamedTuple):
    """The flat bytes of a message; ``changed`` is its number of changes, or WHOLE."""

    message: Message
    data: Tensor
    changed: int

    def load(
        self, blocks: Blocks, dtype_of: DtypeOf, *, keeps_whole: bool
    ) -> list[Callable[[], None]]:
        """Copy the message to its places. Or return a function that does so later, with bytes of its own."""
        if self.changed != WHOLE:
            sizes = changes_bytes(self.changed, self.message.item_bytes)
            positions, values = self.data.split(sizes)
            received = Changes(
                positions.view(torch.int32), values.view(item_dtype(self.message.item_bytes))
            )
            is_own = torch.ones(self.message.bytes, dtype=torch.uint8, device=self.data.device)
            changes = own_changes(received, is_own)
            return [partial(_apply, self.message, changes, blocks, dtype_of)]
        if keeps_whole:
            data = self.data.to("cpu", copy=True)
            return [partial(place, self.message, data, blocks, dtype_of)]
        place(self.message, self.data, blocks, dtype_of)
        return []


def _receive_buffer(step: ShardStep, count: int | None, buffers: list[Tensor]) -> _Received | None:
    """Return the step's message with memory for its bytes, a part of ``buffers[0]``."""
    message = step.incoming
    if message is None:
        return None
    size = message.bytes
    if count is None:
        count = WHOLE
    if count != WHOLE:
        size = sum(changes_bytes(count, message.item_bytes))
    if buffers[0].numel() < size:
        buffers[0] = buffers[0].new_empty(size)
    return _Received(message, buffers[0][:size], count)


def _outgoing(step: ShardStep, last: _Received | None) -> list[Operation]:
    if step.target is None or last is None:
        return []
    return [(last.data, step.target)]


def _incoming(step: ShardStep, received: _Received | None) -> list[Operation]:
    return [] if received is None else [(received.data, step.source)]
