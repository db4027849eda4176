"""What is asked of an engine, in this project's words."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn.

    ``stop_token_ids`` add to the model's own stop tokens. ``stop``: texts that end a response with the
    token that completes one of them; the response's text ends before it. ``seed``: of this response
    alone, which a server with deterministic inference heeds.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")

    def as_json(self) -> dict[str, Any]:
        """SGLang's ``sampling_params``; every number is sent, so that no default of the model's
        folder applies.
        """
        seed = {} if self.seed is None else {"sampling_seed": self.seed}
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "stop": list(self.stop) or None,
            **seed,
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
    """One response to draw.

    ``key`` names it to the caller, and outlives retries. ``columns``: what is asked of the engine
    beside what every request is, as options by the names of ``column_sources.SOURCES``.
    ``problem_id`` and ``sample_index`` go into the trajectory.
    """

    key: Hashable
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    problem_id: int = 0
    sample_index: int = 0
