"""The loss of a packed micro-batch from its statistics: ``PackedBatch`` columns become
``TokenInputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.algorithms.aggregation import AGGREGATIONS
from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import LossSums, policy_loss
from megatron_dppo.algorithms.reference_penalty import reference_penalty
from megatron_dppo.algorithms.table import AggregationName, EstimatorName
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.vocab_parallel.policy_stats import PolicyStats

TokenLoss = Callable[[PolicyStats, PackedBatch], LossSums]
"""The function that the trainer calls with the statistics of each micro-batch."""


LossObserver = Callable[[PackedBatch, TokenInputs, LossSums], None]
"""Is told of each micro-batch what the loss saw and made of it."""


def make_token_loss(
    algorithm: Algorithm,
    aggregation: AggregationName = "sequence-mean-with-constant",
    observers: Sequence[LossObserver] = (),
    reference_kl: float = 0.0,
    reference_estimator: EstimatorName = "k3",
    *,
    weighted_reference: bool = False,
) -> TokenLoss:
    """The loss of ``algorithm`` as a function of a micro-batch's statistics: a SUM over tokens.

    ``aggregation``: a name in ``algorithms.aggregation.AGGREGATIONS``, whose factor of each token
    the sum has; its denominator is the caller's. ``reference_kl``: factor of the penalty on leaving
    the reference policy, whose log-probabilities the batch then has; 0: none.
    ``reference_estimator``: a name in ``algorithms.reference_penalty.ESTIMATORS``; ``weighted_reference``:
    times min(pi / mu, the algorithm's cap).
    """
    cap = algorithm.ratio_cap if weighted_reference else None
    penalty = None
    if reference_kl:
        penalty = reference_penalty(reference_kl, reference_estimator, cap)
    token_scale = AGGREGATIONS[aggregation].token_scale

    def token_loss(stats: PolicyStats, batch: PackedBatch) -> LossSums:
        inputs = inputs_from(stats, batch)
        scale = None
        if token_scale is not None:
            scale = token_scale(inputs)
        sums = policy_loss(algorithm, inputs, scale)
        if penalty is not None:
            reference = batch.column("reference_log_probs").to(inputs.log_probs.device)
            sums = penalty(sums, inputs, reference, scale)
        for observe in observers:
            observe(batch, inputs, sums)
        return sums

    return token_loss


def inputs_from(stats: PolicyStats, batch: PackedBatch) -> TokenInputs:
    """Align a micro-batch with its statistics, on the statistics' device.

    The sampled token becomes the last of K + 1 columns; it is marked invalid where TopK(mu) already
    holds it, so that no probability counts twice. Without ``stats.topk_log_probs`` the result has
    no Top-K. ValueError where the statistics have it and the batch does not, and where the batch has
    no rollout log-probabilities.
    """
    batch = batch.to(stats.log_probs.device)
    topk = rollout_topk = valid = None
    if stats.topk_log_probs is not None:
        topk, rollout_topk, valid = with_sampled(
            stats.topk_log_probs,
            batch.column("topk_log_probs"),
            batch.column("topk_ids"),
            sampled=(stats.log_probs.detach(), batch.column("rollout_log_probs"), batch.target_ids),
        )
    branches = branch_ids(batch)
    size = stats.vocab_size
    return TokenInputs(
        log_probs=stats.log_probs,
        rollout_log_probs=batch.column("rollout_log_probs"),
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        recomputed_log_probs=batch.columns.get("recomputed_log_probs"),
        topk_log_probs=topk,
        rollout_topk_log_probs=rollout_topk,
        topk_valid=valid,
        entropy=None if stats.entropy is None else stats.entropy.detach(),
        sequence_ids=sequence_ids(batch, branches),
        branch_ids=branches,
        sum_squares=stats.sum_squares,
        step_bound=batch.columns.get("step_bound"),
        tail_ids=None if valid is None or size is None else size - valid.sum(-1),
    )


def sequence_ids(batch: PackedBatch, branches: Tensor) -> Tensor:
    """int64 [T]: which response of the pack each token belongs to; all ``branches`` (``branch_ids``) of one are one."""
    responses = (batch.sequence_index.diff() != 0).long().cumsum(0)
    return F.pad(responses, (1, 0))[branches]


def branch_ids(batch: PackedBatch) -> Tensor:
    """int64 [T]: which sequence of the pack each token belongs to: a branch of a response."""
    positions = torch.arange(batch.target_ids.numel(), device=batch.target_ids.device)
    return torch.searchsorted(batch.cu_seqlens[1:].to(torch.int64), positions, right=True)


def with_sampled(
    topk: Tensor,
    rollout_topk: Tensor,
    ids: Tensor,
    *,
    sampled: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """log pi and log mu at TopK(mu) and at the sampled token, [T, K + 1], and which of them count, bool.

    ``topk``, ``rollout_topk``, ``ids``: [T, K], ids -1 where there is none. ``sampled``: log pi, log mu and ids [T].
    """
    log_probs, rollout_log_probs, token_ids = sampled
    valid = ids >= 0
    sampled_is_new = ~((ids == token_ids[:, None]) & valid).any(1)
    return (
        torch.cat([topk, log_probs[:, None]], 1),
        torch.cat([rollout_topk.masked_fill(~valid, 0), rollout_log_probs[:, None]], 1),
        torch.cat([valid, sampled_is_new[:, None]], 1),
    )
