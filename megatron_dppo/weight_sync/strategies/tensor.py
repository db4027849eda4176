"""Strategy ``tensor``: engines on the sender's own host open its memory; nothing is transferred.

On a CPU the bucket is copied into shared memory, on a GPU the engine opens it by CUDA IPC (written,
not yet run on one). Every rank hands over its own buckets: engines take orders one at a time and don't
wait for each other, so no order is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.engine.ipc import shared_empty
from megatron_dppo.weight_sync.engines import Packer, on_this_host
from megatron_dppo.weight_sync.interfaces import Bucket, Transfer


class TensorStrategy:
    """See ``interfaces.Strategy``. Raises EngineMismatchError for an engine on another host."""

    spread = True
    copies = 1

    def __init__(self, transfer: Transfer) -> None:
        for engine in transfer.engines.members:
            if not on_this_host(engine.url):
                raise EngineMismatchError(
                    f"weight_sync.strategy tensor: the engine at {engine.url} runs on another host "
                    f"than trainer rank {transfer.rank}; memory is shared within one host only, expected "
                    "strategy distributed or disk"
                )
        self._transfer = transfer
        self._packer = Packer(transfer.engines.first.pieces)
        self._in_flight: dict[str, Future[None]] = {}

    def meeting_point(self) -> Any:
        """None: the ranks need not know each other."""
        return None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        """Open the engines' update session."""
        if self._transfer.conducts:
            self._transfer.engines.each(lambda e: e.begin())

    def send(self, bucket: Bucket) -> int:
        """Copy the bucket where engines can open it, and have them load it when the one before is."""
        engines = self._transfer.engines
        header = engines.first.header([(name, tensor.shape) for name, tensor in bucket])
        data = self._packer.copy(bucket, shared_empty)
        self.arrive()
        self._in_flight = engines.start(lambda e: e.receive_shared(header, data))
        return data.numel()

    def arrive(self) -> None:
        """Wait until the engines have loaded this rank's last bucket."""
        calls, self._in_flight = self._in_flight, {}
        if calls:
            timeout = self._transfer.timeout_s
            self._transfer.engines.arrive(calls, timeout, "loading shared tensors", lambda: None)

    def end(self) -> None:
        """Close the update session."""
        self._transfer.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Drop the buffers: an engine that loads a bucket finishes it first."""
        self._in_flight = {}
        self._packer = Packer(self._transfer.engines.first.pieces)

    def close(self) -> None:
        """Does nothing: nothing is held in the engines."""
