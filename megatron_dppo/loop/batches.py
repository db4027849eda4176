"""From a batch of trajectories to packed micro-batches: one mini-batch is one optimiser step on whole groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.algorithms.normalisation import AGGREGATIONS
from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig
from megatron_dppo.data.columns import Form
from megatron_dppo.data.packing import PackedBatch, idle_share, pack, plan_mini_batch
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts
from megatron_dppo.model.shape import TOKENS, SequenceCost


@dataclass(frozen=True)
class BatchLayout:
    """How micro-batches must be cut for this trainer.

    ``count_multiple``: the interleaved schedule takes micro-batches in rounds of the pipeline's size.
    ``pad_multiple``: sequence parallelism splits a packed micro-batch evenly over tensor ranks. ``share``: number of
    these parts, and this rank's. ``cost``: by which ranks and micro-batches are balanced.
    """

    dp_rank: int
    dp_size: int
    count_multiple: int = 1
    pad_multiple: int = 1
    share: tuple[int, int] = (1, 0)
    cost: SequenceCost = TOKENS


@dataclass(frozen=True)
class MiniBatchPlan:
    """Who trains on what in one optimiser step.

    ``positions``: in the batch, by data-parallel rank and micro-batch. ``denominator``: as in MiniBatch. ``cost``:
    of all sequences, as the layout counts it. ``idle``: share of the ranks' time in which they would wait for each
    other if time were cost.
    """

    positions: list[list[list[int]]]
    denominator: float
    cost: float
    idle: float

    def of_rank(self, dp_rank: int) -> set[int]:
        """Positions that the replica ``dp_rank`` trains on."""
        return {position for rows in self.positions[dp_rank] for position in rows}


@dataclass(frozen=True)
class MiniBatch:
    """This rank's micro-batches of one optimiser step, and the global number that divides the summed loss."""

    micro_batches: list[PackedBatch]
    denominator: float


def trains(trajectory: TrajectoryFacts, config: AlgorithmConfig) -> bool:
    """Whether the response has a gradient: all do, unless truncated ones are dropped by the configuration."""
    return not (trajectory.truncated and config.truncated_responses == "drop")


def plan_mini_batches(
    batch: Sequence[TrajectoryFacts], config: TrainConfig, layout: BatchLayout
) -> list[MiniBatchPlan]:
    """Cut a batch, groups adjacent, into optimiser steps. Reads no columns.

    Every rank computes the same plan from the same trajectories; the denominator counts all ranks' samples, so the
    gradient does not depend on the layout or on the packing. A mini-batch in which nothing trains is left out.
    """
    size = config.training.prompts_per_mini_batch * config.rollout.group_size
    constant = config.algorithm.aggregation_constant or config.rollout.max_response_tokens
    denominator_of = AGGREGATIONS[config.algorithm.aggregation].denominator
    plans = []
    for start in range(0, len(batch), size):
        part = batch[start : start + size]
        trained = [t.sampled for t in part if trains(t, config.algorithm)]
        denominator = denominator_of(trained, constant)
        if denominator == 0:
            continue
        lengths = [t.length for t in part]
        costs = [layout.cost(length) for length in lengths]
        plan = plan_mini_batch(
            lengths,
            costs,
            layout.dp_size,
            config.training.micro_batch_tokens,
            layout.count_multiple,
        )
        positions = [[[start + i for i in rows] for rows in rank] for rank in plan]
        plans.append(MiniBatchPlan(positions, denominator, sum(costs), idle_share(plan, costs)))
    return plans


def pack_mini_batch(
    batch: Mapping[int, Trajectory] | Sequence[Trajectory],
    plan: MiniBatchPlan,
    layout: BatchLayout,
    algorithm: AlgorithmConfig,
    forms: Mapping[str, Form],
) -> MiniBatch:
    """This rank's share of ``plan``.

    ``batch``: by position, at least this rank's. ``forms``: of the columns of all ranks' batch.
    """
    packed = [
        pack(
            [batch[i] for i in rows],
            indices=rows,
            trains=[trains(batch[i], algorithm) for i in rows],
            pad_multiple=layout.pad_multiple,
            forms=forms,
            share=layout.share,
        )
        for rows in plan.positions[layout.dp_rank]
    ]
    return MiniBatch(packed, plan.denominator)
