"""A process group of trainer ranks and engine ranks, for weights."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.system.network import listening_store, source_address
from megatron_dppo.weights.links import (
    BUSY_CONNECT_S,
    Link,
    connect_store,
    in_background,
    raising_connection_broken,
    wait_unless_called_off,
)
from megatron_dppo.weights.server.weight_groups import CALLED_OFF, errors_abort_the_group, new_name

log = logging.getLogger(__name__)


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend of torch.distributed for each device of the engine."""


_CANCEL_S = 5.0
"""An aborted group's rendezvous stays open for this time, so that its engine ranks can read the cancellation."""


_BACKEND_SLACK = timedelta(seconds=30)
"""The limit of gloo or NCCL is longer than the callers' own time limit by this time."""


def call_off(address: str, port: int) -> None:
    """Make the ranks of the group with the rendezvous ``address``:``port`` stop waiting. Never raises."""
    try:
        connect_store(address, port).set(CALLED_OFF, "1")
    except (EngineError, RuntimeError, OSError) as error:
        # The rendezvous no longer exists: the process that held it has ended or left the group.
        log.info("weight transfer: %s:%d was not told to stop: %s", address, port, error)


class WeightGroup:
    """A process group of trainer ranks and ``ranks`` engine ranks. The future ``joined`` is done when all have joined.

    The trainer ranks come first in the group. Its rank 0, which is this process by default, opens the rendezvous.

    The other ranks need ``address``, ``port``, ``name`` and ``backend`` to join. The rendezvous listens on a free port
    of ``address`` only.

    Args:
        ranks: number of engine ranks.
        address: address of the rendezvous.
        device: the engines' device, "cpu" or "cuda".
        timeout_s: time limit of joining, and of transfers.
        members: number of trainer ranks.
        rank: this process's rank in the group.
        port: port of the rendezvous, for ranks other than 0.
        name: name of the group, for ranks other than 0.
    """

    def __init__(
        self,
        *,
        ranks: int,
        address: str,
        device: str,
        timeout_s: float,
        members: int = 1,
        rank: int = 0,
        port: int = 0,
        name: str = "",
    ) -> None:
        # This limit is the last resort. The callers' own limits end first, with errors that name the slow operation.
        self._backend_limit = timedelta(seconds=timeout_s) + _BACKEND_SLACK
        self.name = name or new_name(self._backend_limit)
        self.address = address
        self.backend = BACKENDS[device]
        self._group: dist.ProcessGroup | None = None
        size = members + ranks
        if rank:
            self._store = connect_store(address, port, timeout_s)
        else:
            limit = timedelta(seconds=timeout_s)
            self._store = listening_store(address, 0, size, limit, wait_for_workers=False)
        self.port = self._store.port
        self._device = device
        self._is_aborted = False
        self.joined: Future[None] = in_background(partial(self._join, size, rank))

    def wait(self, future: Future[None]) -> None:
        """Wait for ``future`` of this group, or until a rank cancels the whole transfer.

        Raises CalledOffError, or the exception of the future.
        """
        # Wait without a time limit: the trainer's rank 0 limits the time of each request to the engines. If a request
        # takes longer, rank 0 cancels the transfer.
        wait_unless_called_off(future, self._watched_store)

    @cached_property
    def _watched_store(self) -> dist.TCPStore:
        """A connection to the rendezvous in which no call waits. The thread that joins waits in ``_store``."""
        return connect_store(self.address, self.port, BUSY_CONNECT_S)

    def is_called_off(self) -> bool:
        """Return whether a rank has called the transfer off."""
        with raising_connection_broken():
            return bool(self._watched_store.check([CALLED_OFF]))

    def link(self, device: torch.device) -> Link:
        """Return the link for transfers between ranks, after all have joined. ``device``: that of the bytes."""
        assert self._group is not None
        return Link(self._group, self._watched_store, self._backend_limit, device)

    def _join(self, size: int, rank: int) -> None:
        """Make the group of ``size`` ranks, this one ``rank``; return when all of them have joined."""
        limit = self._backend_limit
        options = None
        if self.backend == "gloo":
            # Each rank listens on its host's address in the network of the rendezvous.
            address = source_address(self.address) if rank else self.address
            options = _gloo_options(address, limit)
        # Use the helper that makes the group in the engines too: both sides must use the same keys in the store.
        with raising_connection_broken(), errors_abort_the_group(self.backend):
            group, _ = c10d._new_process_group_helper(
                size,
                rank,
                [],
                c10d.Backend(self.backend),
                dist.PrefixStore(self.name, self._store),
                group_name=GroupName(self.name),
                backend_options=options,
                timeout=limit,
            )
        # ``destroy_process_group`` expects this entry, and the helper leaves it to its callers.
        c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
        self._group = group
        if self._is_aborted:
            self._leave(group)

    def connect(self, size: int) -> Future[None]:
        """Start a broadcast of ``size`` bytes, in which NCCL's ranks connect. All ranks must enter it."""
        assert self._group is not None
        data = torch.zeros(size, dtype=torch.uint8, device=self._device)
        # Use a thread, because NCCL's first operation returns only when all ranks are connected.
        return in_background(partial(_broadcast, data, self._group, self._backend_limit))

    def abort(self) -> None:
        """Abort the group, on the engines' side too: their ranks watch the rendezvous for CALLED_OFF."""
        # The thread that joins leaves the group once it has joined.
        self._is_aborted = True
        group = self._group
        if group is not None:
            self._store.set(CALLED_OFF, "1")
            # Keep the rendezvous open until the engines have read the key: the timer holds a reference to the store.
            holder = threading.Timer(_CANCEL_S, _drop, [self._store])
            holder.daemon = True
            holder.start()
            self._leave(group)

    def _leave(self, group: dist.ProcessGroup) -> None:
        group.abort()
        dist.destroy_process_group(group)
        self._group = None


def _drop(store: dist.Store) -> None:
    """Do nothing: the call releases the last reference to ``store``."""


def _broadcast(data: Tensor, group: dist.ProcessGroup, limit: timedelta) -> None:
    """Broadcast ``data`` from rank 0, and wait until it has arrived. Not yet run on a GPU."""
    # This frame keeps a reference to ``group`` on purpose. gloo cannot cancel a broadcast, and releasing the last
    # reference to the group would block.
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    with raising_connection_broken():
        group.broadcast([data], options).wait(limit)
        if data.is_cuda:
            # NCCL's wait() blocks only the stream, not this thread.
            torch.cuda.current_stream(data.device).synchronize()


def _gloo_options(address: str, limit: timedelta) -> Any:
    """Return gloo's options to listen on ``address`` only, even if the machine's name resolves to another address."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return options
