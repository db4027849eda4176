"""How a run's generation and training share time and GPUs: a value that the formulas take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """``placement``: servers have GPUs of their own (``separate``), or take turns with the trainer on all of them
    (``colocated``). ``staleness``: batches that generation may be ahead. ``drains``: an update waits until every
    running response has ended; otherwise they go on after it. ``overlaps_evaluation``: the trainer works meanwhile.
    """

    placement: Literal["separate", "colocated"] = "separate"
    staleness: int = 0
    drains: bool = True
    overlaps_evaluation: bool = False

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def is_on_policy(self) -> bool:
        return self.staleness == 0

    @property
    def overlaps(self) -> bool:
        """Whether the trainer trains while servers generate."""
        return not self.is_colocated and not self.is_on_policy


ON_POLICY = Schedule()
STALE = Schedule(staleness=1, drains=False)
COLOCATED = Schedule("colocated")
