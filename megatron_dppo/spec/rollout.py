"""The rollout batches of a run: their size, their longest sequences, and the columns that travel with them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.algorithms.table import AlgorithmFacts, carried_topk
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class RolloutSpec:
    """The rollout batches of a run. Lengths are in tokens.

    Attributes:
        prompts: prompts of a batch.
        group_size: responses for each prompt.
        steps: optimiser steps on a batch.
        longest_prompt: longest prompt.
        longest_response: longest continuation of a prompt in training: a response, or an episode.
        longest_evaluated: longest continuation of a prompt in an evaluation.
        topk: K of the TopK(mu) that the engine returns for each response token, 0 for none.
        teacher_topk: K of the TopK(p_T) that a teacher returns for each response token; None without teachers.
        routing: whether tokens carry the engine's routing (R3).
        replays: whether the batches of an earlier run are replayed, so that no server generates.
    """

    prompts: int
    group_size: int
    steps: int
    longest_prompt: int
    longest_response: int
    longest_evaluated: int
    topk: int
    teacher_topk: int | None
    routing: bool
    replays: bool

    @classmethod
    def of(cls, config: TrainConfig, algorithm: AlgorithmFacts, shape: ModelShape) -> RolloutSpec:
        rollout = config.rollout
        prompt = config.data.max_prompt_tokens
        evaluated_turn = config.evaluation.max_response_tokens or rollout.max_response_tokens
        return cls(
            prompts=rollout.prompts_per_step,
            group_size=rollout.group_size,
            steps=config.mini_batches,
            longest_prompt=prompt,
            longest_response=config.longest_sequence - prompt,
            longest_evaluated=config.environment.longest(prompt, evaluated_turn) - prompt,
            topk=carried_topk(algorithm, rollout.topk_log_probs, shape.vocab_size),
            teacher_topk=config.distillation.top_k if config.distillation.teachers else None,
            routing=rollout.router_replay,
            replays=rollout.replays,
        )

    @property
    def responses(self) -> int:
        """Responses of a batch."""
        return self.prompts * self.group_size

    @property
    def longest(self) -> int:
        """Tokens of a trained sequence that reaches both limits."""
        return self.longest_prompt + self.longest_response

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence, prompt and continuation, of training and evaluation."""
        return self.longest_prompt + max(self.longest_response, self.longest_evaluated)
