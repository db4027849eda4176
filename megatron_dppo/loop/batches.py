"""From a rollout batch to packed micro-batches: one mini-batch is one optimiser step on whole groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig
from megatron_dppo.data.packing import PackedBatch, TrainingSample, pack, plan_mini_batch
from megatron_dppo.types import Rollout


@dataclass(frozen=True)
class BatchLayout:
    """How micro-batches must be cut for this trainer.

    ``count_multiple``: the interleaved schedule takes micro-batches in rounds of the pipeline's size.
    ``pad_multiple``: sequence parallelism splits a packed micro-batch evenly over tensor ranks.
    ``topk``: K of TopK(mu) in the rollouts, which an empty micro-batch must have too; 0: none.
    """

    dp_rank: int
    dp_size: int
    count_multiple: int = 1
    pad_multiple: int = 1
    topk: int = 0


@dataclass(frozen=True)
class MiniBatch:
    """This rank's micro-batches of one optimiser step, and the global number that divides the summed loss."""

    micro_batches: list[PackedBatch]
    denominator: float


def trains(rollout: Rollout, config: AlgorithmConfig) -> bool:
    """Whether the response has a gradient: all do, unless truncated ones are dropped by the configuration."""
    return not (rollout.truncated and config.truncated_responses == "drop")


def _token_mean(samples: Sequence[TrainingSample], constant: float) -> float:
    return float(sum(len(s.response_ids) for s in samples if s.train))


def _sequence_mean(samples: Sequence[TrainingSample], constant: float) -> float:
    return sum(s.train for s in samples) * constant


DENOMINATORS: dict[str, Callable[[Sequence[TrainingSample], float], float]] = {
    "token-mean": _token_mean,
    "sequence-mean-with-constant": _sequence_mean,
}


def training_samples(rollouts: Sequence[Rollout], config: AlgorithmConfig) -> list[TrainingSample]:
    """One sample a rollout, in the same order."""
    return [
        TrainingSample(
            prompt_ids=r.prompt_ids,
            response_ids=r.response_ids,
            advantage=r.advantage,
            rollout_log_probs=r.rollout_log_probs,
            recomputed_log_probs=None,
            topk_ids=r.topk_ids,
            topk_log_probs=r.topk_log_probs,
            routed_experts=r.routed_experts,
            index=index,
            train=trains(r, config),
        )
        for index, r in enumerate(rollouts)
    ]


def mini_batches(
    rollouts: Sequence[Rollout], config: TrainConfig, layout: BatchLayout
) -> Iterator[MiniBatch]:
    """Cut a rollout batch, groups adjacent, into optimiser steps and this rank's packed share of each.

    Every rank computes the same plan from the same rollouts; the denominator counts all ranks' samples, so the
    gradient does not depend on the layout or on the packing. A mini-batch in which nothing trains is left out.
    """
    samples = training_samples(rollouts, config.algorithm)
    size = config.training.prompts_per_mini_batch * config.rollout.group_size
    constant = config.algorithm.aggregation_constant or config.rollout.max_response_tokens
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        denominator = DENOMINATORS[config.algorithm.aggregation](part, constant)
        if denominator == 0:
            continue
        plan = plan_mini_batch(
            [len(s.prompt_ids) + len(s.response_ids) for s in part],
            layout.dp_size,
            config.training.micro_batch_tokens,
            layout.count_multiple,
        )
        packed = [
            pack([part[i] for i in rows], pad_multiple=layout.pad_multiple, topk=layout.topk)
            for rows in plan[layout.dp_rank]
        ]
        yield MiniBatch(packed, denominator)
