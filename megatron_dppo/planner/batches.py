"""Batch arithmetic: sequences, tokens and micro-batches of a step, of an optimiser step, of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.planner.job import Job


@dataclass(frozen=True)
class Batches:
    """``per_step``: responses in an optimiser step; ``replica``: of them, on one data-parallel replica. Tokens at the
    mean lengths; ``longest_tokens``: of a batch in which every sequence reaches both limits."""

    responses: int
    tokens: float
    longest_tokens: int
    optimizer_steps: int
    per_step: int
    replica: float
    micro_batches: int
    micro_batch_tokens: int
    per_leader: float


def batches(job: Job) -> Batches:
    """responses = prompts x group; an optimiser step takes responses / steps, a replica that / DP; micro-batches =
    replica's tokens / (micro-batch tokens x PACKING), at least 1; leaders (one a replica) generate responses / DP."""
    rollout, data = job.rollout, job.trainer.layout.data
    per_step = rollout.responses // rollout.steps
    return Batches(
        responses=rollout.responses,
        tokens=rollout.tokens,
        longest_tokens=rollout.responses * (rollout.longest_prompt + rollout.longest_response),
        optimizer_steps=rollout.steps,
        per_step=per_step,
        replica=per_step / data,
        micro_batches=job.trainer.micro_batches,
        micro_batch_tokens=job.trainer.tokens,
        per_leader=rollout.responses / data,
    )
