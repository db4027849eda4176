"""Transfers in a process group of trainer ranks and engine ranks, each in a thread that can be left behind.

Neither gloo nor NCCL cancels a transfer from the outside. So a rank waits for a transfer and, at the same time, for a
key in the group's rendezvous: once any trainer rank has called the update off, the wait ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.weights.server.weight_groups import (
    CALLED_OFF,
    rendezvous_client,
    rendezvous_fault,
)

T = TypeVar("T")

_CANCEL_POLL_S = 0.2
"""Seconds between two checks whether the transfer was cancelled."""
_CONNECT_S = 5.0
BUSY_CONNECT_S = 30.0
"""Seconds in which a rank that joins must reach the rendezvous, also on a busy host."""

Operation = tuple[Tensor, int]
"""The bytes of a transfer, and the rank in the group that sends or receives them."""


class CalledOffError(EngineError):
    """Another rank cancelled the transfer. The error of that rank has the cause."""


class ConnectionBrokenError(EngineError):
    """gloo or NCCL lost a connection to an engine, or could not make one."""


@contextmanager
def raising_connection_broken() -> Iterator[None]:
    """Convert torch's errors in the block to ConnectionBrokenError."""
    # torch raises a plain RuntimeError for most errors of gloo and NCCL.
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBrokenError(str(error)) from error


def connect_store(address: str, port: int, limit_s: float = _CONNECT_S) -> dist.TCPStore:
    """Connect to a group's rendezvous within ``limit_s``. Raises ConnectionBrokenError, at once if nothing listens."""
    ends_at = time.monotonic() + limit_s
    while True:
        fault = rendezvous_fault(address, port)
        if fault is not None:
            raise ConnectionBrokenError(fault)
        try:
            # Use short attempts: within its limit, torch tries again where nothing listens.
            with raising_connection_broken():
                store = rendezvous_client(address, port)
        except ConnectionBrokenError:
            if time.monotonic() > ends_at:
                raise
            continue
        store.set_timeout(timedelta(seconds=limit_s))
        return store


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_unless_called_off(future: Future[None], store: dist.Store) -> None:
    """Wait for ``future``, or until a rank cancels the whole transfer.

    Raises CalledOffError, ConnectionBrokenError if the rendezvous is gone, or the exception of the future.
    """
    while not wait([future], _CANCEL_POLL_S).done:
        with raising_connection_broken():
            is_called_off = store.check([CALLED_OFF])
        if is_called_off:
            raise CalledOffError("another rank called the weight transfer off")
    future.result()


class Link:
    """Sends and receives flat bytes in ``group``.

    Args:
        group: the group.
        store: the group's rendezvous.
        limit: the limit of a transfer. The callers' own limits end first.
        device: the device of the bytes.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store, limit: timedelta, device: torch.device
    ) -> None:
        self._group = group
        self._store = store
        self._limit = limit
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, sends: Sequence[Operation], receives: Sequence[Operation]) -> Future[None]:
        """Start transfers of one step. The future is done when all of them are: the bytes are there, or may change."""
        filled = None
        if self._stream is not None:
            # The bytes to send are written, and the memory to receive into is read, before this event.
            filled = torch.cuda.current_stream(self._stream.device).record_event()
        return in_background(partial(self._transfer, sends, receives, filled))

    def wait(self, future: Future[None]) -> None:
        """Wait for transfers of ``start``; see ``wait_unless_called_off``."""
        wait_unless_called_off(future, self._store)

    def _transfer(
        self,
        sends: Sequence[Operation],
        receives: Sequence[Operation],
        filled: torch.cuda.Event | None,
    ) -> None:
        # This frame keeps a reference to the group on purpose. gloo cannot cancel a transfer, and releasing the last
        # reference to the group would block.
        group = self._group
        if filled is None or self._stream is None:
            with raising_connection_broken():
                works = [group.recv([data], peer, 0) for data, peer in receives]
                works += [group.send([data], peer, 0) for data, peer in sends]
                for work in works:
                    work.wait(self._limit)
            return
        # Not yet run on a GPU. As one coalesced operation the transfers use the group's communicator. Single transfers
        # would create one for each pair of ranks, and a send could wait for a receive behind it.
        device = self._stream.device
        with raising_connection_broken(), torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            group._start_coalescing(device)
            for data, peer in receives:
                group.recv([data], peer, 0)
            for data, peer in sends:
                group.send([data], peer, 0)
            group._end_coalescing(device).wait(self._limit)
            # NCCL's wait() blocks only the stream, not this thread.
            self._stream.synchronize()
