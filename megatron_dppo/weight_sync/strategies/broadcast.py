"""A process group of one trainer rank and the engines' ranks.

An engine enters the group, and each broadcast, upon an HTTP request of rank 0: this is the half of
the rank that sends. A dead engine breaks its connections at once; a hung one runs into the time
limit of the request.
"""

from __future__ import annotations

import logging
import socket
import uuid
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_dppo.system.background import in_background

log = logging.getLogger(__name__)

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Of torch.distributed, by the engine's device."""
_CALLED_OFF = "called off"
_LISTEN_S = 0.2
_CALL_S = 5.0
_SLACK = timedelta(seconds=30)


class CalledOffError(RuntimeError):
    """The conducting rank gave the transfer up; it knows why."""


def call_off(address: str, port: int) -> None:
    """Tell the rank whose rendezvous is at ``address`` to stop waiting. Never raises."""
    limit = timedelta(seconds=_CALL_S)
    try:
        store = dist.TCPStore(address, port, None, False, limit, wait_for_workers=False)
        store.set(_CALLED_OFF, "1")
    except (RuntimeError, OSError) as error:  # it is gone, or has broken its group off itself
        log.info("weight transfer: %s:%d was not told to stop: %s", address, port, error)


def local_address(url: str) -> str:
    """This machine's address on the network that leads to ``url``.

    Loopback for an engine on the same machine.
    """
    place = urlsplit(url)
    target = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        probe.connect(target[4])
        return str(probe.getsockname()[0])


class BroadcastGroup:
    """This process, as rank 0, and ``ranks`` more. ``joined`` is done when all are in.

    The others must be told ``address``, ``port``, ``name`` and ``backend``. The rendezvous listens
    on a free port of ``address`` only.
    """

    def __init__(self, *, ranks: int, address: str, device: str, timeout_s: float) -> None:
        self.name = f"weights-{uuid.uuid4().hex[:12]}"
        self.address = address
        self.backend = BACKENDS[device]
        # Whoever waits has a limit of its own, which says what took too long: this one is the last.
        self._backend_limit = timedelta(seconds=timeout_s) + _SLACK
        self._group: dist.ProcessGroup | None = None
        listener = socket.create_server((address, 0), family=_family(address))
        self.port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(
            address,
            self.port,
            ranks + 1,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.joined: Future[None] = in_background(partial(self._join, ranks + 1))

    def wait(self, future: Future[None]) -> None:
        """Wait for ``future`` of this group, or until someone calls the whole transfer off.

        Time is kept by who gives the engines their orders, which includes waiting for other ranks'
        buckets; this side only listens. Raises CalledOffError, or what the future raises.
        """
        while not wait([future], _LISTEN_S).done:
            if self._store.check([_CALLED_OFF]):
                raise CalledOffError("another rank called the weight transfer off")
        future.result()

    def _join(self, size: int) -> None:
        limit = self._backend_limit
        # An engine makes its group with this helper, too: both sides must name their keys alike.
        group, _ = c10d._new_process_group_helper(
            size,
            0,
            [],
            c10d.Backend(self.backend),
            dist.PrefixStore(self.name, self._store),
            group_name=GroupName(self.name),
            backend_options=_gloo_options(self.address, limit) if self.backend == "gloo" else None,
            timeout=limit,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group

    def broadcast(self, data: Tensor) -> Future[None]:
        """Start sending ``data``; the others must enter the same broadcast. Done when it is out."""
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._group.broadcast([data], options)
        return in_background(partial(_finish, work, data, self._group, self._backend_limit))

    def abort(self) -> None:
        """Break the group's connections; both sides' pending broadcasts fail."""
        if self._group is not None:
            self._group.abort()
            dist.destroy_process_group(self._group)
            self._group = None


def _finish(work: dist.Work, data: Tensor, group: dist.ProcessGroup, limit: timedelta) -> None:
    """Wait until ``data`` may change, holding ``group``: gloo can't cancel, and blocks who drops a
    busy one.
    """
    work.wait(limit)
    if data.is_cuda:  # NCCL's wait is for the stream only
        torch.cuda.current_stream(data.device).synchronize()


def _gloo_options(address: str, limit: timedelta) -> Any:
    """Listen on ``address`` only, whatever the machine's name resolves to."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return options


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
