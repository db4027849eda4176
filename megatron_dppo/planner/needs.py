"""What an algorithm makes the trainer compute and the engine return, by its name: without torch.

``algorithms/table.py`` holds the truth; a test compares the two for every preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dppo.config.schema import TrainConfig

DEFAULT_TOPK = 20
_RECOMPUTED = ("minirl", "recompute", "decoupled", "icepop")


@dataclass(frozen=True)
class Needs:
    """``topk``: K of TopK(mu) that every response token carries, 0 for none. ``recompute_pass``: the trainer computes
    log-probabilities of the whole batch at the rollout's weights before it trains."""

    topk: int
    recompute_pass: bool


def needs_of(config: TrainConfig, vocab_size: int) -> Needs:
    """Of the configured algorithm."""
    name, options = config.algorithm.name, config.algorithm.options
    if "exact" in name:
        return Needs(vocab_size, "recomputed" in name)
    topk = config.rollout.topk_log_probs or _topk(name, options)
    return Needs(topk, any(part in name for part in _RECOMPUTED))


def _topk(name: str, options: Mapping[str, object]) -> int:
    return int(str(options.get("topk", DEFAULT_TOPK))) if "topk" in name else 0
