"""The group of a weight update: what trainer and server agree on, and hooks for the server's side.

A group has the trainer ranks that send, and then all ranks of the servers. This module changes three defaults of torch
and SGLang:

- Errors. By default an error or a timeout of NCCL ends the whole process. While a group is made, NCCL's error mode is
  to abort only the group.
- Time limits. By default a server waits for 30 minutes. Here the group's name carries a time limit, and a hook sets
  this limit in the server, for the rendezvous too. If nothing listens at the rendezvous, the server refuses to join.
- Answers. By default SGLang answers a request to receive weights before the bytes have arrived, so that the request's
  time limit does not limit the transfer. Here a server answers once the bytes are in its tensors.

The trainer must also be able to free the servers' ranks from a transfer that has failed. In a gloo group the trainer's
abort frees all ranks. In an NCCL group over NVLink it does not: each rank must abort its own part of the group. So a
thread of each server rank watches the rendezvous of an NCCL group, which is on the trainer's host, and aborts once the
trainer has called the transfer off or is gone.

The functions are plugin hooks of SGLang. The part for gloo is tested; the part for NCCL is not yet run on a GPU.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_dppo.engine.server import hooks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, TCPStore

log = logging.getLogger(__name__)

CALLED_OFF = "called off"
"""Key in a group's rendezvous. Once it is set, the transfer has failed and every rank leaves the group."""
ERROR_MODE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable with NCCL's error mode. torch reads the variable in the constructor of each NCCL group."""
ABORT_GROUP = "2"
"""In this error mode torch aborts a failed group's communicators, and does not end the process."""
_NAME = re.compile(r"weights-[0-9a-f]{12}-(\d+)s")
_ERROR_MODE_LOCK = threading.Lock()
"""Guards the process's variable ERROR_MODE."""
_DEFAULT_LIMIT_LOCK = threading.Lock()
"""Guards torch's default limit in this process."""


def new_name(limit: timedelta) -> str:
    """Return a name for a new group. The name carries the time ``limit`` of the group's operations."""
    return f"weights-{uuid.uuid4().hex[:12]}-{math.ceil(limit.total_seconds())}s"


def limit_of(name: str) -> timedelta | None:
    """Return the time limit in a group's name; None for a name that ``new_name`` did not make."""
    match = _NAME.fullmatch(name)
    if match:
        return timedelta(seconds=int(match.group(1)))
    return None


@contextmanager
def errors_abort_the_group(backend: str) -> Iterator[None]:
    """Make an error of a group that is made in the block end the group and not the process.

    ``backend``: the group's backend. Only NCCL needs this.
    """
    if backend != "nccl":
        yield
        return
    with _ERROR_MODE_LOCK:
        previous_value = os.environ.get(ERROR_MODE)
        os.environ[ERROR_MODE] = ABORT_GROUP
        try:
            yield
        finally:
            if previous_value is None:
                del os.environ[ERROR_MODE]
            else:
                os.environ[ERROR_MODE] = previous_value


@contextmanager
def default_limit(limit: timedelta | None) -> Iterator[None]:
    """Within the block, make ``limit`` torch's default limit of a group and of its rendezvous; None: torch's own limit.

    SGLang uses the default for both. Torch's own default is 30 minutes: for this time a server would try to reach the
    rendezvous of a trainer that has died, and would answer nothing.
    """
    from torch.distributed import distributed_c10d

    if limit is None:
        yield
        return
    with _DEFAULT_LIMIT_LOCK:
        previous_limit = distributed_c10d.default_pg_timeout
        distributed_c10d.default_pg_timeout = limit
        try:
            yield
        finally:
            distributed_c10d.default_pg_timeout = previous_limit


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
JOINING = f"{_UPDATER}.init_weights_update_group"
LOADING = f"{_UPDATER}.load_weights_from_distributed"
_POLL_S = 0.2
"""Pause between two looks at the rendezvous."""
_CONNECT_S = 5.0
_ATTEMPTS = 3
"""Number of failed looks in a row after which the trainer counts as gone."""


def register() -> None:
    """Register the hooks, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(JOINING, join, "around")
    hooks.register(LOADING, wait_for_bytes, "after")


def join(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Join a group by SGLang's ``original`` method, set its time limit, and watch whether the trainer calls it off."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    limit = limit_of(group_name)
    # Rank 0 of a group makes the rendezvous itself. For every other rank the rendezvous must exist already.
    if limit is not None and rank_offset > 0:
        fault = rendezvous_fault(master_address, master_port)
        if fault is not None:
            return False, fault
    with errors_abort_the_group(backend), default_limit(limit):
        answer = original(
            updater, master_address, master_port, rank_offset, world_size, group_name, backend
        )
    groups = updater._model_update_group
    if group_name not in groups or limit is None:
        return answer
    _set_pg_timeout(limit, groups[group_name])
    if backend == "nccl":
        GroupWatch(master_address, master_port, groups, group_name).start()
    return answer


def wait_for_bytes(result: tuple[bool, str], updater: Any, *_: Any) -> tuple[bool, str]:
    """Hook after SGLang has queued received tensors for loading: wait until the bytes are in the tensors."""
    if not str(updater.device).startswith("cuda"):
        return result
    import torch

    try:
        torch.cuda.current_stream().synchronize()
    except RuntimeError as error:
        return False, f"the bytes of a tensor did not arrive: {error}"
    return result


class GroupWatch:
    """Aborts this rank's part of an NCCL group once the trainer has called the transfer off, or is gone.

    Args:
        address: the host of the group's rendezvous.
        port: the port of the group's rendezvous.
        groups: the groups that this rank is in, by name. The watch ends when ``name`` is not among them.
        name: the group's name.
    """

    def __init__(
        self, address: str, port: int, groups: MutableMapping[str, ProcessGroup], name: str
    ) -> None:
        self._address = address
        self._port = port
        self._groups = groups
        self._name = name
        self._store: TCPStore | None = None

    def start(self) -> None:
        """Watch from a thread that does not keep the process alive."""
        threading.Thread(target=self.run, daemon=True, name="weight-group-watch").start()

    def run(self) -> None:
        """Watch until the rank has left the group, or the group is aborted."""
        failures = 0
        while self._name in self._groups:
            reason = ""
            try:
                if self._is_called_off():
                    reason = "the trainer called the transfer off"
                failures = 0
            except RuntimeError as error:
                self._store = None
                failures += 1
                if failures == _ATTEMPTS:
                    reason = f"the trainer is gone: {error}"
            if reason:
                self._abort(reason)
                return
            time.sleep(_POLL_S)

    def _abort(self, reason: str) -> None:
        # Remove the group first, so that no transfer begins in it. In an aborted group a transfer would fail, or wait
        # for the group's time limit.
        group = self._groups.pop(self._name, None)
        if group is not None:
            log.warning("weight update: the weight group is aborted: %s", reason)
            group.abort()

    def _is_called_off(self) -> bool:
        # Do not use the group's own connection: it may be inside a call.
        self._store = self._store or rendezvous_client(self._address, self._port)
        return bool(self._store.check([CALLED_OFF]))


def rendezvous_fault(address: str, port: int) -> str | None:
    """Return why a group's rendezvous cannot be reached, or None.

    The trainer opens the rendezvous before the trainer calls this server.
    """
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except OSError as error:
        return (
            f"no rendezvous of the weight group at {address}:{port}, the trainer is gone: {error}"
        )
    return None


def rendezvous_client(address: str, port: int) -> TCPStore:
    """Connect to a group's rendezvous. Raises RuntimeError."""
    from torch.distributed import TCPStore

    limit = timedelta(seconds=_CONNECT_S)
    return TCPStore(address, port, None, False, limit, wait_for_workers=False)
