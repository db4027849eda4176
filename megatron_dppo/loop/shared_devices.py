"""Devices that the trainer and the servers use in turns (``engine.placement: colocated``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.engine.server_state import MemoryTag
from megatron_dppo.fleet.endpoint import RecordClient
from megatron_dppo.model.shape import TrainerPart
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.trainer import collectives
from megatron_dppo.trainer.trainer import Trainer


@dataclass(frozen=True)
class SharedDevices:
    """The devices' turns. Where each side has its own devices (``is_shared`` False), no method is called.

    Attributes:
        is_shared: whether trainer and servers share devices.
        trainer: the trainer of this rank.
        parts: parts of the trainer that are parked in the servers' turn.
        released: memory tags that the servers release in the trainer's turn.
        record: rank 0's client of the server registry, which allows or forbids server starts; None on other ranks.
    """

    is_shared: bool
    trainer: Trainer
    parts: Sequence[TrainerPart]
    released: Sequence[MemoryTag]
    record: RecordClient | None

    def leave(self, *stays: TrainerPart) -> None:
        """End the trainer's turn and park all its parts except ``stays``. Collective."""
        kept_parts = self.trainer.parked.union(stays)
        leaving_parts = [part for part in self.parts if part not in kept_parts]
        if leaving_parts:
            failpoint("parking/park")
            self.trainer.park(leaving_parts)
            failpoint("parking/parked")
        collectives.barrier()
        self.allow_starts(not stays)

    def take(self) -> None:
        """Begin the trainer's turn. Collective."""
        # The barrier also covers a server that fails to report that it stopped generating.
        collectives.barrier()
        if self.trainer.parked:
            failpoint("parking/unpark")
            self.trainer.unpark()

    def allow_starts(self, allowed: bool) -> None:
        if self.record is not None:
            self.record.allow_starts(allowed)
