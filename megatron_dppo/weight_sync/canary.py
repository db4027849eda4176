"""A check of what checksums can't see: that engine and trainer mean the same by the same bytes.

A conversion that swaps two tensors hands both sides the same wrong bytes, and a kernel may keep a
stale copy of right ones. Fixed prompts' log-probabilities, computed by both, tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest difference of a token's log-probability (nats) that numerics explain, by weight type."""


class CanaryError(RuntimeError):
    """Trainer and engine compute different probabilities."""


@dataclass(frozen=True)
class CanaryReport:
    """Differences of log-probabilities in nats over all tokens of the fixed prompts."""

    max_abs_diff: float
    mean_abs_diff: float
    tokens: int


def compare_canary(
    trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]], tolerance: float
) -> CanaryReport:
    """Compare log-probabilities ``[prompt][token]`` of the same tokens at temperature 1.

    Raises CanaryError naming the worst prompt and token where a difference exceeds ``tolerance`` or
    is not a number, ValueError where the two don't hold the same tokens.
    """
    if [len(p) for p in trainer] != [len(p) for p in engine] or not any(trainer):
        raise ValueError(
            f"canary: token counts by prompt differ or are empty: trainer {[len(p) for p in trainer]}, "
            f"engine {[len(p) for p in engine]}"
        )
    differences = [
        (abs(a - b), prompt, token)
        for prompt, (ours, theirs) in enumerate(zip(trainer, engine, strict=True))
        for token, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
    # NaN compares false with everything: look for what is not within the tolerance.
    failed = [d for d in differences if not d[0] <= tolerance]
    if failed:
        worst, prompt, token = next((d for d in failed if d[0] != d[0]), max(failed))
        raise CanaryError(
            f"canary: log-probability of token {token} of prompt {prompt} differs by {worst:.3g} "
            f"(trainer {trainer[prompt][token]:.6g}, engine {engine[prompt][token]:.6g}); "
            f"expected at most {tolerance:g}; {len(failed)} of {len(differences)} tokens are off"
        )
    values = [d[0] for d in differences]
    return CanaryReport(max(values), sum(values) / len(values), len(values))
