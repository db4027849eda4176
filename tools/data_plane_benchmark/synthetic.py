"""Requests and answers of the benchmark: requests of a made-up batch, responses of full size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dppo.config import schema as s
from megatron_dppo.engine.protocol import GenerationRequest, RoutedShape, SamplingParams
from megatron_dppo.model.layout import Layout

PROMPT_TOKENS = 200
VOCABULARY = 151_936
POOL = 4
"""Number of responses whose arrays the engine's side has. The engine's side answers with these responses in turn."""


@dataclass(frozen=True)
class Size:
    """The sizes of a batch and of its model, by the command line's options."""

    responses: int
    tokens: int
    group: int
    topk: int
    layers: int
    experts: int
    experts_per_token: int
    tensor: int
    data: int

    @property
    def layout(self) -> Layout:
        """The trainer's ranks."""
        return Layout(tensor=self.tensor, data=self.data)

    @property
    def routed(self) -> RoutedShape:
        """The shape of the engine's recorded routing."""
        layers = tuple(range(self.layers))
        return RoutedShape(self.layers, layers, self.experts_per_token, self.experts)

    def length(self, index: int) -> int:
        """Tokens of the response ``index``: the longest, or shorter by one, two or three sixteenths."""
        return self.tokens - (index % POOL) * self.tokens // 16

    def request(self, index: int) -> GenerationRequest:
        """The request whose prompt begins with its index."""
        return GenerationRequest(
            index,
            [index, *[7] * (PROMPT_TOKENS - 1)],
            SamplingParams(self.tokens),
            {"topk": self.topk, "routed_experts": self.routed},
            problem_id=index // self.group,
            sample_index=index % self.group,
        )

    def config(self) -> s.TrainConfig:
        """A run with batches of this size, in up to eight optimiser steps."""
        groups = self.responses // self.group
        return s.TrainConfig(
            run=s.RunConfig(directory="unused", steps=1),
            model=s.ModelConfig(hf_checkpoint="unused", dtype="bfloat16"),
            data=s.DataConfig(train="unused"),
            rollout=s.RolloutConfig(
                prompts_per_step=groups,
                group_size=self.group,
                max_response_tokens=self.tokens,
                router_replay=True,
            ),
            training=s.TrainingConfig(
                prompts_per_mini_batch=max(1, groups // 8),
                micro_batch_tokens=self.tokens + PROMPT_TOKENS,
            ),
            optimizer=s.OptimizerConfig(lr=1e-3),
        )


@dataclass(frozen=True)
class Response:
    """The arrays of one response, as an engine has them. ``routed``: int32 [prompt + N - 1, L, E]."""

    ids: np.ndarray
    log_probs: np.ndarray
    topk_ids: np.ndarray
    topk_log_probs: np.ndarray
    routed: np.ndarray

    @classmethod
    def draw(cls, size: Size, index: int) -> Response:
        """Make a random response of the length of ``index``."""
        rng, tokens = np.random.default_rng(index), size.length(index)
        topk_ids = rng.integers(0, VOCABULARY // size.topk, (tokens, size.topk), dtype=np.int32)
        rows = PROMPT_TOKENS + tokens - 1
        first = rng.integers(0, size.experts, (rows, size.layers, 1), dtype=np.int32)
        step = size.experts // size.experts_per_token
        choice = first + np.arange(size.experts_per_token, dtype=np.int32) * step
        return cls(
            rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
            -rng.random(tokens, np.float32),
            topk_ids * size.topk + np.arange(size.topk, dtype=np.int32),
            -rng.random((tokens, size.topk), np.float32),
            choice % size.experts,
        )

    @property
    def plain_meta(self) -> dict[str, Any]:
        """The parts of ``meta_info`` that SGLang sends as lists."""
        return {
            "finish_reason": {"type": "stop", "matched": 2},
            "output_token_logprobs": [
                [x, i, None]
                for x, i in zip(self.log_probs.tolist(), self.ids.tolist(), strict=True)
            ],
            "weight_versions": [{"version": "0", "start": 0, "end": len(self.ids)}],
            "output_top_logprobs_shape": list(self.topk_ids.shape),
            "output_top_logprobs_null_prefix": 0,
        }
