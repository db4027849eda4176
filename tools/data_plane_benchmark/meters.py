"""Seconds, memory and bytes of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

_SAMPLE_S = 0.02


def memory_bytes(*names: str) -> int:
    """Bytes of this process by the names of ``/proc/self/status``: RssAnon, RssShmem, RssFile."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return sum(int(found[name].split()[0]) * 1024 for name in names)


@dataclass
class Meter:
    """Figures by phase: ``wall`` and ``cpu`` seconds (all threads), ``peak`` private bytes above the phase's start."""

    phases: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as phase ``name``."""
        done = threading.Event()
        base = memory_bytes("RssAnon")
        peak = [base]

        def sample() -> None:
            while not done.wait(_SAMPLE_S):
                peak[0] = max(peak[0], memory_bytes("RssAnon"))

        sampler = threading.Thread(target=sample)
        sampler.start()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            peak[0] = max(peak[0], memory_bytes("RssAnon"))
            done.set()
            sampler.join()
            self.phases[name] = {**spent, "peak": peak[0] - base}


class ReceivedBytes:
    """Counts the bytes that this rank receives by collectives and receives. ``total``: bytes so far."""

    def __init__(self) -> None:
        self.total = 0
        broadcast, gather, exchange = dist.broadcast, dist.all_gather, dist.batch_isend_irecv

        def counted_broadcast(tensor: Any, src: int, *args: Any, **kwargs: Any) -> Any:
            self.total += tensor.nbytes * (src != dist.get_rank())
            return broadcast(tensor, src, *args, **kwargs)

        def counted_gather(parts: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.total += sum(part.nbytes for part in parts) - tensor.nbytes
            return gather(parts, tensor, *args, **kwargs)

        def counted_exchange(operations: Any) -> Any:
            self.total += sum(p.tensor.nbytes for p in operations if p.op is dist.irecv)
            return exchange(operations)

        module: Any = dist
        module.broadcast = counted_broadcast
        module.all_gather = counted_gather
        module.batch_isend_irecv = counted_exchange
