"""Measure one call on a CPU or a GPU: its time, its memory and its collectives."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


class Clock:
    """A clock of wall and CPU milliseconds since its construction. The start and each reading wait for the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._wait()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def read(self) -> tuple[float, float]:
        """Return the wall-clock milliseconds, and the CPU milliseconds of all threads of this process."""
        self._wait()
        return ((time.perf_counter() - self._wall) * 1e3, (time.process_time() - self._cpu) * 1e3)


def peak_extra_bytes(device: str, call: Callable[[], object]) -> int:
    """Return the peak memory of ``call`` minus the memory before it, bytes.

    On a CPU the peak is the kernel's high-water mark of this process's resident memory. The function resets the mark
    before ``call``.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - bytes_before
    # Return the allocator's free memory to the system: a call that reuses it would show no peak.
    ctypes.CDLL(None).malloc_trim(0)
    # 5 resets the high-water mark of resident memory (Linux, proc_pid_clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    bytes_before = _status_kib("VmRSS")
    call()
    return max(0, _status_kib("VmHWM") - bytes_before) * 1024


def _status_kib(field: str) -> int:
    """Return a field of this process's status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


@dataclass
class Collectives:
    """Counts of all-reduces: floating-point payloads with their bytes, and integer headers."""

    payloads: int = 0
    payload_bytes: int = 0
    headers: int = 0


@contextmanager
def counted_collectives() -> Iterator[Collectives]:
    """Count the calls of torch.distributed.all_reduce inside the block."""
    counts = Collectives()
    original = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        if tensor.is_floating_point():
            counts.payloads += 1
            counts.payload_bytes += tensor.numel() * tensor.element_size()
        else:
            counts.headers += 1
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield counts
    finally:
        dist.all_reduce = original


def copy_bandwidth(device: str, numel: int, dtype: torch.dtype) -> float:
    """Measure the GB/s (read plus write) of a plain copy of ``numel`` elements; the best of 5."""
    source = torch.ones(numel, dtype=dtype, device=device)
    target = torch.empty_like(source)
    best_ms = float("inf")
    for _ in range(5):
        clock = Clock(device)
        target.copy_(source)
        wall_ms, _ = clock.read()
        best_ms = min(best_ms, wall_ms)
    copied_bytes = 2 * numel * source.element_size()
    # bytes / ms / 1e6 = GB/s.
    return copied_bytes / best_ms / 1e6
