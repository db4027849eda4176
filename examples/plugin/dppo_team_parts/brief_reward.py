"""A reward for answers that are right and brief."""

from __future__ import annotations


def brief(response: str, answer: str, *, longest: int = 80) -> float:
    """Score 1 if ``response`` contains ``answer`` and has at most ``longest`` characters, else 0."""
    return float(answer in response and len(response) <= longest)
