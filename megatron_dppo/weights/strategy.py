"""The interface of the strategies that move weights into the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.weights.engines import Digests, Engines
from megatron_dppo.weights.phases import Phases
from megatron_dppo.weights.source import WeightSource


class Streamed(NamedTuple):
    """The bytes and checksums of one rank in a stream of weights.

    Attributes:
        sent: bytes that it sent to engines.
        moved: bytes that moved otherwise: received from other ranks, or received by further ranks of a column.
        between_nodes: bytes that travelled to another node because of this rank.
        partials: its partial checksums, as JSON; None if it hashed nothing.
    """

    sent: int
    moved: int
    between_nodes: int
    partials: list[Any] | None


class Strategy:
    """Moves the weights of updates into the attached engines. Every trainer rank has one strategy, for all updates.

    Methods may raise ENGINE_FAULTS, except ``plan``, ``stream``, ``abort`` and ``close``. An EngineFaultError names the
    engines at fault.

    Args:
        source: the trainer's weights.
        config: the section ``weight_sync``.

    Attributes:
        bucket_bytes: the largest size of a batch of messages, or of a bucket of whole tensors.
        calls_engines: whether this rank needs connections to the engines.
        engines: this rank's connections to the engines; None if it has none.
    """

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        self.config = config
        self.bucket_bytes = config.bucket_bytes
        self.rank = source.rank
        self.engines: Engines | None = None
        self.calls_engines = self.rank == 0

    @staticmethod
    def reach_fault(url: str, config: WeightSyncConfig, *, shares_devices: bool) -> str | None:
        """Return why weights cannot be sent from this host to the engine at ``url``; None if its host allows it.

        ``shares_devices``: whether the engine runs on GPUs of trainer ranks.
        """
        return None

    def attach(self, engines: Engines) -> None:
        """Use ``engines`` from here on. Only ranks with ``calls_engines`` call this method.

        Raises EngineMismatchError for an engine that this strategy cannot reach.
        """
        self.engines = engines

    def plan(self, source: WeightSource) -> None:
        """Plan the updates of the engines that are attached. Collective.

        Raises EngineMismatchError on every rank if they cannot be reached.
        """

    def meeting_point(self) -> Any:
        """Return what the other ranks need to know of this rank before ``begin``, as JSON."""
        return None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        """Open the transfer. ``meeting_points`` has the result of ``meeting_point`` of each rank, by rank."""
        raise NotImplementedError

    def stream(
        self, source: WeightSource, phases: Phases, *, verify: bool, sends_changes: bool
    ) -> Streamed:
        """Send all weights. Collective. A failure is in ``phases``.

        Args:
            source: the trainer's weights.
            phases: runs each call of the phases gather, transfer and hash.
            verify: whether to compute checksums.
            sends_changes: whether the engines hold the weights of the last update, so that changes suffice.
        """
        raise NotImplementedError

    def arrive(self) -> None:
        """Wait until the engines have received this rank's weights; on rank 0, all weights."""

    def end(self) -> None:
        """Close the update in the engines. Called on rank 0 after the weights of every rank have arrived."""
        raise NotImplementedError

    def digests(self, partials: Sequence[list[Any]]) -> Digests:
        """Combine the partial checksums of all ranks, on rank 0. Raises IncompleteWeightsError."""
        raise NotImplementedError

    @property
    def attached(self) -> Engines:
        """The engines, on a rank with ``calls_engines``."""
        assert self.engines is not None
        return self.engines

    @property
    def whole_bytes(self) -> int:
        """The bytes of all weights in the form that engines receive. Only rank 0's value is used."""
        raise NotImplementedError

    @property
    def fewest_bytes(self) -> int:
        """The fewest bytes that any plan moves into the engines. Only rank 0's value is used."""
        return self.whole_bytes

    @property
    def busiest_over_mean(self) -> tuple[float, float] | None:
        """The attribute of UpdateReport, the same on every rank."""
        return None

    @property
    def foreign_hosts(self) -> list[str]:
        """The hosts of engines, other than this rank's, that receive this rank's bytes, each once."""
        raise NotImplementedError

    def abort(self) -> None:
        """Cancel the transfers in progress. Waits a few seconds at most."""

    def close(self) -> None:
        """Release the resources in the engines, and leave them. ``attach`` may follow."""
        self.abort()
        self.engines = None
