"""A process group of trainer rank 0 and the engine's ranks whose every step ends in bounded time.

The engine enters a broadcast upon an HTTP request, so each step is two halves that run
concurrently, ours and the engine's. The first to fail ends both: a dead engine breaks its
connections at once, a hung one runs into the time limit.
"""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Of torch.distributed, by the engine's device."""


class TransferTimeoutError(RuntimeError):
    """A broadcast or its group wasn't through in time."""


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in a thread that doesn't keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_all(futures: list[Future[None]], timeout_s: float, what: str) -> None:
    """Wait for all, or raise the first failure at once, TransferTimeoutError after ``timeout_s``."""
    done, pending = wait(futures, timeout_s, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future in done:
            future.result()
    if pending:
        raise TransferTimeoutError(f"{what} took longer than {timeout_s:.0f} s")


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
    """Rank 0 of a group; ``invite(address, port, name, backend)`` makes ``ranks`` others join.

    The rendezvous listens on a free port of ``address`` only. Raises what ``invite`` raises,
    TransferTimeoutError.
    """

    def __init__(
        self,
        invite: Callable[[str, int, str, str], None],
        *,
        ranks: int,
        address: str,
        device: str,
        timeout_s: float,
    ) -> None:
        self.name = f"weights-{uuid.uuid4().hex[:12]}"
        self._timeout = timeout_s
        # Longer than our own limit, so that the error says what took too long.
        self._backend_limit = timedelta(seconds=timeout_s + 30)
        self._group: dist.ProcessGroup | None = None
        backend = BACKENDS[device]
        listener = socket.create_server((address, 0), family=_family(address))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            ranks + 1,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        joined = in_background(lambda: self._join(store, ranks + 1, address, backend))
        invited = in_background(lambda: invite(address, port, self.name, backend))
        wait_all([invited, joined], timeout_s, f"opening the broadcast group {self.name}")

    def _join(self, store: dist.TCPStore, size: int, address: str, backend: str) -> None:
        limit = self._backend_limit
        # The engine makes its group with this helper, too: both sides must name their keys alike.
        group, _ = c10d._new_process_group_helper(
            size,
            0,
            [],
            c10d.Backend(backend),
            dist.PrefixStore(self.name, store),
            group_name=GroupName(self.name),
            backend_options=_gloo_options(address, limit) if backend == "gloo" else None,
            timeout=limit,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group

    def broadcast(self, data: Tensor, receive: Callable[[], None]) -> Callable[[], None]:
        """Start sending ``data`` while ``receive`` has the others take it; returns the wait."""
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        received = in_background(receive)
        work = self._group.broadcast([data], options)
        sent = in_background(partial(_finish, work, self._group, self._backend_limit))
        what = f"a broadcast of {data.numel()} bytes"
        return lambda: wait_all([received, sent], self._timeout, what)

    def abort(self) -> None:
        """Break the group's connections; both sides' pending broadcasts fail."""
        if self._group is not None:
            self._group.abort()
            dist.destroy_process_group(self._group)
            self._group = None


def _finish(work: dist.Work, group: dist.ProcessGroup, limit: timedelta) -> None:
    """Wait for ``work``, holding its ``group``: gloo can't cancel, and blocks who drops a busy one."""
    work.wait(limit)


def _gloo_options(address: str, limit: timedelta) -> Any:
    """Listen on ``address`` only, whatever the machine's name resolves to."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return options


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
