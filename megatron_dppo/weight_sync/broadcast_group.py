"""A process group of a trainer rank and engine ranks, for broadcasts of weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_dppo.engine.broadcast_group import CALLED_OFF, errors_abort_the_group, new_name
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.system.network import listening_store

log = logging.getLogger(__name__)


T = TypeVar("T")


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend of torch.distributed for each device of the engine."""


_CANCEL_POLL_S = 0.2
"""Seconds between two checks whether the transfer was cancelled."""


_CANCEL_S = 5.0
"""Longest time to reach the rendezvous of a group that is cancelled. An aborted group's rendezvous also stays open for
this time, so that its engine ranks can read the cancellation."""


_ANNOUNCEMENT_POLL_S = 0.002
"""Seconds between two checks for a sender's next announcement."""


_BACKEND_SLACK = timedelta(seconds=30)
"""The limit of gloo or NCCL is longer than the callers' own time limit by this time."""


def _announcement(number: int) -> str:
    """Return the key, in the rendezvous of a group, of the sender's announcement ``number``."""
    return f"bucket {number}"


class CalledOffError(EngineError):
    """Another rank cancelled the transfer. The error of that rank has the cause."""


class ConnectionBrokenError(EngineError):
    """gloo or NCCL lost a connection to an engine, or could not make one."""


@contextmanager
def _raising_connection_broken() -> Iterator[None]:
    """Convert torch's errors in the block to ConnectionBrokenError."""
    # torch raises a plain RuntimeError for most errors of gloo and NCCL.
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBrokenError(str(error)) from error


def call_off(address: str, port: int) -> None:
    """Make the ranks of the group with the rendezvous ``address``:``port`` stop waiting. Never raises."""
    limit = timedelta(seconds=_CANCEL_S)
    try:
        store = dist.TCPStore(address, port, None, False, limit, wait_for_workers=False)
        store.set(CALLED_OFF, "1")
    except (RuntimeError, OSError) as error:
        # The rendezvous no longer exists: the process that held it has ended or left the group.
        log.info("weight transfer: %s:%d was not told to stop: %s", address, port, error)


class BroadcastGroup:
    """A process group of this process and ``ranks`` engine ranks. The future ``joined`` is done when all have joined.

    This process, a sender, has rank 0 in the group. Each sender of the trainer has a group of its own.

    The engine ranks need ``address``, ``port``, ``name`` and ``backend`` to join. The rendezvous listens on a free port
    of ``address`` only.
    """

    def __init__(self, *, ranks: int, address: str, device: str, timeout_s: float) -> None:
        # This limit is the last resort. The callers' own limits end first, with errors that name the slow operation.
        self._backend_limit = timedelta(seconds=timeout_s) + _BACKEND_SLACK
        self.name = new_name(self._backend_limit)
        self.address = address
        self.backend = BACKENDS[device]
        self._group: dist.ProcessGroup | None = None
        limit = timedelta(seconds=timeout_s)
        self._store = listening_store(address, 0, ranks + 1, limit, wait_for_workers=False)
        self.port = self._store.port
        self._device = device
        self.joined: Future[None] = in_background(partial(self._join, ranks + 1))
        self._connected: Future[None] | None = None
        self._announced = 0
        self._stream: torch.cuda.Stream | None = None

    def announce(self, value: int) -> None:
        """Publish a ``value`` about the next bucket. The trainer's rank 0 reads the value by ``Announcements``."""
        self._store.set(_announcement(self._announced), str(value))
        self._announced += 1

    def wait(self, future: Future[None]) -> None:
        """Wait for ``future`` of this group, or until a rank cancels the whole transfer.

        Raises CalledOffError, or the exception of the future.
        """
        # Wait without a time limit: the engines may have to load other senders' buckets first. The trainer's rank 0
        # limits the time of each request to the engines. If a request takes longer, rank 0 cancels the transfer.
        while not wait([future], _CANCEL_POLL_S).done:
            if self._store.check([CALLED_OFF]):
                raise CalledOffError("another rank called the weight transfer off")
        future.result()

    def _join(self, size: int) -> None:
        """Make the group of ``size`` ranks; return when all of them have joined."""
        limit = self._backend_limit
        options = None
        if self.backend == "gloo":
            options = _gloo_options(self.address, limit)
        # Use the helper that makes the group in the engines too: both sides must use the same keys in the store.
        with _raising_connection_broken(), errors_abort_the_group(self.backend):
            group, _ = c10d._new_process_group_helper(
                size,
                0,
                [],
                c10d.Backend(self.backend),
                dist.PrefixStore(self.name, self._store),
                group_name=GroupName(self.name),
                backend_options=options,
                timeout=limit,
            )
        # ``destroy_process_group`` expects this entry, and the helper leaves it to its callers.
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group

    def connect(self, size: int) -> Future[None]:
        """Start a broadcast of ``size`` bytes: NCCL's ranks connect in their first broadcast. Later calls return the
        future of the first call."""
        if self._connected is None:
            probe = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._connected = self.broadcast(probe)
        return self._connected

    def broadcast(self, data: Tensor) -> Future[None]:
        """Start a broadcast of ``data``. All ranks must enter it. The future is done when ``data`` may change."""
        # Use a thread, because NCCL's first broadcast returns only when all ranks are connected.
        assert self._group is not None
        filled = None
        if data.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(data.device)
            filled = (torch.cuda.current_stream(data.device).record_event(), self._stream)
        return in_background(partial(_broadcast, data, self._group, self._backend_limit, filled))

    def abort(self) -> None:
        """Abort the group, on the engines' side too: their ranks watch the rendezvous for CALLED_OFF."""
        if self._group is not None:
            self._store.set(CALLED_OFF, "1")
            # Keep the rendezvous open until the engines have read the key: the timer holds a reference to the store.
            holder = threading.Timer(_CANCEL_S, _drop, [self._store])
            holder.daemon = True
            holder.start()
            self._group.abort()
            dist.destroy_process_group(self._group)
            self._group = None


class Announcements:
    """Reads, on the trainer's rank 0, the values that a sender announces, in order.

    ``address`` and ``port``: the rendezvous of the sender's group.
    """

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self._timeout = timeout_s
        self._read = 0
        limit = timedelta(seconds=timeout_s)
        with _raising_connection_broken():
            self._store = dist.TCPStore(address, port, None, False, limit, wait_for_workers=False)

    def next(self) -> int:
        """Wait for the next value.

        Raises CalledOffError if the transfer is cancelled meanwhile, and ConnectionBrokenError if the sender is gone or
        announces nothing within the time limit.
        """
        key = _announcement(self._read)
        deadline = time.monotonic() + self._timeout
        with _raising_connection_broken():
            while not self._store.check([key]):
                if self._store.check([CALLED_OFF]):
                    raise CalledOffError("the sender called the weight transfer off")
                if time.monotonic() > deadline:
                    raise ConnectionBrokenError(
                        f"a sender announced no bucket within {self._timeout:.0f} s"
                    )
                time.sleep(_ANNOUNCEMENT_POLL_S)
            value = int(self._store.get(key))
            self._store.delete_key(key)
        self._read += 1
        return value


def _drop(store: dist.Store) -> None:
    """Do nothing: the call releases the last reference to ``store``."""


def _broadcast(
    data: Tensor,
    group: dist.ProcessGroup,
    limit: timedelta,
    filled: tuple[torch.cuda.Event, torch.cuda.Stream] | None,
) -> None:
    """Broadcast ``data`` and wait until it may change.

    ``filled``, on a GPU: an event that was recorded after ``data`` was filled, and the stream for the broadcast. Not
    yet run on a GPU.
    """
    # This frame keeps a reference to ``group`` on purpose. gloo cannot cancel a broadcast, and releasing the last
    # reference to the group would block.
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    if filled is None:
        with _raising_connection_broken():
            group.broadcast([data], options).wait(limit)
        return
    event, stream = filled
    # NCCL starts after all work in the current stream, and wait() blocks the current stream until the broadcast ends.
    # Without ``stream``, the current stream would be the default stream, which gathers and hashes the next bucket
    # meanwhile. ``stream`` waits only for the event that ``data`` is filled.
    # ``data`` stays unchanged until synchronize returns: ``Packer`` keeps ``data`` during its next call, and the caller
    # waits for this broadcast before the call after that. This frame keeps ``data`` from being freed.
    with _raising_connection_broken(), torch.cuda.stream(stream):
        stream.wait_event(event)
        group.broadcast([data], options).wait(limit)
        # NCCL's wait() blocks only the stream, not this thread.
        stream.synchronize()


def _gloo_options(address: str, limit: timedelta) -> Any:
    """Return gloo's options to listen on ``address`` only, even if the machine's name resolves to another address."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return options


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
