"""An engine without a server. It gives every token the same score."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.weights.engine_weights import DecodedScores, EngineWeights


class ConstantScores(EngineWeights):
    """Scores each token of a prompt with ``score_value``, and each decoded token with ``decode_value``."""

    score_value: float
    decode_value: float

    async def score(
        self, prompts: Sequence[Sequence[int]], adapter: str | None = None
    ) -> list[list[float]]:
        return [[self.score_value] * (len(prompt) - 1) for prompt in prompts]

    async def decode(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        end_before: int,
        adapter: str | None = None,
    ) -> DecodedScores:
        scores = [[self.decode_value] * count for _ in prompts]
        return DecodedScores(scores, [[self.score_value] * count for _ in prompts])
