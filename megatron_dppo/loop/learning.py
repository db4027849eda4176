"""The learning half of a step: a rollout batch through its mini-batches, each one optimiser step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_dppo.algorithms.presets import Algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.batches import BatchLayout, mini_batches
from megatron_dppo.metrics import names
from megatron_dppo.metrics.definitions import means
from megatron_dppo.metrics.sums import MetricSums
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.types import Rollout
from megatron_dppo.vocab_parallel.token_loss import make_token_loss


class Learner:
    """Turns rollout batches into optimiser steps by ``algorithm``. ``topk``: K of the batches' TopK(mu), 0: none."""

    def __init__(
        self, config: TrainConfig, trainer: Trainer, algorithm: Algorithm, topk: int
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._algorithm = algorithm
        self._loss = make_token_loss(algorithm)
        self.layout = BatchLayout(
            dp_rank=trainer.topology.dp_rank,
            dp_size=trainer.topology.dp_size,
            count_multiple=trainer.micro_batch_multiple,
            pad_multiple=trainer.pad_multiple,
            topk=topk,
        )

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Train on a batch; its metrics as means over all its tokens. Collective.

        Log-probabilities at the rollout's weights are recomputed before the first update, and only where the
        algorithm's anchor needs them. Raises NonFiniteLossError before the step that would have applied it.
        """
        batches = list(mini_batches(rollouts, self._config, self.layout))
        if self._algorithm.needs_recomputed:
            for mini in batches:
                recomputed = self._trainer.log_probs(mini.micro_batches)
                mini.micro_batches[:] = [
                    replace(b, recomputed_log_probs=p.to(b.rollout_log_probs.device) * b.loss_mask)
                    for b, p in zip(mini.micro_batches, recomputed, strict=True)
                ]
        total, first, grad_norms, lr = MetricSums(), None, [], 0.0
        for mini in batches:
            result = self._trainer.train_mini_batch(
                mini.micro_batches, self._loss, mini.denominator
            )
            first = result.metrics if first is None else first
            total = total.merge(result.metrics)
            grad_norms.append(result.grad_norm)
            lr = result.lr
        if first is None:
            return {}
        return {
            **_measured(means(total.values())),
            names.GAP_ON_POLICY: means(first.values())[names.GAP],
            names.GRAD_NORM: sum(grad_norms) / len(grad_norms),
            "optimizer/grad_norm_max": max(grad_norms),
            "optimizer/lr": lr,
            "optimizer/steps": len(batches),
        }


def _measured(values: dict[str, float]) -> dict[str, float]:
    """``values`` without the means over no token, such as the masked share of A < 0 where every advantage is 0."""
    return {name: value for name, value in values.items() if not math.isnan(value)}
