"""torch.distributed's rendezvous, listening on one address: torch's own listens on every interface."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from megatron_dppo.system.interfaces import resolve


class ListenError(RuntimeError):
    """An address can't be listened on; the message names it, and the system's reason."""


def listening_store(
    host: str, port: int, world_size: int | None, timeout: timedelta, **options: Any
) -> TCPStore:
    """The store that the others connect to, on ``host`` only; a free port where ``port`` is 0.

    ``options``: of TCPStore. Raises ListenError where the address can't be bound.
    """
    try:
        address = resolve(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise ListenError(f"can't listen on {host}:{port}: {error.strerror} ({code})") from error
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        world_size,
        True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        **options,
    )
