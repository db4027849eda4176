"""Which ranks of a replica share a host's memory: one of them receives for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from megatron_dppo.system.shared_buffer import free_bytes, memory_name
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology


@dataclass(frozen=True)
class Site:
    """Ranks of one replica that share memory. ``head``: the one that receives; ``stages``: pipeline
    stages that are there; ``free``: bytes that may be taken of the memory."""

    replica: int
    ranks: tuple[int, ...]
    stages: frozenset[int]
    memory: str
    free: int

    @property
    def head(self) -> int:
        """The lowest rank; where a replica's leader is, the leader."""
        return self.ranks[0]


@dataclass(frozen=True)
class Sites:
    """All sites, in the order of their heads; the same on every rank."""

    all: tuple[Site, ...]

    @classmethod
    def gather(cls, at: Topology) -> Self:
        """Ask every rank where it is. Collective."""
        told = all_gather_json([at.dp_rank, at.pp_rank, memory_name(), free_bytes()])
        return cls.of(told)

    @classmethod
    def of(cls, told: Sequence[Sequence]) -> Self:
        """From (replica, stage, memory, free bytes) of each rank."""
        groups: dict[tuple[int, str], list[int]] = {}
        for rank, (replica, _, memory, _) in enumerate(told):
            groups.setdefault((replica, memory), []).append(rank)
        return cls(
            tuple(
                Site(
                    replica,
                    tuple(ranks),
                    frozenset(told[rank][1] for rank in ranks),
                    memory,
                    min(told[rank][3] for rank in ranks),
                )
                for (replica, memory), ranks in groups.items()
            )
        )

    def within(self, sizes: Mapping[int, int], stage_of: Sequence[int]) -> Sites:
        """The same where each memory takes what its sites want (``sizes`` by head); other sites in single
        ranks, which receive for themselves. ``stage_of``: by rank."""
        wanted: dict[str, int] = {}
        for site in self.all:
            if len(site.ranks) > 1:
                wanted[site.memory] = wanted.get(site.memory, 0) + sizes[site.head]
        kept: list[Site] = []
        for site in self.all:
            if wanted.get(site.memory, 0) <= site.free:
                kept.append(site)
                continue
            kept += [
                Site(site.replica, (r,), frozenset([stage_of[r]]), site.memory, site.free)
                for r in site.ranks
            ]
        return Sites(tuple(sorted(kept, key=lambda site: site.head)))

    def at(self, rank: int) -> Site:
        """The site of a rank."""
        return next(site for site in self.all if rank in site.ranks)
