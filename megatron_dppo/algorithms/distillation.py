"""On-policy distillation: losses that draw the policy to a teacher at the tokens that were sampled.

Legend: pi = the policy that trains, p_T = the teacher, mu = the policy that sampled, y = the sampled token. S = the ids
of TopK(p_T) and y. Columns of Top-K tensors: TopK(p_T), and last y. m and q = the mass of all other ids, under p_T and
pi.

The losses hold the states (the tokens before y) fixed, as an algorithm's surrogate does: a loss has no gradient through
the probability of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dppo.algorithms import rules, table
from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.decisions import decide
from megatron_dppo.algorithms.divergence import clamped, kl_term
from megatron_dppo.algorithms.inputs import TokenInputs, rollout
from megatron_dppo.algorithms.policy_loss import LossSums, policy_loss
from megatron_dppo.algorithms.token_metrics import count_of, sum_over
from megatron_dppo.algorithms.topk_terms import loss_term
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import MetricSums

Distance = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log pi [..., K + 1], log p_T [..., K + 1], valid columns [..., K + 1]) -> a divergence of S and one bucket for the
other ids [...], and its derivative by log pi at the columns [..., K + 1]. Both are float64, without gradient."""


class TeacherTopk(NamedTuple):
    """A teacher's and the policy's log-probabilities at the columns, ``[..., K + 1]``: the arguments of a ``Distance``.

    Attributes:
        log_pi: log pi, with gradient.
        log_teacher: log p_T.
        valid: Bool: False for padding, and for y if TopK(p_T) holds y.
    """

    log_pi: Tensor
    log_teacher: Tensor
    valid: Tensor


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's log-probabilities (natural logarithms) of T tokens.

    Attributes:
        log_probs: log p_T of y, shaped as ``TokenInputs.log_probs``.
        topk: the log-probabilities at the columns. None without TopK(p_T).
    """

    log_probs: Tensor
    topk: TeacherTopk | None = None


@torch.no_grad()
def reverse_kl(log_pi: Tensor, log_teacher: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL(pi || p_T) over S and one bucket: sum over S of pi log(pi / p_T), and q log(q / m).

    The derivative by log pi_i, with q = 1 - sum over S of pi, is pi_i (log(pi_i / p_Ti) - log(q / m)). The value is a
    lower bound of the KL over the vocabulary. The gradient by the logits equals the whole KL's if all ids outside of S
    have equal pi / p_T.
    """
    (pi, log_pi), (_, log_teacher) = _with_bucket(log_pi, log_teacher, valid)
    terms = kl_term(pi, log_pi, log_teacher)
    rest_log_ratio = (log_pi - log_teacher)[..., -1:]
    return terms.sum(-1), terms[..., :-1] - pi[..., :-1] * rest_log_ratio


@torch.no_grad()
def forward_kl(log_pi: Tensor, log_teacher: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute KL(p_T || pi) over S and one bucket: sum over S of p_T log(p_T / pi), and m log(m / q).

    The derivative by log pi_i, with q = 1 - sum over S of pi, is -p_Ti + pi_i m / q. The value is a lower bound of the
    KL over the vocabulary. The gradient by the logits equals the whole KL's if all ids outside of S have equal
    pi / p_T. The value is inf if pi = 0 < p_T at a column.
    """
    (pi, log_pi), (teacher, log_teacher) = _with_bucket(log_pi, log_teacher, valid)
    distance = kl_term(teacher, log_teacher, log_pi).sum(-1)
    rest_quotient = teacher[..., -1:] / log_pi[..., -1:].exp()
    return distance, pi[..., :-1] * rest_quotient - teacher[..., :-1]


def _with_bucket(log_pi: Tensor, log_teacher: Tensor, valid: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for pi and p_T the probabilities and their logarithms, ``[..., K + 2]``. The last column is the bucket's.

    All are float64. Columns that are not valid have the probability 0. The bucket's mass has a rounding error of about
    ``resolution``, four times the eps of the coarser of the two dtypes. A mass of at most this counts as 0, and its
    logarithm as that of ``resolution``, so that rounding alone makes no distance large.
    """
    assert log_pi.shape == log_teacher.shape == valid.shape
    resolution = 4 * max(torch.finfo(x.dtype).eps for x in (log_pi, log_teacher))
    policies: list[tuple[Tensor, Tensor]] = []
    for log_probs in (log_pi, log_teacher):
        log_columns = clamped(log_probs)
        columns = torch.where(valid, log_columns.exp(), 0.0)
        rest = 1 - columns.sum(-1, keepdim=True)
        masses = torch.cat([columns, torch.where(rest > resolution, rest, 0.0)], -1)
        log_rest = rest.clamp(min=resolution).log()
        policies.append((masses, torch.cat([log_columns, log_rest], -1)))
    return policies


DISTANCES: dict[table.DistillationLoss, Distance] = {"reverse": reverse_kl, "forward": forward_kl}
"""The losses of ``distillation.loss`` that need TopK(p_T)."""


@dataclass(frozen=True)
class Distillation:
    """The loss of an algorithm with a teacher.

    Attributes:
        algorithm: Its mask bounds the distillation too, if ``masked``.
        loss: ``sampled``, or a name in ``DISTANCES``.
        weight: Factor of the distillation loss.
        rewards: Whether the advantages of the rewards count. False: the teacher replaces them.
        masked: Whether the algorithm's mask applies to the distillation loss.
    """

    algorithm: Algorithm
    loss: table.DistillationLoss
    weight: float = 1.0
    rewards: bool = True
    masked: bool = True

    def sums(
        self, inputs: TokenInputs, teacher: TeacherScores, token_scale: Tensor | None = None
    ) -> tuple[TokenInputs, LossSums]:
        """Return the inputs with the advantages that the mask has seen, and the loss as ``policy_loss`` does.

        Let A be the advantage of the rewards, or 0 without ``rewards``, and a = log p_T(y) - log pi(y), without
        gradient.

        - ``sampled``, masked: the algorithm's loss with the advantage A + weight a.
        - ``sampled``, not masked: the algorithm's loss with A, and the same loss without a mask with weight a. Over
          samples of pi, the mean of -a grad log pi is the gradient of KL(pi || p_T).
        - ``reverse`` and ``forward``: the algorithm's loss with A, and weight times the distance at every token.
          Masked: only at tokens that the algorithm's mask lets train if a is their advantage.
        """
        advantages = teacher.log_probs.to(inputs.log_probs.dtype) - inputs.log_probs.detach()
        gap = -sum_over(inputs.loss_mask & advantages.isfinite(), advantages)
        if self.loss == "sampled":
            inputs, sums = self._sampled(inputs, advantages, token_scale)
        else:
            assert teacher.topk is not None
            inputs, sums = self._distance(inputs, teacher.topk, advantages, token_scale)
        return inputs, replace(sums, metrics=sums.metrics.add(metric_names.TEACHER_GAP, gap))

    def _sampled(
        self, inputs: TokenInputs, teacher_advantages: Tensor, token_scale: Tensor | None
    ) -> tuple[TokenInputs, LossSums]:
        advantages = self.weight * teacher_advantages
        if self.masked or not self.rewards:
            if self.rewards:
                advantages = inputs.advantages + advantages
            inputs = replace(inputs, advantages=advantages)
            return inputs, policy_loss(self._decider, inputs, token_scale)
        sums = policy_loss(self.algorithm, inputs, token_scale)
        with torch.no_grad():
            decisions = decide(self._decider, replace(inputs, advantages=advantages))
            slope = torch.where(decisions.trains, -decisions.capped * advantages, 0.0)
        term = loss_term(inputs.log_probs, slope, slope, token_scale)
        metrics = sums.metrics.add(metric_names.LOSS, slope.sum(dtype=torch.float64))
        return inputs, replace(sums, loss=sums.loss + term, metrics=metrics)

    def _distance(
        self,
        inputs: TokenInputs,
        topk: TeacherTopk,
        teacher_advantages: Tensor,
        token_scale: Tensor | None,
    ) -> tuple[TokenInputs, LossSums]:
        teacher_inputs = replace(inputs, advantages=teacher_advantages)
        if self.rewards:
            sums = policy_loss(self.algorithm, inputs, token_scale)
            is_counted = decide(self._decider, teacher_inputs).trains
        else:
            inputs = teacher_inputs
            sums = policy_loss(self._decider, inputs, token_scale, with_surrogate=False)
            assert sums.blocked is not None
            is_counted = inputs.loss_mask & ~sums.blocked
        with torch.no_grad():
            distance, slopes = DISTANCES[self.loss](*topk)
            mass = torch.where(topk.valid, topk.log_teacher.double().exp(), 0.0)[..., :-1].sum(-1)
            value = torch.where(is_counted, self.weight * distance, 0.0)
            slopes = torch.where(is_counted[..., None], self.weight * slopes, 0.0)
            metrics = {
                metric_names.LOSS: value.sum(),
                metric_names.TEACHER_DISTANCE: sum_over(inputs.loss_mask, distance),
                metric_names.TEACHER_MASKED: count_of(inputs.loss_mask & ~is_counted),
                metric_names.TEACHER_TOPK_MASS: sum_over(inputs.loss_mask, mass),
            }
        term = loss_term(topk.log_pi, value, slopes, token_scale)
        metrics_sums = sums.metrics + MetricSums(sums=metrics)
        return inputs, replace(sums, loss=sums.loss + term, metrics=metrics_sums)

    @cached_property
    def _decider(self) -> Algorithm:
        """The algorithm that decides which tokens the teacher's part of the loss trains."""
        if self.masked:
            return self.algorithm
        return replace(self.algorithm, mask=partial(rules.train_all, anchor=rollout))
