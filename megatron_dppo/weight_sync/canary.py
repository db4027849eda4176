"""A check of what checksums can't see: that engine and trainer mean the same by the same bytes.

A conversion that swaps two tensors hands both sides the same wrong bytes, and a kernel may keep a
stale copy of right ones. Fixed prompts' log-probabilities, computed by both, tell.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PROMPTS = 4
PROMPT_TOKENS = 24


@dataclass(frozen=True)
class Tolerance:
    """Differences of log-probabilities (nats) that numerics explain.

    ``largest``: of one token. ``mean``: over all.
    """

    largest: float
    mean: float


TOLERANCE = {"float32": Tolerance(1e-3, 1e-4), "bfloat16": Tolerance(3.0, 0.2)}
"""By weight type. In bfloat16 one logit of 20 is rounded to a multiple of 0.125, and a router whose
choice is a tie sends a token to another expert: single tokens may differ by a nat, their mean may not.
"""


class CanaryError(RuntimeError):
    """Trainer and engine compute different probabilities."""


@dataclass(frozen=True)
class CanaryReport:
    """Differences of log-probabilities in nats over all tokens of the fixed prompts."""

    max_abs_diff: float
    mean_abs_diff: float
    tokens: int


def canary_prompts(vocab_size: int) -> list[list[int]]:
    """PROMPTS fixed sequences of PROMPT_TOKENS ids all over the vocabulary: the same in every run.

    Without the last id, in whose place SGLang 0.5.23 scores id 0 (it takes it for padding).
    """
    draw = random.Random(20_240_711)
    return [[draw.randrange(vocab_size - 1) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def compare_canary(
    trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]], tolerance: Tolerance
) -> CanaryReport:
    """Compare log-probabilities ``[prompt][token]`` of the same tokens at temperature 1.

    Raises CanaryError naming the worst prompt and token where a difference, or the mean of all,
    exceeds ``tolerance`` or is not a number; ValueError where the two don't hold the same tokens.
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
    values = [d[0] for d in differences]
    mean = sum(values) / len(values)
    # NaN compares false with everything: look for what is not within the tolerance.
    failed = [d for d in differences if not d[0] <= tolerance.largest]
    if failed or not mean <= tolerance.mean:
        worst, prompt, token = next((d for d in failed if d[0] != d[0]), max(differences))
        raise CanaryError(
            f"canary: log-probability of token {token} of prompt {prompt} differs by {worst:.3g} "
            f"(trainer {trainer[prompt][token]:.6g}, engine {engine[prompt][token]:.6g}), "
            f"expected at most {tolerance.largest:g}; {len(failed)} of {len(differences)} tokens are "
            f"off; the mean difference is {mean:.3g}, expected at most {tolerance.mean:g}"
        )
    return CanaryReport(max(values), mean, len(values))
