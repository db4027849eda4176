"""Measure processor time and memory of a run's processes by phase, separately for ranks and for other processes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_dppo.system.processes import is_rank_name

_PROPORTIONAL = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
MIB = 1 << 20


@dataclass(frozen=True)
class UsageSample:
    """Memory and processor time of a run's processes at one time.

    Attributes:
        ranks: bytes of each rank.
        others: bytes of servers, router and workers together.
        is_proportional: whether the bytes of a shared page are divided among its processes; otherwise each process
            counts all of them.
        rank_seconds: processor seconds of each rank since its start.
        other_seconds: processor seconds of each other process since its start.
    """

    ranks: tuple[int, ...]
    others: int
    is_proportional: bool
    rank_seconds: Mapping[psutil.Process, float] = field(default_factory=dict)
    other_seconds: Mapping[psutil.Process, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all processes."""
        return sum(self.ranks) + self.others

    @property
    def mean_rank(self) -> float:
        """Mean bytes of a rank."""
        return sum(self.ranks) / max(1, len(self.ranks))


@dataclass
class PhaseUsage:
    """Usage of one phase: wall-clock seconds, processor seconds, and the sample with the most memory (``fullest``).

    ``fullest`` is None if no sample has a rank.
    """

    seconds: float = 0.0
    rank_seconds: float = 0.0
    other_seconds: float = 0.0
    fullest: UsageSample | None = None


@dataclass
class UsageByPhase:
    """Usage of each phase, from samples in the order of time.

    Processor seconds after the last sample of a process are not counted, so the sums are a little too small.
    """

    by_phase: dict[str, PhaseUsage] = field(default_factory=dict)
    _seen: dict[psutil.Process, float] = field(default_factory=dict)
    _measured: float | None = None

    def begin(self) -> None:
        """Start the clock at the start of a run."""
        self._measured = time.monotonic()

    def add(self, phase: str, sample: UsageSample) -> None:
        """Add the usage since the previous sample to ``phase``."""
        usage = self.by_phase.setdefault(phase, PhaseUsage())
        now = time.monotonic()
        usage.seconds += now - (now if self._measured is None else self._measured)
        self._measured = now
        usage.rank_seconds += self._increase(sample.rank_seconds)
        usage.other_seconds += self._increase(sample.other_seconds)
        before = usage.fullest
        if sample.ranks and (before is None or sample.total > before.total):
            usage.fullest = sample

    def _increase(self, seconds: Mapping[psutil.Process, float]) -> float:
        increase = sum(value - self._seen.get(process, 0.0) for process, value in seconds.items())
        self._seen |= seconds
        return increase


def usage_of(root: int) -> UsageSample:
    """Measure all processes below the process ``root``."""
    ranks: list[int] = []
    others, is_proportional = 0, True
    rank_seconds: dict[psutil.Process, float] = {}
    other_seconds: dict[psutil.Process, float] = {}
    try:
        family = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            size = _proportional_bytes(process.pid)
            if size is None:
                is_proportional = False
                size = int(process.memory_info().rss)
            times = process.cpu_times()
            is_rank = is_rank_name(process.name())
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
        seconds = times.user + times.system
        if is_rank:
            ranks.append(size)
            rank_seconds[process] = seconds
        else:
            others += size
            other_seconds[process] = seconds
    return UsageSample(tuple(ranks), others, is_proportional, rank_seconds, other_seconds)


def _proportional_bytes(pid: int) -> int | None:
    """Return the proportional set size; None where the kernel does not show it to this user."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        return None
    match = _PROPORTIONAL.search(text)
    return int(match[1]) * 1024 if match else 0
