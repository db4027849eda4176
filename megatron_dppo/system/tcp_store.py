"""torch.distributed's rendezvous, listening on one address: torch's own listens on every interface."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from megatron_dppo.system.interfaces import resolve


def listening_store(
    host: str, port: int, world_size: int | None, timeout: timedelta, **options: Any
) -> TCPStore:
    """The store that the others connect to, on ``host`` only; a free port where ``port`` is 0.

    ``options``: of TCPStore. Raises OSError where the address can't be bound.
    """
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=2048)
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        world_size,
        True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        **options,
    )
