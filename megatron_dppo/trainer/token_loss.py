"""The loss of a packed micro-batch. The algorithm's ``TokenInputs`` are made from statistics and ``PackedBatch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.algorithms.aggregation import AGGREGATIONS
from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.distillation import Distillation, TeacherScores, TeacherTopk
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import LossSums, policy_loss
from megatron_dppo.algorithms.reference_penalty import reference_penalty
from megatron_dppo.algorithms.table import AggregationName, EstimatorName
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.vocab_parallel.policy_stats import PolicyStats

TokenLoss = Callable[[PolicyStats, PackedBatch], LossSums]
"""The function that the trainer calls with the statistics of each micro-batch."""


LossObserver = Callable[[PackedBatch, TokenInputs, LossSums], None]
"""Callback with each micro-batch, the inputs of its loss, and the result."""


def make_token_loss(
    algorithm: Algorithm,
    aggregation: AggregationName = "sequence-mean-with-constant",
    observers: Sequence[LossObserver] = (),
    reference_kl: float = 0.0,
    reference_estimator: EstimatorName = "k3",
    *,
    weighted_reference: bool = False,
    distillation: Distillation | None = None,
) -> TokenLoss:
    """Return the loss of ``algorithm``, a SUM over tokens, as a function of a micro-batch's statistics.

    Args:
        algorithm: the algorithm.
        aggregation: a name in ``algorithms.aggregation.AGGREGATIONS``. The returned function multiplies
            each token by the aggregation's factor; the caller divides by the aggregation's denominator.
        observers: called with each micro-batch and its loss.
        reference_kl: factor of the penalty on leaving the reference policy; 0: no penalty. With a penalty, batches need
            the column of the reference policy's log-probabilities.
        reference_estimator: a name in ``algorithms.reference_penalty.ESTIMATORS``.
        weighted_reference: whether the penalty of a token is multiplied by min(pi / mu, the algorithm's cap). pi is the
            trained policy, mu the rollout policy.
        distillation: the loss with a teacher; batches then need the columns of the teacher's scores. None: no teacher.
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
        if distillation is None:
            sums = policy_loss(algorithm, inputs, scale)
        else:
            inputs, sums = distillation.sums(inputs, teacher_scores(stats, batch), scale)
        if penalty is not None:
            reference = batch.column("reference_log_probs").to(inputs.log_probs.device)
            sums = penalty(sums, inputs, reference, scale)
        for observe in observers:
            observe(batch, inputs, sums)
        return sums

    return token_loss


def inputs_from(stats: PolicyStats, batch: PackedBatch) -> TokenInputs:
    """Combine a micro-batch with its statistics, on the statistics' device.

    The sampled token becomes the last of K + 1 Top-K columns. If the Top-K ids have the token already, the last column
    is marked invalid, so that no probability counts twice. Without ``stats.topk_log_probs`` the result has no Top-K
    tensors. Raises ValueError if the batch lacks a column that is needed, for example the rollout log-probabilities.
    """
    batch = batch.to(stats.log_probs.device)
    topk = None
    rollout_topk = None
    valid = None
    if stats.topk_log_probs is not None:
        topk, rollout_topk, valid = with_sampled(
            stats.topk_log_probs,
            batch.column("topk_log_probs"),
            batch.column("topk_ids"),
            sampled=(stats.log_probs.detach(), batch.column("rollout_log_probs"), batch.target_ids),
        )
    branches = branch_ids(batch)
    # The number of ids outside of the columns.
    tail_ids = None
    if valid is not None and stats.vocab_size is not None:
        tail_ids = stats.vocab_size - valid.sum(-1)
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
        tail_ids=tail_ids,
    )


def teacher_scores(stats: PolicyStats, batch: PackedBatch) -> TeacherScores:
    """Combine the teacher's columns of a micro-batch with its statistics, on the statistics' device.

    Raises ValueError if the batch has no ``teacher_log_probs``.
    """
    batch = batch.to(stats.log_probs.device)
    teacher_log_probs = batch.column("teacher_log_probs")
    if stats.teacher_topk_log_probs is None:
        return TeacherScores(teacher_log_probs)
    columns = with_sampled(
        stats.teacher_topk_log_probs,
        batch.column("teacher_topk_log_probs"),
        batch.column("teacher_topk_ids"),
        sampled=(stats.log_probs, teacher_log_probs, batch.target_ids),
    )
    return TeacherScores(teacher_log_probs, TeacherTopk(*columns))


def sequence_ids(batch: PackedBatch, branches: Tensor) -> Tensor:
    """Return for each token the number of its response in the pack, int64 [T]. ``branches``: see ``branch_ids``."""
    # Branches of one response follow each other in the pack and have the same ``sequence_index``.
    is_new_response = batch.sequence_index.diff() != 0
    response_of_branch = F.pad(is_new_response.long().cumsum(0), (1, 0))
    return response_of_branch[branches]


def branch_ids(batch: PackedBatch) -> Tensor:
    """Return for each token the number of its sequence in the pack, int64 [T]; a sequence is a branch of a response."""
    positions = torch.arange(batch.target_ids.numel(), device=batch.target_ids.device)
    return torch.searchsorted(batch.cu_seqlens[1:].to(torch.int64), positions, right=True)


def with_sampled(
    topk: Tensor, rollout_topk: Tensor, ids: Tensor, *, sampled: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log pi and log mu at TopK(mu) and the sampled token, [T, K + 1], and a bool mask of valid columns. A
    teacher's scores may take the place of mu's.

    ``topk``, ``rollout_topk``, ``ids``: [T, K], with id -1 in empty columns. ``sampled``: log pi, log mu and ids [T].
    """
    log_probs, rollout_log_probs, token_ids = sampled
    valid = ids >= 0
    sampled_is_new = ~((ids == token_ids[:, None]) & valid).any(1)
    return (
        torch.cat([topk, log_probs[:, None]], 1),
        torch.cat([rollout_topk.masked_fill(~valid, 0), rollout_log_probs[:, None]], 1),
        torch.cat([valid, sampled_is_new[:, None]], 1),
    )
