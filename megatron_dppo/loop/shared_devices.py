"""Devices that the trainer and the servers use in turns (``engine.placement: colocated``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.fleet.endpoint import RecordClient
from megatron_dppo.model.shape import TrainerPart
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.trainer import collectives
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.weights.server.server_state import MemoryTag


@dataclass(frozen=True)
class SharedDevices:
    """The turns of trainer and servers on shared devices. Without shared devices, only ``are_free`` is used.

    Attributes:
        is_shared: whether trainer and servers share devices.
        trainer: the trainer of this rank.
        parts: parts of the trainer that are parked (moved to host memory) in the servers' turn.
        released: memory tags that the servers release in the trainer's turn.
        record: rank 0's client of the server registry. It allows or forbids server starts. None on other ranks.
    """

    is_shared: bool
    trainer: Trainer
    parts: Sequence[TrainerPart]
    released: Sequence[MemoryTag]
    record: RecordClient | None

    @property
    def are_free(self) -> bool:
        """Whether servers may start: no device is shared, or all ``parts`` of the trainer are parked."""
        return not self.is_shared or self.trainer.parked.issuperset(self.parts)

    def leave(self, *kept_parts: TrainerPart) -> None:
        """End the trainer's turn and park all its parts except ``kept_parts``. Collective.

        If a part is kept, servers may not start afterwards: a starting server needs the memory of this part.
        """
        unaffected_parts = self.trainer.parked.union(kept_parts)
        leaving_parts = [part for part in self.parts if part not in unaffected_parts]
        if leaving_parts:
            failpoint("parking/park")
            self.trainer.park(leaving_parts)
            failpoint("parking/parked")
        collectives.barrier()
        self.allow_starts(self.are_free)

    def take(self) -> None:
        """Begin the trainer's turn. Collective."""
        # No rank takes memory before every rank has ended its servers' turn.
        collectives.barrier()
        if self.trainer.parked:
            failpoint("parking/unpark")
            self.trainer.unpark()

    def allow_starts(self, allowed: bool) -> None:
        """Allow or forbid the supervisor to start servers."""
        if self.record is not None:
            self.record.allow_starts(allowed)
