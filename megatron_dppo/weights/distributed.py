"""Strategy ``distributed``: the trainer ranks of the plan and all engine ranks are one group of gloo or NCCL.

A trainer rank sends a message to the first engine rank of the message's column. Only rank 0 calls the engines: one
request to each server starts the transfer of the whole update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.weights.engine_weights import EngineWeights, WireHeader
from megatron_dppo.weights.engines import (
    ENGINE_FAULTS,
    GRACE_S,
    Engines,
    meeting_address,
    require_routable,
)
from megatron_dppo.weights.links import Link, in_background
from megatron_dppo.weights.server.direct_loading import SHARDS
from megatron_dppo.weights.server.shards import INSTRUCTION, Instruction
from megatron_dppo.weights.shards import Sent, ShardStrategy
from megatron_dppo.weights.source import WeightSource
from megatron_dppo.weights.weight_group import WeightGroup, call_off

log = logging.getLogger(__name__)


class _Rendezvous(NamedTuple):
    """The rendezvous of the group, its name, and its backend of torch.distributed."""

    address: str
    port: int
    name: str
    backend: str

    def call_off(self) -> None:
        """Make all ranks of the group stop waiting. Never raises."""
        call_off(self.address, self.port)


class DistributedStrategy(ShardStrategy):
    """Sends messages in a group of trainer ranks and engine ranks, and as rank 0 controls the engines.

    The group lives from one update to the next, and is opened again after an abort.
    """

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self._group: WeightGroup | None = None
        self._link: Link | None = None
        self._aborted_groups: list[str] = []
        self._sending: Future[None] | None = None
        self._requests: Future[None] | None = None

    def attach(self, engines: Engines) -> None:
        require_routable([engine.url for engine in engines.members])
        super().attach(engines)

    @property
    def _members(self) -> tuple[int, ...]:
        return self.shards.plan.members

    def meeting_point(self) -> Any:
        """Return, on rank 0, the _Rendezvous of the group as a list."""
        if self.engines is None:
            return None
        if self._group is None:
            address = meeting_address(self.servers.urls)
            self._group = self._new_group(address)
        group = self._group
        return [group.address, group.port, group.name, group.backend]

    def _new_group(self, address: str, port: int = 0, name: str = "") -> WeightGroup:
        return WeightGroup(
            ranks=sum(layout.tensor for layout in self.servers.layouts),
            address=address,
            device=self.servers.device,
            timeout_s=self.config.timeout_s,
            members=len(self._members),
            rank=self._members.index(self.rank),
            port=port,
            name=name,
        )

    def begin(self, meeting_points: Sequence[Any]) -> None:
        """Join the group. Rank 0 also opens the update in the engines, and makes them receive all messages."""
        point = _Rendezvous(*meeting_points[0])
        if self.rank not in self._members:
            return
        try:
            self._join(point)
        except BaseException:
            # The other ranks wait for this one.
            point.call_off()
            raise

    def _join(self, point: _Rendezvous) -> None:
        """Join the group; see ``begin``."""
        if self._group is None or self._group.name != point.name:
            self._group = self._new_group(point.address, point.port, point.name)
            self._link = None
        if self.engines is not None:
            self._leave_aborted_groups(self.engines)
            if self._link is None:
                self._open_group(self.engines, point, self._group.is_called_off)
            self.engines.each(lambda engine: engine.begin())
        if self._link is None:
            self._group.wait(self._group.joined)
            self._link = self._group.link(torch.device(self.servers.device))
        if self.engines is not None:
            self._requests = in_background(partial(self._receive, self.engines, point))

    def _open_group(
        self, engines: Engines, point: _Rendezvous, is_called_off: Callable[[], bool]
    ) -> None:
        """Have every engine join the group. Raises CalledOffError if a trainer rank could not join."""
        size = len(self._members) + engines.ranks
        ranks = engines.first_ranks(len(self._members))
        calls = engines.start(
            lambda engine: engine.open_group(*point, first_rank=ranks[engine.url], size=size)
        )
        step = f"opening the group {point.name}"
        engines.arrive(calls, self.config.timeout_s, step, point.call_off, is_called_off)

    def _receive(self, engines: Engines, point: _Rendezvous) -> None:
        """Have every engine receive its messages."""
        instruction = Instruction(
            self.shards.facts,
            self.shards.plan.fingerprint,
            point.address,
            point.port,
            has_changes=self.sent_weights is not None,
        )
        text = INSTRUCTION.dump_json(instruction).decode()
        header = WireHeader((SHARDS, text), ("uint8", "uint8"), ((0,), (0,)), 0)
        calls = engines.start(lambda engine: engine.receive(header, point.name))
        # A request that hangs may outlive its group. It must not call the next group off.
        engines.arrive(calls, self.config.timeout_s, "the transfer of all weights", point.call_off)

    def _call_off(self) -> None:
        """Make all ranks of the group stop waiting."""
        if self._group is not None:
            call_off(self._group.address, self._group.port)

    def send(self, batch: Sequence[Sent]) -> None:
        assert self._link is not None
        for message, data, changed in batch:
            target = len(self._members) + message.column[0]
            if self.sent_weights is not None:
                self._wait_for_message()
                header = torch.tensor([changed], device=data.device)
                self._sending = self._link.start([(header, target)], [])
            self._wait_for_message()
            self._sending = self._link.start([(data, target)], [])

    def wait_for_all(self) -> None:
        self._wait_for_message()
        if self._requests is not None:
            self._requests.result()
            self._requests = None

    def abort(self) -> None:
        """Leave the group, and free the engines and the other trainer ranks that wait in it."""
        requests = self._requests
        self._sending = None
        self._requests = None
        self._link = None
        if self._group is not None:
            self._call_off()
            if self.engines is not None:
                self._aborted_groups.append(self._group.name)
            self._group.abort()
            self._group = None
        if requests is not None:
            # A request that is still on its way would load its messages into the session that a caller opens next.
            wait([requests], GRACE_S)

    def close(self) -> None:
        """Have the engines leave the group. Never raises: an engine that has ended has also left."""
        if self.engines is not None:
            if self._group is not None:
                self._aborted_groups.append(self._group.name)
            self._leave_aborted_groups(self.engines)
        super().close()
        self._aborted_groups = []

    def _leave_aborted_groups(self, engines: Engines) -> None:
        for name in self._aborted_groups:
            try:
                engines.each(partial(EngineWeights.close_group, name=name))
            except ENGINE_FAULTS as error:
                log.info("an engine did not leave the weight group: %s", error)
        self._aborted_groups = []

    def _wait_for_message(self) -> None:
        """Wait until this rank's last message is sent. A failure frees the ranks that wait for this rank."""
        sending = self._sending
        self._sending = None
        if sending is None:
            return
        assert self._link is not None
        try:
            self._link.wait(sending)
        except BaseException:
            self._call_off()
            if self._requests is not None:
                # Rank 0 made the HTTP calls, so its exception names the failing engine.
                self._requests.result()
            raise
