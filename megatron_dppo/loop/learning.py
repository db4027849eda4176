"""The learning half of a step: a rollout batch through its mini-batches, each one optimiser step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.algorithms.presets import Algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.loop.batches import (
    BatchLayout,
    MiniBatch,
    pack_mini_batch,
    plan_mini_batches,
    training_samples,
)
from megatron_dppo.loop.rollouts.routing_exchange import RoutingExchange
from megatron_dppo.metrics import names
from megatron_dppo.metrics.definitions import means
from megatron_dppo.metrics.masked_tokens import MaskedToken, MaskedTokenCounts
from megatron_dppo.metrics.sums import MetricSums
from megatron_dppo.trainer.reduction import reduce_masked_tokens
from megatron_dppo.trainer.token_loss import TokenLoss, make_token_loss
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.types import Rollout
from megatron_dppo.vocab_parallel import PolicyStats


class Learner:
    """Turns rollout batches into optimiser steps by ``algorithm``. ``topk``: K of the batches' TopK(mu), 0: none.

    ``most_masked``: the tokens that the mask blocked most often in the last batch, the same on every rank.
    """

    def __init__(
        self, config: TrainConfig, trainer: Trainer, algorithm: Algorithm, topk: int
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._algorithm = algorithm
        self._masked = MaskedTokenCounts(trainer.shape.vocab_size)
        self._loss = _counting(
            make_token_loss(algorithm, config.algorithm.aggregation), self._masked
        )
        self.most_masked: list[MaskedToken] = []
        self.layout = BatchLayout(
            dp_rank=trainer.topology.dp_rank,
            dp_size=trainer.topology.dp_size,
            count_multiple=trainer.micro_batch_multiple,
            pad_multiple=trainer.pad_multiple,
            topk=topk,
        )
        self._routing: RoutingExchange | None = None
        if config.router_replay:
            self._routing = RoutingExchange(trainer.topology, trainer.shape)

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Train on a batch; its metrics as means over all its tokens. Collective.

        Under router replay the recorded routing is moved to the ranks that train on it, in ``rollouts`` itself;
        global rank 0 has all of it afterwards where ``rollout.save`` wants the batch whole.
        Log-probabilities at the rollout's weights are recomputed before the first update, and only where the
        algorithm needs them: as its anchor, or of the whole vocabulary (fp32 [tokens, V] in memory). Raises
        NonFiniteLossError before the step that would have applied it, NonFiniteLogProbsError where recomputed
        ones are none, RoutingExchangeError where recorded routing is missing or changed on its way, and
        ValueError where the rollouts carry another number of Top-K ids than the run asks for.
        """
        check_carried_topk(rollouts, self.layout.topk)
        batches, routing = self._mini_batches(rollouts)
        self._recompute(batches)
        self._masked.clear()
        total, first, grad_norms, lr = MetricSums(), None, [], 0.0
        for mini in batches:
            result = self._trainer.train_mini_batch(
                mini.micro_batches, self._loss, mini.denominator
            )
            first = result.metrics if first is None else first
            total = total.merge(result.metrics)
            grad_norms.append(result.grad_norm)
            lr = result.lr
        self.most_masked = reduce_masked_tokens(self._masked, self._trainer.topology)
        if first is None:
            return routing
        return {
            **_measured(means(total.values())),
            **routing,
            **_of_the_first(means(first.values())),
            names.GRAD_NORM: sum(grad_norms) / len(grad_norms),
            "optimizer/grad_norm_max": max(grad_norms),
            "optimizer/lr": lr,
            "optimizer/steps": len(batches),
        }

    def _recompute(self, batches: Sequence[MiniBatch]) -> None:
        """What the algorithm needs of the policy at the rollout's weights and the engine doesn't say."""
        whole = self._algorithm.needs_recomputed_distribution
        for mini in batches:
            if self._algorithm.needs_recomputed:
                recomputed = self._trainer.log_probs(mini.micro_batches)
                mini.micro_batches[:] = [
                    replace(b, recomputed_log_probs=_where_trained(b, p))
                    for b, p in zip(mini.micro_batches, recomputed, strict=True)
                ]
            if whole:
                size = self._trainer.shape.vocab_size
                asking = [_with_whole_vocabulary(b, size) for b in mini.micro_batches]
                mini.micro_batches[:] = [
                    replace(b, rollout_topk_log_probs=p.to(b.rollout_log_probs.device))
                    for b, p in zip(asking, self._trainer.topk_log_probs(asking), strict=True)
                ]

    def _mini_batches(
        self, rollouts: Sequence[Rollout]
    ) -> tuple[list[MiniBatch], dict[str, float]]:
        """This rank's share of each optimiser step, and the metrics of recorded routing."""
        plans = plan_mini_batches(rollouts, self._config, self.layout)
        figures: dict[str, float] = {}
        if self._routing is not None:
            needed = [
                set().union(*(plan.of_rank(rank) for plan in plans))
                for rank in range(self.layout.dp_size)
            ]
            figures = self._routing.deliver(rollouts, needed, gather=self._config.rollout.save)
        samples = training_samples(rollouts, self._config)
        return [pack_mini_batch(samples, plan, self.layout) for plan in plans], figures


def check_carried_topk(rollouts: Sequence[Rollout], topk: int) -> None:
    """Raise ValueError where a rollout's Top-K has not ``topk`` ids a token; 0: whatever it has.

    Fewer would make another divergence of the algorithm, under its name.
    """
    for rollout in rollouts:
        width = 0 if rollout.topk_ids is None else rollout.topk_ids.shape[1]
        if topk and width != topk:
            raise ValueError(
                f"problem {rollout.problem_id}, sample {rollout.sample_index}: {width} Top-K ids for "
                f"each token, expected {topk}: recorded with another rollout.topk_log_probs?"
            )


def _where_trained(batch: PackedBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """``log_probs`` [T] on the batch's device, 0 outside its loss mask."""
    return torch.where(batch.loss_mask, log_probs.to(batch.loss_mask.device), 0.0)


def _with_whole_vocabulary(batch: PackedBatch, size: int) -> PackedBatch:
    """``batch`` with every id of the vocabulary as its TopK ids; their log-probabilities are still to come."""
    shape = (batch.num_tokens, size)
    return replace(
        batch,
        rollout_topk_ids=torch.arange(size).expand(shape),
        rollout_topk_log_probs=torch.zeros(()).expand(shape),
        rollout_topk_valid=torch.ones((), dtype=torch.bool).expand(shape),
    )


def _counting(loss: TokenLoss, masked: MaskedTokenCounts) -> TokenLoss:
    """``loss``, with the tokens that its mask blocks counted in ``masked``."""

    def counted(stats: PolicyStats, batch: PackedBatch) -> LossSums:
        sums = loss(stats, batch)
        if sums.blocked is not None:
            masked.add(batch.target_ids, batch.advantages, sums.blocked)
        return sums

    return counted


def _of_the_first(values: dict[str, float]) -> dict[str, float]:
    """What the first mini-batch's means tell under names of their own: nothing has moved the weights yet."""
    told = {names.GAP_ON_POLICY: values[names.GAP]}
    if names.ROUTING_AGREEMENT in values:
        told[names.ROUTING_AGREEMENT_FIRST] = values[names.ROUTING_AGREEMENT]
    return _measured(told)


def _measured(values: dict[str, float]) -> dict[str, float]:
    """``values`` without the means over no token, such as the masked share of A < 0 where every advantage is 0."""
    return {name: value for name, value in values.items() if not math.isnan(value)}
