"""The nouns of a training step, shared by every layer. No torch here: the configuration check stays light."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length"]


UNVERIFIED_VERSION = "unverified-"
"""An engine's weight version begins so while an update is under way, and for good where it failed."""


@dataclass(frozen=True)
class Problem:
    """One line of a data set, tokenised.

    ``problem_id``: its position in the file (0-based), which names it in rollouts and checkpoints.
    """

    problem_id: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens ``start <= i < end`` were sampled under ``weight_version``."""

    weight_version: int
    start: int
    end: int


@dataclass
class Rollout:
    """One sampled response with what the engine said of it.

    ``rollout_log_probs``: natural log mu(token) at the sampling temperature, one per response token.
    ``topk_ids`` int32 ``[R, K]`` and ``topk_log_probs`` float32 ``[R, K]``: TopK(mu), where asked for.
    ``routed_experts``: uint8 or uint16 ``[prompt + response - 1, moe layers, top-k]``, where asked for.
    """

    problem_id: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_log_probs: list[float]
    finish_reason: FinishReason
    text: str
    weight_versions: list[VersionSpan] = field(default_factory=list)
    topk_ids: np.ndarray | None = None
    topk_log_probs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    reward: float = 0.0
    advantage: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether the response hit the length limit instead of ending by itself."""
        return self.finish_reason == "length"

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)
