"""Strategy ``distributed``: each bucket is one gloo or NCCL broadcast to the engine's ranks.

The engine loads a bucket while the trainer gathers and hashes the next: at most one is in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from megatron_dppo.weight_sync.base import (
    Bucket,
    ChecksumMismatchError,
    VerifiedTensors,
    compare_checksums,
)
from megatron_dppo.weight_sync.broadcast import BroadcastGroup, local_address

log = logging.getLogger(__name__)


class PackedBucket(Protocol):
    """A bucket as the engine takes it.

    ``data``: a flat ``uint8`` tensor, unchanged by the next ``pack``, but not by the one after.
    """

    @property
    def data(self) -> Tensor: ...


class Expected(Protocol):
    """Checksums that the engine must have, as tensors come by."""

    def add(self, bucket: Bucket) -> None: ...

    def digests(self) -> Sequence[Mapping[str, str]]: ...


P = TypeVar("P", bound=PackedBucket)


class Receiver(Protocol[P]):
    """The engine's half, blocking calls; see ``rollout.engine_weights.EngineWeights``."""

    url: str
    device: str

    @property
    def ranks(self) -> int: ...

    def pause_when_idle(self, timeout_s: float) -> bool: ...

    def resume(self) -> None: ...

    def set_version(self, label: str) -> None: ...

    def open_group(self, address: str, port: int, name: str, backend: str) -> None: ...

    def close_group(self, name: str) -> None: ...

    def begin(self) -> None: ...

    def pack(self, bucket: Bucket) -> P: ...

    def receive(self, bucket: P, group: str) -> None: ...

    def end(self) -> None: ...

    def checksums(self) -> Sequence[Mapping[str, str]]: ...

    def expected(self) -> Expected: ...


class DistributedTransport(Generic[P]):
    """WeightTransport into one engine; see base.py for the steps.

    ``timeout_s`` bounds each step's wait: for running requests, a broadcast, the engine's answer.
    The group lives from one update to the next, and is made anew after an abort.
    """

    def __init__(self, engine: Receiver[P], *, timeout_s: float) -> None:
        self._engine = engine
        self._timeout = timeout_s
        self._group: BroadcastGroup | None = None
        self._expected = engine.expected()
        self._in_flight: Callable[[], None] | None = None

    def prepare(self) -> bool:
        """Let running requests finish, then pause; new requests wait in the engine."""
        return self._engine.pause_when_idle(self._timeout)

    def begin(self, version: int) -> None:
        """Mark the engine's weights as unverified, open a group where there is none, begin."""
        self._engine.set_version(f"unverified-{version}")
        self._expected = self._engine.expected()
        if self._group is None:
            self._group = BroadcastGroup(
                self._engine.open_group,
                ranks=self._engine.ranks,
                address=local_address(self._engine.url),
                device=self._engine.device,
                timeout_s=self._timeout,
            )
        self._engine.begin()

    def send(self, bucket: Bucket) -> int:
        """Wait for the bucket before, then start this one's broadcast; returns its bytes."""
        assert self._group is not None
        name = self._group.name
        packed = self._engine.pack(bucket)
        self._arrive()
        self._in_flight = self._group.broadcast(
            packed.data, lambda: self._engine.receive(packed, name)
        )
        return packed.data.numel()

    def expect(self, bucket: Bucket) -> None:
        """Hash the bucket's tensors as the engine fuses and cuts them; runs beside the broadcast."""
        self._expected.add(bucket)

    def finish(self) -> None:
        """Wait for the last bucket, then end the engine's session."""
        self._arrive()
        self._engine.end()

    def verify(self) -> VerifiedTensors:
        """Ask the engine for its checksums and compare."""
        expected = self._expected.digests()
        mismatches = compare_checksums(expected, self._engine.checksums())
        if mismatches:
            raise ChecksumMismatchError(mismatches)
        return VerifiedTensors(sum(len(rank) for rank in expected))

    def commit(self, version: int) -> None:
        """``weight_version`` becomes ``str(version)``; generation goes on."""
        self._engine.set_version(str(version))
        self._engine.resume()

    def abort(self) -> None:
        """Break the group: frees an engine that waits in a broadcast; it stays paused."""
        self._in_flight = None
        if self._group is not None:
            self._group.abort()
            self._group = None

    def close(self) -> None:
        """Have the engine leave the group; one that is gone has left already. Never raises."""
        if self._group is not None:
            try:
                self._engine.close_group(self._group.name)
            except (OSError, RuntimeError) as error:
                log.info("the engine did not leave the weight group: %s", error)
        self.abort()

    def _arrive(self) -> None:
        if self._in_flight is not None:
            arrived, self._in_flight = self._in_flight, None
            arrived()
