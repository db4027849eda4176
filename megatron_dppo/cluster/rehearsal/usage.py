"""Measure processor time and memory of a run's processes by phase, separately for ranks and for other processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from megatron_dppo.system.processes import is_rank_name

MIB = 1 << 20


@dataclass(frozen=True)
class UsageSample:
    """Memory and processor time of a run's processes at one time.

    Attributes:
        ranks: bytes of each rank.
        others: bytes of servers, router and workers together.
        is_proportional: whether the bytes of a shared page are divided among its processes. Otherwise the whole page
            counts for each process.
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
    """Usage of one phase.

    Attributes:
        seconds: wall-clock seconds.
        rank_seconds: processor seconds of all ranks.
        other_seconds: processor seconds of all other processes.
        fullest: the sample with the most memory; None if no sample has a rank.
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
    _seconds_of_process: dict[psutil.Process, float] = field(default_factory=dict)
    _last_time: float | None = None

    def begin(self) -> None:
        """Start the clock at the start of a run."""
        self._last_time = time.monotonic()

    def add(self, phase: str, sample: UsageSample) -> None:
        """Add the usage since the previous sample to ``phase``."""
        usage = self.by_phase.setdefault(phase, PhaseUsage())
        now = time.monotonic()
        if self._last_time is not None:
            usage.seconds += now - self._last_time
        self._last_time = now
        usage.rank_seconds += self._increase(sample.rank_seconds)
        usage.other_seconds += self._increase(sample.other_seconds)
        fullest = usage.fullest
        if sample.ranks and (fullest is None or sample.total > fullest.total):
            usage.fullest = sample

    def _increase(self, seconds: Mapping[psutil.Process, float]) -> float:
        """Return the processor seconds of these processes since their previous samples."""
        increase = 0.0
        for process, value in seconds.items():
            increase += value - self._seconds_of_process.get(process, 0.0)
        self._seconds_of_process |= seconds
        return increase


def usage_of(root: int) -> UsageSample:
    """Measure all descendants of the process ``root``."""
    ranks: list[int] = []
    others = 0
    is_proportional = True
    rank_seconds: dict[psutil.Process, float] = {}
    other_seconds: dict[psutil.Process, float] = {}
    try:
        descendants = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    for process in descendants:
        try:
            try:
                size = process.memory_full_info().pss
            except psutil.AccessDenied:
                is_proportional = False
                size = process.memory_info().rss
            times = process.cpu_times()
            is_rank = is_rank_name(process.name())
        except psutil.NoSuchProcess:
            continue
        seconds = times.user + times.system
        if is_rank:
            ranks.append(size)
            rank_seconds[process] = seconds
        else:
            others += size
            other_seconds[process] = seconds
    return UsageSample(tuple(ranks), others, is_proportional, rank_seconds, other_seconds)
