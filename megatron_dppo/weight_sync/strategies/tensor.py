"""Strategy ``tensor``: engines on the sender's own host open its memory; nothing is transferred.

On a CPU the bucket is copied into shared memory, on a GPU the engine opens it by CUDA IPC (written,
not yet run on one). Every rank hands over its own buckets: engines take orders one at a time and don't
wait for each other, so no order is needed.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from megatron_dppo.weight_sync.interfaces import Bucket
from megatron_dppo.weight_sync.strategies.broadcast import local_address
from megatron_dppo.weight_sync.strategies.packing import Packer
from megatron_dppo.weight_sync.strategies.route import Route


class TensorStrategy:
    """See ``base.Strategy``. Raises ValueError for an engine on another host."""

    copies = 1

    def __init__(self, route: Route) -> None:
        for engine in route.engines.receivers:
            if not on_this_host(engine.url):
                raise ValueError(
                    f"weight_sync.strategy tensor: the engine at {engine.url} runs on another host "
                    f"than trainer rank {route.rank}; memory is shared within one host only, expected "
                    "strategy distributed or disk"
                )
        self._route = route
        self._packer = Packer(route.engines.first.pack)
        self._in_flight: dict[str, Future[None]] = {}

    def hello(self) -> Any:
        """Nobody has to know anything."""
        return None

    def begin(self, hellos: Sequence[Any]) -> None:
        """Open the engines' update session."""
        if self._route.conducts:
            self._route.engines.each(lambda e: e.begin())

    def send(self, bucket: Bucket) -> int:
        """Copy the bucket where engines can open it, and have them load it when the one before is."""
        engines = self._route.engines
        header = engines.first.header([(name, tensor.shape) for name, tensor in bucket])
        data = self._packer.copy(bucket, engines.first.shared_empty)
        self.arrive()
        self._in_flight = engines.start(lambda e: e.receive_shared(header, data))
        return data.numel()

    def arrive(self) -> None:
        """Wait until the engines have loaded this rank's last bucket."""
        calls, self._in_flight = self._in_flight, {}
        if calls:
            timeout = self._route.timeout_s
            self._route.engines.arrive(calls, timeout, "loading shared tensors", lambda: None)

    def end(self) -> None:
        """Close the update session."""
        self._route.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Nothing to break: an engine that loads a bucket finishes it; its buffer is not used again."""
        self._in_flight = {}
        self._packer = Packer(self._route.engines.first.pack)

    def close(self) -> None:
        """Nothing is held in the engines."""


def on_this_host(url: str) -> bool:
    """Whether packets to ``url`` stay on this machine."""
    place = urlsplit(url)
    target = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_DGRAM)[0]
    return local_address(url) == str(target[4][0])
