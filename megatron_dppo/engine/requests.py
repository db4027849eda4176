"""What is asked of an engine, and what it answers, in this project's words."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dppo.model.shape import ModelShape
from megatron_dppo.types import FinishReason, VersionSpan


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn. ``stop_token_ids`` add to the model's own stop tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")

    def as_json(self) -> dict[str, Any]:
        """SGLang's ``sampling_params``; every number is sent, so that no default of the model's
        folder applies.
        """
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": list(self.stop_token_ids) or None,
        }


@dataclass(frozen=True)
class RoutedShape:
    """What the engine captures of a model's routing.

    ``hidden_layers``: layers in the capture; ``moe_layers``: which of them route; ``top_k`` of
    ``experts``.
    """

    hidden_layers: int
    moe_layers: tuple[int, ...]
    top_k: int
    experts: int

    @classmethod
    def of_model(cls, model: ModelShape) -> RoutedShape:
        """Of a mixture of experts. Raises ValueError where nothing is routed."""
        if not model.is_moe:
            raise ValueError(f"rollout.router_replay: {model.family} has no experts")
        return cls(model.num_layers, model.moe_layers, model.experts_per_token, model.num_experts)

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The smallest type that holds an expert's number."""
        return np.uint8 if self.experts <= 256 else np.uint16


@dataclass(frozen=True)
class GenerationRequest:
    """One response to draw. ``key`` names it to the caller, and outlives retries."""

    key: Hashable
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    topk_log_probs: int = 0
    routed_experts: RoutedShape | None = None


@dataclass(frozen=True)
class GenerationResult:
    """One response, checked.

    ``log_probs``: natural log mu(token), R values. ``topk_ids`` int32 and ``topk_log_probs``
    float32 ``[R, K]``. ``routed_experts``: uint8 or uint16 ``[prompt + R - 1, L, E]``.
    ``cached_tokens``: prompt tokens found in the cache.
    """

    key: Hashable
    output_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    text: str
    weight_versions: tuple[VersionSpan, ...]
    topk_ids: np.ndarray | None = None
    topk_log_probs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    cached_tokens: int = 0
