"""Train on a batch: cut it into mini-batches and take one optimiser step for each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch import Tensor

from megatron_dppo.algorithms.aggregation import AGGREGATIONS
from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.distillation import Distillation
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.algorithms.step_rules import StepBound
from megatron_dppo.config.schema import (
    AlgorithmConfig,
    DistillationConfig,
    RolloutConfig,
    TrainConfig,
    TrainingConfig,
)
from megatron_dppo.data import balancing, packing
from megatron_dppo.data.batch_file import BatchFormatError
from megatron_dppo.data.columns import Form
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts, sizes_of
from megatron_dppo.loop.batch_layout import BatchLayout
from megatron_dppo.loop.exchange import ColumnExchange, Delivery, ExchangeError, Stages
from megatron_dppo.loop.frequency_canary import FrequencyCanary, FrequencyError
from megatron_dppo.loop.gap_guard import GapError, GapGuard, is_coarse
from megatron_dppo.loop.rollout_figures import routing_figures
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.masked_tokens import MaskedResponses, MaskedToken, MaskedTokenCounts
from megatron_dppo.metrics.sums import MetricSums, means
from megatron_dppo.model.shape import BACKWARD_PRODUCTS, FROZEN_BACKWARD_PRODUCTS
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import all_gather_json, broadcast_bytes
from megatron_dppo.trainer.router_replay import RECORDING
from megatron_dppo.trainer.step import reduce_masked_tokens
from megatron_dppo.trainer.token_loss import make_token_loss
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.trainer.trainer import Trainer

LossColumns = dict[int, dict[str, np.ndarray]]
"""The ``LOSS_COLUMNS`` of each trained response, by its position in the batch: the loss's inputs and results for each
token."""


KEPT_TOPK = 64
"""Largest K for which log pi at TopK(mu) is kept. Log pi takes 4 x K bytes a token. The engine's ids and
log-probabilities take 8 x K bytes more."""


class LossRecord:
    """Keeps the inputs and results of the loss of each token on the device, until ``collect``.

    The record takes about 60 bytes a token, plus log pi at the engine's TopK(mu). ``has_teacher``: whether the loss
    changes the advantages.
    """

    def __init__(self, algorithm: Algorithm, *, has_teacher: bool = False) -> None:
        self._algorithm = algorithm
        self._has_teacher = has_teacher
        self._parts: list[tuple[packing.PackedBatch, dict[str, Tensor]]] = []

    def add(self, batch: packing.PackedBatch, inputs: TokenInputs, sums: LossSums) -> None:
        """Keep the statistics of a micro-batch's tokens, without a device sync."""
        assert sums.blocked is not None
        # The keys are names of ``LOSS_COLUMNS``. A value is None if this loss does not have the statistic.
        statistics = {
            "loss_log_probs": inputs.log_probs.detach().float(),
            "loss_recomputed_log_probs": inputs.recomputed_log_probs,
            "loss_topk_log_probs": self._topk(inputs),
            "loss_entropy": None if inputs.entropy is None else inputs.entropy.float(),
            "loss_divergence": self._algorithm.divergence(inputs),
            "loss_advantages": inputs.advantages.float() if self._has_teacher else None,
            "loss_trains": inputs.loss_mask & ~sums.blocked,
        }
        # Drop the columns: Top-K and recorded routing would stay on the device until the end of the step.
        batch_without_columns = replace(batch, columns={}, valid={})
        kept_statistics: dict[str, Tensor] = {}
        for name, values in statistics.items():
            if values is not None:
                kept_statistics[name] = values
        self._parts.append((batch_without_columns, kept_statistics))

    def _topk(self, inputs: TokenInputs) -> Tensor | None:
        """Return log pi [T, K] at the engine's TopK ids. The saved batch has these ids too.

        Returns None if K exceeds ``KEPT_TOPK``, or if the TopK ids come from a recomputed policy.
        """
        if inputs.topk_log_probs is None or self._algorithm.needs_recomputed_distribution:
            return None
        # The last column is the sampled token.
        log_probs = inputs.topk_log_probs[:, :-1].detach().float()
        if log_probs.shape[1] <= KEPT_TOPK:
            return log_probs
        return None

    def collect(self, topology: Topology) -> LossColumns:
        """Return, on global rank 0, the columns of all replicas since the last call; elsewhere an empty dict.

        Collective.
        """
        own_columns: LossColumns = {}
        for batch, statistics in self._parts:
            own_columns |= by_response(batch, statistics)
        self._parts = []
        # One rank of each replica's last stage sends: the ranks of that stage hold equal statistics.
        is_source = topology.is_last_stage and topology.is_first_of_stage
        all_columns: LossColumns = {}
        # The replicas send one after another, so that a rank holds at most one message at a time.
        for rank, sends in enumerate(all_gather_json(is_source)):
            if not sends:
                continue
            message = b""
            if rank == topology.rank:
                message = _encoded(own_columns)
            message = broadcast_bytes(message, rank)
            if topology.rank == 0:
                all_columns |= _decoded(message)
        return all_columns


def by_response(batch: packing.PackedBatch, statistics: Mapping[str, Tensor]) -> LossColumns:
    """Return the rows of each response's sampled tokens. ``statistics``: tensors [T, ...], aligned with ``batch``."""
    token_indices = torch.nonzero(batch.loss_mask).squeeze(1)
    arrays: dict[str, np.ndarray] = {}
    for name, values in statistics.items():
        arrays[name] = values[token_indices].cpu().numpy()
    # Number of sampled tokens before each sequence's end. The rows of one sequence are adjacent in ``arrays``.
    sequence_ends = batch.cu_seqlens[1:].to(token_indices)
    ends = torch.searchsorted(token_indices, sequence_ends).cpu().numpy()
    starts = [0, *ends[:-1]]
    columns: LossColumns = {}
    for position, start, end in zip(batch.sequence_index.tolist(), starts, ends, strict=True):
        # Padding has no sampled token.
        if end <= start:
            continue
        # An episode's response may have several branches, each a sequence of its own. Append the rows to the rows of
        # earlier branches.
        response_columns = columns.setdefault(position, {})
        for name, array in arrays.items():
            earlier_rows = response_columns.get(name, array[:0])
            response_columns[name] = np.concatenate([earlier_rows, array[start:end]])
    return columns


def _encoded(columns: LossColumns) -> bytes:
    arrays: dict[str, np.ndarray] = {}
    for position, response_columns in columns.items():
        for name, rows in response_columns.items():
            arrays[f"{position}/{name}"] = rows
    return save(arrays)


def _decoded(message: bytes) -> LossColumns:
    columns: LossColumns = {}
    for key, rows in load(message).items():
        position, _, name = key.partition("/")
        columns.setdefault(int(position), {})[name] = rows
    return columns


@dataclass(frozen=True)
class MiniBatchPlan:
    """The assignment of trajectories, in whole groups, to ranks and micro-batches in one optimiser step.

    ``positions``: positions in the batch, by data-parallel rank and micro-batch. ``denominator``: as in MiniBatch.
    ``cost``: total cost of all sequences, in the unit of ``BatchLayout.cost``. ``idle``: share of the ranks' time in
    which they would wait for each other if time were proportional to cost.
    """

    positions: list[list[list[int]]]
    denominator: float
    cost: float
    idle: float

    def of_rank(self, dp_rank: int) -> set[int]:
        """Return the positions that the replica ``dp_rank`` trains on."""
        return set(chain.from_iterable(self.positions[dp_rank]))


@dataclass(frozen=True)
class MiniBatch:
    """This rank's micro-batches of one optimiser step.

    ``denominator``: divides the loss that is summed over all ranks.
    """

    micro_batches: list[packing.PackedBatch]
    denominator: float


def trains(trajectory: TrajectoryFacts, config: AlgorithmConfig) -> bool:
    """Return whether the response has a gradient: truncated responses have none if the configuration drops them."""
    return not (trajectory.truncated and config.truncated_responses == "drop")


def plan_mini_batches(
    batch: Sequence[TrajectoryFacts],
    training: TrainingConfig,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    layout: BatchLayout,
) -> list[MiniBatchPlan]:
    """Cut a batch, whose groups are adjacent, into optimiser steps. Columns are not read.

    Every rank computes the same plan from the same trajectories. The denominator counts all ranks' samples, so the
    gradient does not depend on the layout or on the packing. A mini-batch is left out if none of its responses trains.
    """
    size = training.prompts_per_mini_batch * rollout.group_size
    constant = algorithm.aggregation_constant or rollout.max_response_tokens
    denominator_of = AGGREGATIONS[algorithm.aggregation].denominator
    plans = []
    for start in range(0, len(batch), size):
        part = batch[start : start + size]
        trained_lengths = [t.sampled for t in part if trains(t, algorithm)]
        denominator = denominator_of(trained_lengths, constant)
        if denominator == 0:
            # No response of this mini-batch trains.
            continue
        plan, costs = layout.divide(part, training.micro_batch_tokens)
        idle_share = balancing.idle_share(plan, costs)
        positions = _shifted(plan, start)
        plans.append(MiniBatchPlan(positions, denominator, sum(costs), idle_share))
    return plans


def _shifted(plan: Sequence[Sequence[Sequence[int]]], start: int) -> list[list[list[int]]]:
    """Return ``plan`` with positions in the batch instead of positions in the mini-batch.

    ``plan``: positions by rank and micro-batch. ``start``: position of the mini-batch's first response in the batch.
    """
    shifted: list[list[list[int]]] = []
    for micro_batches in plan:
        shifted_micro_batches: list[list[int]] = []
        for positions in micro_batches:
            shifted_micro_batches.append([start + position for position in positions])
        shifted.append(shifted_micro_batches)
    return shifted


def pack_mini_batch(
    batch: Mapping[int, Trajectory] | Sequence[Trajectory],
    plan: MiniBatchPlan,
    layout: BatchLayout,
    algorithm: AlgorithmConfig,
    forms: Mapping[str, Form],
) -> MiniBatch:
    """Pack this rank's share of ``plan``.

    Args:
        batch: trajectories by position; must contain this rank's share of ``plan``.
        plan: the assignment of trajectories to ranks and micro-batches.
        layout: the trainer's constraints on micro-batches.
        algorithm: decides whether truncated responses train.
        forms: the forms of the columns of the whole batch, over all ranks.
    """
    micro_batches: list[packing.PackedBatch] = []
    for positions in plan.positions[layout.dp_rank]:
        has_gradient = [trains(batch[position], algorithm) for position in positions]
        micro_batches.append(layout.pack(batch, positions, has_gradient, forms))
    return MiniBatch(micro_batches, plan.denominator)


AddedColumns = dict[str, Tensor]
"""Columns that the trainer computes and adds to one micro-batch, by name."""


@dataclass(frozen=True)
class PlannedBatch:
    """The part of a batch that this rank needs, and the plans of its mini-batches.

    ``figures``: metrics of the recorded routing, empty if no routing is replayed. ``is_stale``: whether some tokens of
    the batch were sampled by weights that are older than the trainer's weights.
    """

    delivery: Delivery
    plans: Sequence[MiniBatchPlan]
    figures: dict[str, float]
    is_stale: bool = False

    @property
    def trajectories(self) -> Mapping[int, Trajectory]:
        """The trajectories that this rank needs, by position; global rank 0 has all of them with ``rollout.save``."""
        return self.delivery.trajectories


class Learner:
    """Trains on batches with ``algorithm``. ``topk``: K of the batches' TopK(mu), 0 if they carry none.

    Four attributes describe the last batch:
    ``most_masked``: the tokens that the mask blocked most often, the same on every rank.
    ``masked_by_response``: the number of blocked tokens of each response whose loss this rank computed.
    ``loss_columns``: inputs and results of the loss for each token, by position in the batch, on global rank 0 of a run
    with ``rollout.save``.
    ``warned_of_gap``: whether a warning about the batch's gap was logged, the same on every rank.
    """

    def __init__(
        self, config: TrainConfig, trainer: Trainer, algorithm: Algorithm, topk: int
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._algorithm = algorithm
        self._masked_tokens = MaskedTokenCounts(trainer.shape.vocab_size)
        self._loss_record = None
        if config.rollout.save:
            has_teacher = bool(config.distillation.teachers)
            self._loss_record = LossRecord(algorithm, has_teacher=has_teacher)
        loss_observers = [self._count_masked]
        if self._loss_record is not None:
            loss_observers.append(self._loss_record.add)
        self._loss = make_token_loss(
            algorithm,
            config.algorithm.aggregation,
            loss_observers,
            config.algorithm.reference_kl,
            config.algorithm.reference_estimator,
            weighted_reference=config.algorithm.reference_importance_weights,
            distillation=distillation_of(config.distillation, algorithm),
        )
        self.most_masked: list[MaskedToken] = []
        self.masked_by_response: dict[int, int] = {}
        self._masked_responses = MaskedResponses()
        self.loss_columns: LossColumns = {}
        self.warned_of_gap = False
        self.layout = BatchLayout.of(trainer)
        self._topk = topk
        self._guard = GapGuard(
            config.precision,
            config.rollout,
            is_coarse=is_coarse(config.sglang, config.megatron),
            has_dropout=bool(config.lora.dropout),
        )
        self._canary = FrequencyCanary(config.rollout, config.algorithm)
        # The second canary counts mini-batches whose tokens may come from other weights than the trainer has.
        self._canary_of_other_weights = FrequencyCanary(
            config.rollout, config.algorithm, at_equal_weights=False
        )
        required_sizes: dict[str, int] = {}
        if config.router_replay:
            shape = trainer.shape
            required_sizes["moe_layers"] = len(shape.moe_layers)
            required_sizes["experts_per_token"] = shape.experts_per_token
        stages = stages_of(trainer, replays=config.router_replay)
        self._exchange = ColumnExchange(trainer.topology, required_sizes, stages)

    def plan(self, batch: RolloutBatch) -> PlannedBatch:
        """Plan the mini-batches of ``batch``, and deliver each trajectory to the ranks that train on it. Collective.

        The trajectories are removed from ``batch``, so that no trajectory is in memory twice.

        Raises:
            ExchangeError: a column is missing, belongs to another model, or changed during the transfer.
            BatchFormatError: the batch carries another number of Top-K ids than the run requires, or lacks the scores
                of the run's teachers.
        """
        outlines = batch.outlines
        config = self._config
        plans = plan_mini_batches(
            outlines, config.training, config.rollout, config.algorithm, self.layout
        )
        needed_positions: list[set[int]] = []
        for rank in range(self.layout.dp_size):
            rank_positions: set[int] = set()
            for plan in plans:
                rank_positions |= plan.of_rank(rank)
            needed_positions.append(rank_positions)
        delivery = self._exchange.deliver(
            outlines, batch.trajectories, needed_positions, gather=config.rollout.save
        )
        is_stale = batch.figures.get(metric_names.STALENESS_MAX, 0) > 0
        batch.trajectories.clear()
        check_carried_topk(delivery.forms, self._topk)
        if config.distillation.teachers and outlines:
            check_teacher_scores(delivery.forms, config.distillation.top_k)
        if not (self._config.router_replay and outlines):
            return PlannedBatch(delivery, plans, {}, is_stale)
        if RECORDING not in delivery.positions:
            raise ExchangeError(
                "rollout.router_replay is true, but no response of the batch has recorded routing"
            )
        figures = routing_figures(
            outlines, delivery.positions[RECORDING], delivery.forms[RECORDING]
        )
        return PlannedBatch(delivery, plans, figures, is_stale)

    def learn(self, batch: PlannedBatch) -> dict[str, float]:
        """Train on a batch and return its metrics as means over all its tokens. Collective.

        Some algorithms need log-probabilities at the rollout's weights. These are recomputed before the first update,
        for the sampled tokens or for the whole vocabulary (fp32 [tokens, V] in memory). The log-probabilities of a
        reference policy are computed at the same time.

        Raises:
            NonFiniteLossError, GapError, FrequencyError: before the optimiser step on the mini-batch at fault.
            NonFiniteLogProbsError: a recomputed log-probability is not finite.
        """
        self.warned_of_gap = False
        start_time = time.perf_counter()
        recomputed_columns = [self._recomputed(batch, plan) for plan in batch.plans]
        self._masked_tokens.clear()
        self._masked_responses = MaskedResponses()
        total_sums = MetricSums()
        first_sums = None
        grad_norms = []
        lr = 0.0
        for plan, columns in zip(batch.plans, recomputed_columns, strict=True):
            mini_batch = _with_columns(self._packed(batch, plan), columns)
            mini_batch = with_step_bound(mini_batch, self._trainer, self._algorithm.step_bound)
            result = self._trainer.train_mini_batch(
                mini_batch.micro_batches,
                self._loss,
                mini_batch.denominator,
                is_last=plan is batch.plans[-1],
                check=partial(self._check, batch, is_first=first_sums is None),
            )
            if first_sums is None:
                first_sums = result.metrics
            total_sums = total_sums + result.metrics
            grad_norms.append(result.grad_norm)
            lr = result.lr
        self.most_masked = reduce_masked_tokens(self._masked_tokens, self._trainer.topology)
        self.masked_by_response = self._masked_responses.counts()
        if self._loss_record is not None:
            self.loss_columns = self._loss_record.collect(self._trainer.topology)
        if first_sums is None:
            # The plan has no mini-batch, because no response of the batch trains.
            return batch.figures
        return {
            **_without_nan(means(total_sums.values())),
            **batch.figures,
            **_first_figures(means(first_sums.values())),
            **self._canary.figures(),
            metric_names.GRAD_NORM: sum(grad_norms) / len(grad_norms),
            metric_names.GRAD_NORM_MAX: max(grad_norms),
            metric_names.LEARNING_RATE: lr,
            metric_names.OPTIMIZER_STEPS: len(batch.plans),
            metric_names.IDLE_SHARE: sum(plan.idle for plan in batch.plans) / len(batch.plans),
            **self._speed(batch, time.perf_counter() - start_time),
        }

    def _check(self, batch: PlannedBatch, metrics: MetricSums, *, is_first: bool) -> None:
        """Check the sums of a mini-batch before its optimiser step.

        Raises GapError or FrequencyError, on every rank; ``loss_columns`` then hold the tokens up to this mini-batch.
        """
        # After the first mini-batch, the trainer's weights are newer than the weights that sampled the batch.
        at_equal_weights = is_first and not batch.is_stale
        canary = self._canary if at_equal_weights else self._canary_of_other_weights
        try:
            if is_first:
                gap = means(metrics.values()).get(metric_names.GAP, math.nan)
                self.warned_of_gap = self._guard.check(gap, is_stale=batch.is_stale)
            canary.check(metrics.values())
        except (FrequencyError, GapError):
            if self._loss_record is not None:
                self.loss_columns = self._loss_record.collect(self._trainer.topology)
            raise

    def _speed(self, batch: PlannedBatch, seconds: float) -> dict[str, float]:
        """Return the speed of the optimiser steps and the peak memory. ``seconds``: the time of the steps.

        Activation recomputation and passes without gradient are not counted as FLOP.
        """
        # FLOP of a backward pass, divided by the FLOP of a forward pass.
        backward_ratio = BACKWARD_PRODUCTS
        if self._config.lora.rank:
            backward_ratio = FROZEN_BACKWARD_PRODUCTS
        flops = (1 + backward_ratio) * sum(plan.cost for plan in batch.plans)
        world_size = self._trainer.layout.world_size
        return {
            **arithmetic_speed(flops, seconds, world_size, platform.peak_flops()),
            # Report the largest peak of all ranks: a run ends when one rank is out of memory.
            metric_names.PEAK_MEMORY: max(all_gather_json(platform.peak_memory_bytes())) / 2**30,
        }

    def _count_masked(
        self, batch: packing.PackedBatch, inputs: TokenInputs, sums: LossSums
    ) -> None:
        if sums.blocked is not None:
            # A teacher may have changed the advantages of ``batch``.
            advantages = inputs.advantages
            self._masked_tokens.add(batch.target_ids, advantages, sums.blocked)
            self._masked_responses.add(
                batch.sequence_index, batch.cu_seqlens, advantages, sums.blocked
            )

    def _packed(self, batch: PlannedBatch, plan: MiniBatchPlan) -> MiniBatch:
        """Pack this rank's share of one optimiser step.

        Pack again for each use: kept micro-batches would hold a second copy of their trajectories' columns.
        """
        replays_routing = self._config.router_replay
        delivery = batch.delivery
        own_positions = plan.of_rank(self.layout.dp_rank)
        trajectories = {p: delivery.trajectories[p] for p in own_positions}
        if not replays_routing:
            trajectories = {p: t.without(RECORDING) for p, t in trajectories.items()}
        return pack_mini_batch(
            trajectories, plan, self.layout, self._config.algorithm, delivery.forms
        )

    def _recomputed(self, batch: PlannedBatch, plan: MiniBatchPlan) -> list[AddedColumns]:
        """Compute, for each micro-batch, the columns that the run needs and the engine does not return.

        The columns are log-probabilities of the policy at the rollout's weights and of the reference policy. The list
        is empty if the run needs no such columns.
        """
        algorithm = self._algorithm
        keeps_reference = self._config.keeps_reference
        recomputes = algorithm.needs_recomputed or algorithm.needs_recomputed_distribution
        if not (recomputes or keeps_reference):
            return []
        batches = self._packed(batch, plan).micro_batches
        columns_by_batch: list[AddedColumns] = [{} for _ in batches]
        if algorithm.needs_recomputed:
            all_log_probs = self._trainer.log_probs(batches)
            for b, log_probs, columns in zip(batches, all_log_probs, columns_by_batch, strict=True):
                columns["recomputed_log_probs"] = _where_trained(b, log_probs)
        if algorithm.needs_recomputed_distribution:
            size = self._trainer.shape.vocab_size
            full_batches = [_with_whole_vocabulary(b, size) for b in batches]
            all_log_probs = self._trainer.topk_log_probs(full_batches)
            for b, log_probs, columns in zip(
                full_batches, all_log_probs, columns_by_batch, strict=True
            ):
                columns["topk_ids"] = b.column("topk_ids")
                columns["topk_log_probs"] = log_probs.cpu()
        if keeps_reference:
            all_log_probs = self._trainer.reference_log_probs(batches)
            for b, log_probs, columns in zip(batches, all_log_probs, columns_by_batch, strict=True):
                columns["reference_log_probs"] = _where_trained(b, log_probs)
        return columns_by_batch


def distillation_of(config: DistillationConfig, algorithm: Algorithm) -> Distillation | None:
    """Return the loss with the run's teachers; None without teachers."""
    if not config.teachers:
        return None
    return Distillation(
        algorithm, config.loss, config.weight, rewards=config.rewards, masked=config.masked
    )


def stages_of(trainer: Trainer, *, replays: bool) -> Stages:
    """Return the pipeline stages; if ``replays``, with the recorded layers that each stage needs. Collective."""
    topology = trainer.topology
    if topology.pp_size == 1 or not replays:
        return Stages(topology.pp_size)
    # Each rank contributes the pair (stage, layers); ranks of one stage contribute equal pairs.
    layers_by_stage = dict(all_gather_json([topology.pp_rank, trainer.replayed_layers]))
    return Stages(topology.pp_size, [layers_by_stage[stage] for stage in range(topology.pp_size)])


def _with_columns(mini_batch: MiniBatch, added_columns: Sequence[AddedColumns]) -> MiniBatch:
    """Return the mini-batch with the added columns of each micro-batch; unchanged if the list is empty."""
    if not added_columns:
        return mini_batch
    batches: list[packing.PackedBatch] = []
    for batch, columns in zip(mini_batch.micro_batches, added_columns, strict=True):
        batches.append(batch.with_columns(**columns))
    return MiniBatch(batches, mini_batch.denominator)


def with_step_bound(
    mini_batch: MiniBatch, trainer: Trainer, step_bound: StepBound | None
) -> MiniBatch:
    """Add the column ``step_bound``, computed from all tokens of this optimiser step. Collective.

    Returns ``mini_batch`` unchanged if the algorithm has no step bound, and on all pipeline stages but the last.
    """
    if step_bound is None:
        return mini_batch
    batches = mini_batch.micro_batches
    all_log_probs = trainer.log_probs(batches)
    if not trainer.topology.is_last_stage:
        # Only the last pipeline stage has log mu and computes the loss.
        return mini_batch
    log_ratios: list[Tensor] = []
    for batch, log_probs in zip(batches, all_log_probs, strict=True):
        batch_log_ratios = _where_trained(batch, log_probs) - batch.column("rollout_log_probs")
        log_ratios.append(batch_log_ratios[batch.loss_mask])
    advantages = [b.advantages[b.loss_mask] for b in batches]

    def total(sums: Tensor) -> Tensor:
        """Add ``sums`` up over the replicas, in place."""
        dist.all_reduce(sums, group=trainer.topology.data_group)
        return sums

    device = trainer.device
    all_log_ratios = torch.cat(log_ratios).to(device)
    all_advantages = torch.cat(advantages).to(device)
    bound = step_bound(all_log_ratios, all_advantages, total)
    added_columns: list[AddedColumns] = []
    for batch in batches:
        added_columns.append({"step_bound": torch.full_like(batch.advantages, bound)})
    return _with_columns(mini_batch, added_columns)


def arithmetic_speed(
    flops: float, seconds: float, ranks: int, peak: float | None
) -> dict[str, float]:
    """Return the FLOP/s of a rank as metrics, with its share of ``peak`` FLOP/s if the peak is known."""
    rate = flops / seconds / ranks
    metrics = {metric_names.TFLOPS: rate / 1e12}
    if peak is not None:
        metrics[metric_names.MFU] = rate / peak
    return metrics


def check_carried_topk(forms: Mapping[str, Form], topk: int) -> None:
    """Raise BatchFormatError unless the batch carries ``topk`` Top-K ids for each token; 0 accepts any number.

    With fewer ids the algorithm would compute another divergence under the same name.
    """
    width = sizes_of(forms).get("topk", 0)
    if topk and width != topk:
        raise BatchFormatError(
            f"the batch has {width} Top-K ids for each token, expected {topk}: recorded with another "
            "rollout.topk_log_probs?"
        )


def check_teacher_scores(forms: Mapping[str, Form], top_k: int) -> None:
    """Raise BatchFormatError unless the batch carries a teacher's scores, with ``top_k`` ids for each token.

    ``top_k`` 0 accepts any number.
    """
    if "teacher_log_probs" not in forms:
        raise BatchFormatError(
            "the batch has no teacher_log_probs, expected a batch of a run with distillation.teachers"
        )
    width = sizes_of(forms).get("teacher_topk", 0)
    if top_k and width != top_k:
        raise BatchFormatError(
            f"the batch has {width} of a teacher's Top-K ids for each token, expected distillation.top_k = {top_k}"
        )


def _where_trained(batch: packing.PackedBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """Return ``log_probs`` [T] on the batch's device, with 0 outside its loss mask."""
    return torch.where(batch.loss_mask, log_probs.to(batch.loss_mask.device), 0.0)


def _with_whole_vocabulary(batch: packing.PackedBatch, size: int) -> packing.PackedBatch:
    """Return ``batch`` with every id of the vocabulary as TopK id, without their log-probabilities."""
    return batch.with_columns(topk_ids=torch.arange(size).expand(batch.num_tokens, size))


def _first_figures(values: dict[str, float]) -> dict[str, float]:
    """Return the metrics that exist only for the first mini-batch, because no update of the step precedes it.

    ``values``: all metrics of the first mini-batch.
    """
    figures = {metric_names.GAP_ON_POLICY: values[metric_names.GAP]}
    if metric_names.ROUTING_AGREEMENT in values:
        figures[metric_names.ROUTING_AGREEMENT_FIRST] = values[metric_names.ROUTING_AGREEMENT]
    return _without_nan(figures)


def _without_nan(values: dict[str, float]) -> dict[str, float]:
    """Return ``values`` without NaN. The mean over no token is NaN, e.g. the masked share of A < 0 if no A is < 0."""
    return {name: value for name, value in values.items() if not math.isnan(value)}
