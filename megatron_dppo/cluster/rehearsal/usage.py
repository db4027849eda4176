"""Memory of a run's processes while it runs: proportional set sizes of ranks and servers, the largest of each phase."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_dppo.system.processes import is_rank_name

_PROPORTIONAL = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
MIB = 1 << 20


@dataclass(frozen=True)
class MemorySample:
    """Bytes at one moment. ``ranks``: of each rank. ``others``: of servers, router and workers together.

    ``is_proportional``: shared pages are divided by the processes that share them; otherwise each counts them whole.
    """

    ranks: tuple[int, ...]
    others: int
    is_proportional: bool

    @property
    def total(self) -> int:
        """Bytes of all processes."""
        return sum(self.ranks) + self.others

    @property
    def mean_rank(self) -> float:
        """Bytes of a rank, on average."""
        return sum(self.ranks) / max(1, len(self.ranks))


@dataclass
class PeakMemory:
    """The sample with the most memory of each phase."""

    by_phase: dict[str, MemorySample] = field(default_factory=dict)

    def add(self, phase: str, sample: MemorySample) -> None:
        """Keep ``sample`` where it is the largest of its phase."""
        before = self.by_phase.get(phase)
        if sample.ranks and (before is None or sample.total > before.total):
            self.by_phase[phase] = sample


def memory_of(root: int) -> MemorySample:
    """Measure all processes below the process ``root``."""
    ranks, others, is_proportional = [], 0, True
    try:
        family = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            found = _proportional_bytes(process.pid)
            if found is None:
                is_proportional = False
                found = int(process.memory_info().rss)
            if is_rank_name(process.name()):
                ranks.append(found)
            else:
                others += found
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
    return MemorySample(tuple(ranks), others, is_proportional)


def _proportional_bytes(pid: int) -> int | None:
    """The proportional set size; None where the kernel does not show it to this user."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        return None
    found = _PROPORTIONAL.search(text)
    return int(found[1]) * 1024 if found else 0
