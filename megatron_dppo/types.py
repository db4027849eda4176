"""The nouns that every layer shares. No torch here: the configuration check stays light."""

from __future__ import annotations

from dataclasses import dataclass

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
