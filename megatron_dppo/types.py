"""The nouns that every layer shares. No torch here: the configuration check stays light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrainerPart = Literal["weights", "reference", "gradients", "optimizer"]
TRAINER_PARTS: tuple[TrainerPart, ...] = ("weights", "reference", "gradients", "optimizer")
"""What a trainer rank's device holds through a run, each of which may be parked; see ``trainer/parking.py``."""
COPIED_PARTS: frozenset[TrainerPart] = frozenset(("weights", "reference", "optimizer"))
"""Those that the host holds a copy of once they have been parked."""
UNVERIFIED_VERSION = "unverified-"
"""An engine's weight version begins so while an update is under way, and for good where it failed."""


@dataclass(frozen=True)
class Problem:
    """One line of a data set, tokenised.

    ``problem_id``: its position in the file (0-based), which names it in trajectories and checkpoints.
    """

    problem_id: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
