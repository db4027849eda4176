"""What a strategy is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dppo.weight_sync.engines import Engines
from megatron_dppo.weight_sync.interfaces import Plan


@dataclass(frozen=True)
class Route:
    """From trainer rank ``rank`` to ``engines``: the buckets of ``plan``, all of ``dtype``.

    ``timeout_s`` bounds each request to an engine. ``directory``: as configured.
    """

    rank: int
    engines: Engines[Any]
    plan: Plan
    dtype: torch.dtype
    timeout_s: float
    directory: str | None = None

    @property
    def conducts(self) -> bool:
        """Whether this rank gives the engines their orders."""
        return self.rank == 0

    @property
    def sends(self) -> bool:
        """Whether this rank gathers buckets, and sends them."""
        return any(bucket.receiver == self.rank for bucket in self.plan)
