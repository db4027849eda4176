"""From a rollout batch to packed micro-batches: one mini-batch is one optimiser step on whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.algorithms.aggregation import AGGREGATIONS
from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig
from megatron_dppo.data.packing import PackedBatch, TrainingSample, pack, plan_mini_batch
from megatron_dppo.data.routing import usable_rows
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
class MiniBatchPlan:
    """Who trains on what in one optimiser step.

    ``positions``: in the rollout batch, by data-parallel rank and micro-batch. ``denominator``: as in MiniBatch.
    """

    positions: list[list[list[int]]]
    denominator: float

    def of_rank(self, dp_rank: int) -> set[int]:
        """Positions that the replica ``dp_rank`` trains on."""
        return {position for rows in self.positions[dp_rank] for position in rows}


@dataclass(frozen=True)
class MiniBatch:
    """This rank's micro-batches of one optimiser step, and the global number that divides the summed loss."""

    micro_batches: list[PackedBatch]
    denominator: float


def trains(rollout: Rollout, config: AlgorithmConfig) -> bool:
    """Whether the response has a gradient: all do, unless truncated ones are dropped by the configuration."""
    return not (rollout.truncated and config.truncated_responses == "drop")


def training_samples(rollouts: Sequence[Rollout], config: TrainConfig) -> list[TrainingSample]:
    """One sample a rollout, in the same order; with its recorded routing where that is replayed."""
    replayed = [r.routed_experts if config.router_replay else None for r in rollouts]
    return [
        TrainingSample(
            prompt_ids=r.prompt_ids,
            response_ids=r.response_ids,
            advantage=r.advantage,
            rollout_log_probs=r.rollout_log_probs,
            recomputed_log_probs=None,
            topk_ids=r.topk_ids,
            topk_log_probs=r.topk_log_probs,
            index=index,
            train=trains(r, config.algorithm),
            routed_experts=routed,
            routed_valid=None if routed is None else usable_rows(r),
        )
        for index, (r, routed) in enumerate(zip(rollouts, replayed, strict=True))
    ]


def plan_mini_batches(
    rollouts: Sequence[Rollout], config: TrainConfig, layout: BatchLayout
) -> list[MiniBatchPlan]:
    """Cut a rollout batch, groups adjacent, into optimiser steps. Reads no recorded routing.

    Every rank computes the same plan from the same rollouts; the denominator counts all ranks' samples, so the
    gradient does not depend on the layout or on the packing. A mini-batch in which nothing trains is left out.
    """
    size = config.training.prompts_per_mini_batch * config.rollout.group_size
    constant = config.algorithm.aggregation_constant or config.rollout.max_response_tokens
    denominator_of = AGGREGATIONS[config.algorithm.aggregation].denominator
    plans = []
    for start in range(0, len(rollouts), size):
        part = rollouts[start : start + size]
        trained = [len(r.response_ids) for r in part if trains(r, config.algorithm)]
        denominator = denominator_of(trained, constant)
        if denominator == 0:
            continue
        plan = plan_mini_batch(
            [r.length for r in part],
            layout.dp_size,
            config.training.micro_batch_tokens,
            layout.count_multiple,
        )
        positions = [[[start + i for i in rows] for rows in rank] for rank in plan]
        plans.append(MiniBatchPlan(positions, denominator))
    return plans


def pack_mini_batch(
    samples: Sequence[TrainingSample], plan: MiniBatchPlan, layout: BatchLayout
) -> MiniBatch:
    """This rank's share of ``plan``. ``samples``: of the whole rollout batch."""
    packed = [
        pack([samples[i] for i in rows], pad_multiple=layout.pad_multiple, topk=layout.topk)
        for rows in plan.positions[layout.dp_rank]
    ]
    return MiniBatch(packed, plan.denominator)
