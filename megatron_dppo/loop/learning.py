"""The learning half of a step: a batch through its mini-batches, each one optimiser step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import AGGREGATIONS, Algorithm, LossSums
from megatron_dppo.algorithms.rules import StepBound
from megatron_dppo.config.schema import AlgorithmConfig, RolloutConfig, TrainConfig, TrainingConfig
from megatron_dppo.data import packing
from megatron_dppo.data.batch_file import BatchFormatError
from megatron_dppo.data.columns import Form
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts, sizes_of
from megatron_dppo.loop.exchange import ColumnExchange, Delivery, ExchangeError, Stages
from megatron_dppo.loop.rollout_figures import (
    FrequencyCanary,
    FrequencyError,
    GapError,
    GapGuard,
    is_coarse,
    routing_figures,
)
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.sums import (
    MaskedResponses,
    MaskedToken,
    MaskedTokenCounts,
    MetricSums,
    means,
)
from megatron_dppo.model.shape import (
    BACKWARD_FORWARDS,
    FROZEN_BACKWARD_FORWARDS,
    TOKENS,
    SequenceCost,
    forward_flops,
)
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import all_gather_json, broadcast_bytes
from megatron_dppo.trainer.router_replay import RECORDING
from megatron_dppo.trainer.step import reduce_masked_tokens
from megatron_dppo.trainer.token_loss import make_token_loss
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.trainer.trainer import Trainer

# What the loss saw of each token of a step, for the saved batch: from the ranks that compute logits to global rank 0.

LossColumns = dict[int, dict[str, np.ndarray]]
"""By position in the batch, the ``LOSS_COLUMNS`` of a response that trained."""


KEPT_TOPK = 64
"""Largest K of TopK(mu) at which log pi is kept: 4 K bytes a token, beside the 8 K that the engine's have."""


class LossRecord:
    """Keeps, on the device, what the loss of ``algorithm`` sees, until ``collect``: some 60 bytes a token, and log pi
    at the engine's TopK(mu)."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._parts: list[tuple[packing.PackedBatch, dict[str, Tensor]]] = []

    def add(self, batch: packing.PackedBatch, inputs: TokenInputs, sums: LossSums) -> None:
        """Keep a micro-batch's tokens. No device sync."""
        assert sums.blocked is not None
        statistics = {
            "loss_log_probs": inputs.log_probs.detach().float(),
            "loss_recomputed_log_probs": inputs.recomputed_log_probs,
            "loss_topk_log_probs": self._topk(inputs),
            "loss_entropy": None if inputs.entropy is None else inputs.entropy.float(),
            "loss_divergence": self._algorithm.divergence(inputs),
            "loss_trains": inputs.loss_mask & ~sums.blocked,
        }
        # Top-K and recorded routing would lie on the device until the step's end.
        light = replace(batch, columns={}, valid={})
        self._parts.append((light, {name: x for name, x in statistics.items() if x is not None}))

    def _topk(self, inputs: TokenInputs) -> Tensor | None:
        """log pi [T, K] at the ids in the batch's file; a recomputed policy's TopK are others."""
        if inputs.topk_log_probs is None or self._algorithm.needs_recomputed_distribution:
            return None
        # The last one is the sampled token.
        of_engine = inputs.topk_log_probs[:, :-1].detach().float()
        return of_engine if of_engine.shape[1] <= KEPT_TOPK else None

    def collect(self, topology: Topology) -> LossColumns:
        """Everything kept since the last call, of all replicas, on global rank 0; elsewhere empty.

        Collective.
        """
        own_columns: LossColumns = {}
        for batch, statistics in self._parts:
            own_columns |= by_response(batch, statistics)
        self._parts = []
        is_source = topology.is_last_stage and topology.is_first_of_stage
        all_columns: LossColumns = {}
        # One replica after another: no rank holds more than one message at a time.
        for rank, sends in enumerate(all_gather_json(is_source)):
            if sends:
                blob = broadcast_bytes(
                    _encoded(own_columns) if rank == topology.rank else b"", rank
                )
                all_columns |= _decoded(blob) if topology.rank == 0 else {}
        return all_columns


def by_response(batch: packing.PackedBatch, statistics: Mapping[str, Tensor]) -> LossColumns:
    """The rows of each response's sampled tokens. ``statistics``: tensors [T] beside ``batch``."""
    rows = torch.nonzero(batch.loss_mask).squeeze(1)
    arrays = {name: x[rows].cpu().numpy() for name, x in statistics.items()}
    # Rows before each sequence's end: the rows of one sequence lie next to each other.
    ends = torch.searchsorted(rows, batch.cu_seqlens[1:].to(rows)).cpu().numpy()
    columns: LossColumns = {}
    for position, start, end in zip(
        batch.sequence_index.tolist(), [0, *ends[:-1]], ends, strict=True
    ):
        if end > start:
            before = columns.get(position, {})
            # There are some where it has another branch.
            columns[position] = {
                name: np.concatenate([before.get(name, x[:0]), x[start:end]])
                for name, x in arrays.items()
            }
    return columns


def _encoded(columns: LossColumns) -> bytes:
    return save({f"{p}/{name}": rows for p, c in columns.items() for name, rows in c.items()})


def _decoded(blob: bytes) -> LossColumns:
    columns: LossColumns = {}
    for key, rows in load(blob).items():
        position, _, name = key.partition("/")
        columns.setdefault(int(position), {})[name] = rows
    return columns


# From a batch of trajectories to packed micro-batches: one mini-batch is one optimiser step on whole groups.


@dataclass(frozen=True)
class BatchLayout:
    """How micro-batches must be cut for this trainer.

    ``count_multiple``: the interleaved schedule takes micro-batches in rounds of the pipeline's size.
    ``pad_multiple``, ``sequence_multiple``: ranks that share the tokens of a micro-batch, or of each sequence, have
    equally many. ``input_rows``: this rank's, of columns of the input. ``cost``: by which ranks and micro-batches are
    balanced.
    """

    dp_rank: int
    dp_size: int
    count_multiple: int = 1
    pad_multiple: int = 1
    sequence_multiple: int = 1
    input_rows: packing.InputRows | None = None
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

    micro_batches: list[packing.PackedBatch]
    denominator: float


def trains(trajectory: TrajectoryFacts, config: AlgorithmConfig) -> bool:
    """Whether the response has a gradient: all do, unless truncated ones are dropped by the configuration."""
    return not (trajectory.truncated and config.truncated_responses == "drop")


def plan_mini_batches(
    batch: Sequence[TrajectoryFacts],
    training: TrainingConfig,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    layout: BatchLayout,
) -> list[MiniBatchPlan]:
    """Cut a batch, groups adjacent, into optimiser steps. Reads no columns.

    Every rank computes the same plan from the same trajectories; the denominator counts all ranks' samples, so the
    gradient does not depend on the layout or on the packing. A mini-batch in which nothing trains is left out.
    """
    size = training.prompts_per_mini_batch * rollout.group_size
    constant = algorithm.aggregation_constant or rollout.max_response_tokens
    denominator_of = AGGREGATIONS[algorithm.aggregation].denominator
    plans = []
    for start in range(0, len(batch), size):
        part = batch[start : start + size]
        trained = [t.sampled for t in part if trains(t, algorithm)]
        denominator = denominator_of(trained, constant)
        if denominator == 0:
            continue
        # Branches of a response stay together: rules of whole responses see all of it.
        of_branches = [
            [packing.padded_length(n, layout.sequence_multiple) for n in t.branch_lengths]
            for t in part
        ]
        lengths = list(map(sum, of_branches))
        costs = [sum(map(layout.cost, branches)) for branches in of_branches]
        plan = packing.plan_mini_batch(
            lengths,
            costs,
            layout.dp_size,
            training.micro_batch_tokens,
            layout.count_multiple,
        )
        positions = [[[start + i for i in rows] for rows in rank] for rank in plan]
        plans.append(
            MiniBatchPlan(positions, denominator, sum(costs), packing.idle_share(plan, costs))
        )
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
        packing.pack(
            [batch[i] for i in rows],
            indices=rows,
            trains=[trains(batch[i], algorithm) for i in rows],
            pad_multiple=layout.pad_multiple,
            sequence_multiple=layout.sequence_multiple,
            forms=forms,
            input_rows=layout.input_rows,
        )
        for rows in plan.positions[layout.dp_rank]
    ]
    return MiniBatch(packed, plan.denominator)


Columns = dict[str, torch.Tensor]
"""Further columns of one micro-batch, by name."""


@dataclass(frozen=True)
class PlannedBatch:
    """A batch as this rank needs it, and who trains on what.

    ``figures``: metrics of the recorded routing, empty where none is replayed. ``is_stale``: whether older weights
    than the trainer's sampled some of it.
    """

    delivery: Delivery
    plans: Sequence[MiniBatchPlan]
    figures: dict[str, float]
    is_stale: bool = False

    @property
    def trajectories(self) -> Mapping[int, Trajectory]:
        """Those that this rank needs; all on global rank 0 where ``rollout.save`` wants them."""
        return self.delivery.trajectories


class Learner:
    """Turns batches into optimiser steps by ``algorithm``. ``topk``: K of the batches' TopK(mu), 0: none.

    Of the last batch: ``most_masked``, the tokens that the mask blocked most often, the same on every rank;
    ``masked_by_response``, how many of each response it blocked, on the ranks that computed their loss;
    ``loss_columns``, what the loss saw of each token, by position in the batch, on global rank 0 of a run with
    ``rollout.save``.
    """

    def __init__(
        self, config: TrainConfig, trainer: Trainer, algorithm: Algorithm, topk: int
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._algorithm = algorithm
        self._masked = MaskedTokenCounts(trainer.shape.vocab_size)
        self._seen = LossRecord(algorithm) if config.rollout.save else None
        self._loss = make_token_loss(
            algorithm,
            config.algorithm.aggregation,
            [self._count_masked, *([self._seen.add] if self._seen else ())],
            config.algorithm.reference_kl,
            config.algorithm.reference_estimator,
            weighted_reference=config.algorithm.reference_importance_weights,
        )
        self.most_masked: list[MaskedToken] = []
        self.masked_by_response: dict[int, int] = {}
        self._masked_responses = MaskedResponses()
        self.loss_columns: LossColumns = {}
        self.layout = BatchLayout(
            dp_rank=trainer.topology.dp_rank,
            dp_size=trainer.topology.dp_size,
            count_multiple=trainer.micro_batch_multiple,
            pad_multiple=trainer.pad_multiple,
            sequence_multiple=trainer.share.sequence_multiple,
            input_rows=trainer.input_rows,
            cost=forward_flops(trainer.shape),
        )
        self._topk = topk
        self._guard = GapGuard(
            config.model.dtype,
            config.rollout,
            is_coarse=is_coarse(config.sglang, config.megatron),
            has_dropout=bool(config.lora.dropout),
        )
        self._canary = FrequencyCanary(config.rollout, config.algorithm)
        self._canary_of_others = FrequencyCanary(
            config.rollout, config.algorithm, at_equal_weights=False
        )
        shape = trainer.shape
        sizes = {"moe_layers": len(shape.moe_layers), "experts_per_token": shape.experts_per_token}
        self._exchange = ColumnExchange(
            trainer.topology,
            sizes if config.router_replay else {},
            stages_of(trainer, replays=config.router_replay),
        )

    def plan(self, batch: RolloutBatch) -> PlannedBatch:
        """Who trains on what, and each trajectory with those who need it. Collective.

        ``batch`` is left without its own trajectories: nothing is in memory twice.
        Raises ExchangeError where a column is missing, another model's, or changed on its way, and
        BatchFormatError where the batch carries another number of Top-K ids than the run asks for.
        """
        outlines = batch.outlines
        config = self._config
        plans = plan_mini_batches(
            outlines, config.training, config.rollout, config.algorithm, self.layout
        )
        needed = [
            set[int]().union(*(plan.of_rank(rank) for plan in plans))
            for rank in range(self.layout.dp_size)
        ]
        delivery = self._exchange.deliver(
            outlines, batch.trajectories, needed, gather=config.rollout.save
        )
        is_stale = batch.figures.get(names.STALENESS_MAX, 0) > 0
        batch.trajectories.clear()
        check_carried_topk(delivery.forms, self._topk)
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
        """Train on a batch; its metrics as means over all its tokens. Collective.

        Log-probabilities at the rollout's weights are recomputed before the first update, and only where the
        algorithm needs them: as its anchor, or of the whole vocabulary (fp32 [tokens, V] in memory); likewise the
        reference policy's. Raises NonFiniteLossError and GapError before the step that would have applied it, and
        NonFiniteLogProbsError where recomputed ones are none.
        """
        began = time.perf_counter()
        recomputed = [self._recomputed(batch, plan) for plan in batch.plans]
        self._masked.clear()
        self._masked_responses = MaskedResponses()
        total, first, grad_norms, lr = MetricSums(), None, [], 0.0
        for plan, further in zip(batch.plans, recomputed, strict=True):
            mini = _with_columns(self._packed(batch, plan), further)
            mini = with_step_bound(mini, self._trainer, self._algorithm.step_bound)
            result = self._trainer.train_mini_batch(
                mini.micro_batches,
                self._loss,
                mini.denominator,
                is_last=plan is batch.plans[-1],
                check=partial(self._check, batch, is_first=first is None),
            )
            first = result.metrics if first is None else first
            total = total + result.metrics
            grad_norms.append(result.grad_norm)
            lr = result.lr
        self.most_masked = reduce_masked_tokens(self._masked, self._trainer.topology)
        self.masked_by_response = self._masked_responses.counts()
        if self._seen is not None:
            self.loss_columns = self._seen.collect(self._trainer.topology)
        if first is None:
            # Every mini-batch was left out: no response of the batch trains.
            return batch.figures
        return {
            **_measured(means(total.values())),
            **batch.figures,
            **_of_the_first(means(first.values())),
            **self._canary.figures(),
            names.GRAD_NORM: sum(grad_norms) / len(grad_norms),
            names.GRAD_NORM_MAX: max(grad_norms),
            names.LEARNING_RATE: lr,
            names.OPTIMIZER_STEPS: len(batch.plans),
            names.IDLE_SHARE: sum(plan.idle for plan in batch.plans) / len(batch.plans),
            **self._speed(batch, time.perf_counter() - began),
        }

    def _check(self, batch: PlannedBatch, metrics: MetricSums, *, is_first: bool) -> None:
        """Raise GapError or FrequencyError, on every rank; ``loss_columns`` then tell what the loss saw until there."""
        try:
            if is_first:
                gap = means(metrics.values()).get(names.GAP, math.nan)
                self._guard.check(gap, is_stale=batch.is_stale)
            is_equal = is_first and not batch.is_stale
            (self._canary if is_equal else self._canary_of_others).check(metrics.values())
        except (FrequencyError, GapError):
            if self._seen is not None:
                self.loss_columns = self._seen.collect(self._trainer.topology)
            raise

    def _speed(self, batch: PlannedBatch, seconds: float) -> dict[str, float]:
        """Arithmetic of the optimiser steps (recomputation and passes without gradient don't count), and memory."""
        backward = FROZEN_BACKWARD_FORWARDS if self._config.lora.rank else BACKWARD_FORWARDS
        flops = (1 + backward) * sum(plan.cost for plan in batch.plans)
        world = self._trainer.layout.world_size
        return {
            **arithmetic_speed(flops, seconds, world, platform.peak_flops()),
            # The fullest rank is the one that ends a run.
            names.PEAK_MEMORY: max(all_gather_json(platform.peak_memory_bytes())) / 2**30,
        }

    def _count_masked(
        self, batch: packing.PackedBatch, inputs: TokenInputs, sums: LossSums
    ) -> None:
        if sums.blocked is not None:
            self._masked.add(batch.target_ids, batch.advantages, sums.blocked)
            self._masked_responses.add(
                batch.sequence_index, batch.cu_seqlens, batch.advantages, sums.blocked
            )

    def _packed(self, batch: PlannedBatch, plan: MiniBatchPlan) -> MiniBatch:
        """This rank's share of one optimiser step. Packs are made anew when they are used: those of a
        whole step would take as much memory as the step's columns."""
        replayed, delivery = self._config.router_replay, batch.delivery
        own_positions = plan.of_rank(self.layout.dp_rank)
        trained = {p: delivery.trajectories[p] for p in own_positions}
        if not replayed:
            trained = {p: t.without(RECORDING) for p, t in trained.items()}
        return pack_mini_batch(trained, plan, self.layout, self._config.algorithm, delivery.forms)

    def _recomputed(self, batch: PlannedBatch, plan: MiniBatchPlan) -> list[Columns]:
        """By micro-batch, what the algorithm needs of the policy at the rollout's weights and the engine
        doesn't say; empty where it needs nothing."""
        algorithm, keeps_reference = self._algorithm, self._config.keeps_reference
        is_needed = algorithm.needs_recomputed or algorithm.needs_recomputed_distribution
        if not (is_needed or keeps_reference):
            return []
        batches = self._packed(batch, plan).micro_batches
        columns_by_batch: list[Columns] = [{} for _ in batches]
        if self._algorithm.needs_recomputed:
            values = self._trainer.log_probs(batches)
            for b, p, columns in zip(batches, values, columns_by_batch, strict=True):
                columns["recomputed_log_probs"] = _where_trained(b, p)
        if self._algorithm.needs_recomputed_distribution:
            size = self._trainer.shape.vocab_size
            asking = [_with_whole_vocabulary(b, size) for b in batches]
            values = self._trainer.topk_log_probs(asking)
            for b, p, columns in zip(asking, values, columns_by_batch, strict=True):
                columns |= {"topk_ids": b.column("topk_ids"), "topk_log_probs": p.cpu()}
        if keeps_reference:
            values = self._trainer.reference_log_probs(batches)
            for b, p, columns in zip(batches, values, columns_by_batch, strict=True):
                columns["reference_log_probs"] = _where_trained(b, p)
        return columns_by_batch


def stages_of(trainer: Trainer, *, replays: bool) -> Stages:
    """The pipeline stages, and where recorded routing is replayed, which of its layers each needs. Collective."""
    topology = trainer.topology
    if topology.pp_size == 1 or not replays:
        return Stages(topology.pp_size)
    ranks_by_stage = {
        stage: layers
        for stage, layers in all_gather_json([topology.pp_rank, trainer.replayed_layers])
    }
    return Stages(topology.pp_size, [ranks_by_stage[stage] for stage in range(topology.pp_size)])


def _with_columns(mini: MiniBatch, further: Sequence[Columns]) -> MiniBatch:
    """The mini-batch with ``further`` columns of each micro-batch, if there are any."""
    if not further:
        return mini
    batches = [b.with_columns(**c) for b, c in zip(mini.micro_batches, further, strict=True)]
    return MiniBatch(batches, mini.denominator)


def with_step_bound(mini: MiniBatch, trainer: Trainer, step_bound: StepBound | None) -> MiniBatch:
    """With what ``step_bound`` finds of all tokens of this optimiser step, if there is one; collective."""
    if step_bound is None:
        return mini
    batches = mini.micro_batches
    log_probs = trainer.log_probs(batches)
    if not trainer.topology.is_last_stage:
        # Only the last one has log mu, and the loss.
        return mini
    log_ratios = [
        (_where_trained(b, p) - b.column("rollout_log_probs"))[b.loss_mask]
        for b, p in zip(batches, log_probs, strict=True)
    ]
    advantages = [b.advantages[b.loss_mask] for b in batches]

    def total(values: Tensor) -> Tensor:
        dist.all_reduce(values, group=trainer.topology.data_group)
        return values

    device = trainer.device
    bound = step_bound(torch.cat(log_ratios).to(device), torch.cat(advantages).to(device), total)
    columns: list[Columns] = [{"step_bound": torch.full_like(b.advantages, bound)} for b in batches]
    return _with_columns(mini, columns)


def arithmetic_speed(
    flops: float, seconds: float, ranks: int, peak: float | None
) -> dict[str, float]:
    """FLOP/s of a rank as metrics; its share of ``peak`` FLOP/s only where that is known."""
    rate = flops / seconds / ranks
    return {names.TFLOPS: rate / 1e12} | ({} if peak is None else {names.MFU: rate / peak})


def check_carried_topk(forms: Mapping[str, Form], topk: int) -> None:
    """Raise BatchFormatError where a batch's Top-K has not ``topk`` ids a token; 0: whatever it has.

    Fewer would make another divergence of the algorithm, under its name.
    """
    width = sizes_of(forms).get("topk", 0)
    if topk and width != topk:
        raise BatchFormatError(
            f"the batch has {width} Top-K ids for each token, expected {topk}: recorded with another "
            "rollout.topk_log_probs?"
        )


def _where_trained(batch: packing.PackedBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """``log_probs`` [T] on the batch's device, 0 outside its loss mask."""
    return torch.where(batch.loss_mask, log_probs.to(batch.loss_mask.device), 0.0)


def _with_whole_vocabulary(batch: packing.PackedBatch, size: int) -> packing.PackedBatch:
    """``batch`` with every id of the vocabulary as its TopK ids; their log-probabilities are still to come."""
    return batch.with_columns(topk_ids=torch.arange(size).expand(batch.num_tokens, size))


def _of_the_first(values: dict[str, float]) -> dict[str, float]:
    """What the first mini-batch's means tell under names of their own: nothing has moved the weights yet."""
    figures = {names.GAP_ON_POLICY: values[names.GAP]}
    if names.ROUTING_AGREEMENT in values:
        figures[names.ROUTING_AGREEMENT_FIRST] = values[names.ROUTING_AGREEMENT]
    return _measured(figures)


def _measured(values: dict[str, float]) -> dict[str, float]:
    """``values`` without the means over no token, such as the masked share of A < 0 where every advantage is 0."""
    return {name: value for name, value in values.items() if not math.isnan(value)}
