"""Ranks of a process group as threads of one process, for collectives in unit tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

ResultT = TypeVar("ResultT")
_TIMEOUT = timedelta(seconds=30)


def on_ranks(ranks: int, function: Callable[[ProcessGroup], ResultT]) -> list[ResultT]:
    """Call ``function`` with each rank's gloo group, all at the same time, and return the results by rank."""
    store = HashStore()

    def run(rank: int) -> ResultT:
        group = ProcessGroup(store, rank, ranks)
        gloo = ProcessGroup.BackendType.GLOO
        backend = ProcessGroupGloo(store, rank, ranks, _TIMEOUT)
        group._set_default_backend(gloo)
        group._register_backend(torch.device("cpu"), gloo, backend)
        return function(group)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))
