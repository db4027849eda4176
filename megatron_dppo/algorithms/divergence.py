"""How far pi has moved from mu at a token: total variation and KL(mu || pi), from what is known of
the two distributions.

All inputs are natural log-probabilities. All results are float64, never negative, and carry no
gradient; NaN where a log-probability that counts is NaN. For both divergences 0 <= Binary <= Top-K
<= exact (data-processing inequality), and TV^2 <= KL / 2 (Pinsker).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def binary_tv(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """|mu(a) - pi(a)| (arXiv 2602.04879, Binary TV): TV of the two-point distributions {a, not a}.
    In [0, 1].
    """
    return (_probability(rollout_log_probs) - _probability(log_probs)).abs()


@torch.no_grad()
def binary_kl(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) at the sampled token (arXiv 2602.04879,
    Binary KL).

    inf where pi = 0 < mu. 1 - p is as exact as log p is, relative to itself; what that is worth depends on who computed
    log p:

    - log pi of ``policy_stats`` has the relative precision e of its dtype (and of its exponentials,
      together below 1e-5 in float32) also near 0, so D errs by less than e (1 + D).
    - log mu of an engine that takes the logarithm of a float32 softmax has an absolute error u of
      2^-24 or so near 0. D then errs by u |log((1 - mu) / (1 - pi)) - log(mu / pi)|, below 90 u =
      6e-6 in float32: no threshold is that small.

    A log pi of exactly 0 says that pi rounds to 1, and nothing of how near it is: 1 - pi then counts as half a unit of
    the dtype's rounding, the largest value that rounds so, and D is a lower bound.
    """
    # Both policies in one tensor: half as many small operations, which is what a mask costs.
    log_p = _clamped(torch.stack([rollout_log_probs.detach(), log_probs.detach()]))
    # Not 1 - exp(log p), whose error is that of numbers near 1 and can make D negative.
    rest = -torch.expm1(log_p)
    half_unit = math.log(0.5 * torch.finfo(log_probs.dtype).eps)
    log_rest = torch.where(log_p == 0, half_unit, rest.log())
    inside = _kl_term(log_p[0].exp(), log_p[0], log_p[1])
    outside = _kl_term(rest[0], log_rest[0], log_rest[1])
    return (inside + outside).clamp(min=0)


SMALLEST = 1e-6
"""Of the probabilities that are compared both ways, and of what they leave."""


@torch.no_grad()
def binary_kl_both_ways(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """The larger of the binary KL(mu || pi) and KL(pi || mu), nats; each is ``binary_kl``'s of probabilities that are
    cut to [1e-6, 1 - 1e-6]. A mu that an engine rounds to 1, or to nearly nothing, stands in a denominator here, where
    what is left of its digits would decide.
    """
    pi, mu = (
        log_p.detach().double().clamp(math.log(SMALLEST), math.log1p(-SMALLEST))
        for log_p in (log_probs, rollout_log_probs)
    )
    return torch.maximum(binary_kl(pi, mu), binary_kl(mu, pi))


@torch.no_grad()
def topk_tv(topk_log_probs: Tensor, rollout_topk_log_probs: Tensor, valid: Tensor) -> Tensor:
    """Half the sum over A' and "other" of |mu - pi| (arXiv 2602.04879, Top-K TV); ``[..., K + 1]``
    -> ``[...]``.

    A' = TopK(mu) and the sampled token, wherever ``valid``; "other" is one bucket with the rest of
    each distribution.
    """
    assert topk_log_probs.shape == rollout_topk_log_probs.shape == valid.shape
    pi = torch.where(valid, topk_log_probs.detach().clamp(max=0).exp(), 0.0)
    mu = torch.where(valid, rollout_topk_log_probs.detach().clamp(max=0).exp(), 0.0)
    # The bucket belongs to the sum: without it the value can fall below binary_tv.
    other = (_rest(mu) - _rest(pi)).abs()
    return 0.5 * ((mu - pi).abs().sum(-1, dtype=torch.float64) + other)


@torch.no_grad()
def topk_kl(topk_log_probs: Tensor, rollout_topk_log_probs: Tensor, valid: Tensor) -> Tensor:
    """Sum over A' and "other" of mu log(mu / pi) (arXiv 2602.04879, Top-K KL); ``[..., K + 1]`` ->
    ``[...]``.

    The mass of "other" is 1 - sum, known to a few units u of the input dtype's resolution: mu's is
    taken as 0 below that, pi's never below it. A peaked distribution therefore gives no infinite
    value by rounding, but one too small, by up to (mu's mass of "other") log(u / pi's). It is never
    below ``binary_kl`` at the last column, the sampled token's.
    """
    assert topk_log_probs.shape == rollout_topk_log_probs.shape == valid.shape
    resolution = 4 * torch.finfo(topk_log_probs.dtype).eps
    pi = topk_log_probs.detach().clamp(max=0)
    mu = rollout_topk_log_probs.detach().clamp(max=0)
    p_mu, p_pi = (torch.where(valid, x.exp(), 0.0) for x in (mu, pi))
    inside = _kl_term(p_mu, mu, pi).sum(-1, dtype=torch.float64)
    other_mu, other_pi = _rest(p_mu), _rest(p_pi).clamp(min=resolution)
    outside = torch.where(
        other_mu <= resolution,
        0.0,
        other_mu * (other_mu.clamp(min=resolution).log() - other_pi.log()),
    )
    # A lower bound of the true value, whose rest is known better.
    return torch.maximum(inside + outside, binary_kl(pi[..., -1], mu[..., -1]))


@torch.no_grad()
def topk_kl_change(
    topk_log_probs: Tensor,
    rollout_topk_log_probs: Tensor,
    valid: Tensor,
    *,
    tail_ids: Tensor | None = None,
    sum_squares: Tensor | None = None,
) -> Tensor:
    """Derivative of KL(mu || pi) along the step e_k - pi of the logits, the gradient of log pi(k); k is the last
    column's token. ``[..., K + 1]`` -> ``[...]``, of either sign.

    (pi_k - mu_k) + sum over the vocabulary of pi_i (mu_i - pi_i). Outside A' (``topk_tv``) mu is not known there: the
    rest counts as one token, pi_r (mu_r - pi_r); with ``tail_ids`` [...], their number, as so many equally likely
    ones, that divided by it; with ``sum_squares`` [...], of pi over the whole vocabulary, as tokens that all have the
    mu / pi of their whole, (mu_r / pi_r - 1) times their sum of pi^2, which is known then. With K = V nothing is left
    out, and the value is exact. The sampled token's own column may be invalid where TopK(mu) holds it: k is read from
    it all the same.
    """
    assert topk_log_probs.shape == rollout_topk_log_probs.shape == valid.shape
    pi, mu = (
        x.detach().double().clamp(max=0).exp() for x in (topk_log_probs, rollout_topk_log_probs)
    )
    p_pi, p_mu = (torch.where(valid, p, 0.0) for p in (pi, mu))
    rest_pi, rest_mu = _rest(p_pi), _rest(p_mu)
    rest = rest_pi * (rest_mu - rest_pi)
    if tail_ids is not None:
        rest = rest / tail_ids.clamp(min=1)
    if sum_squares is not None:
        squares = (sum_squares.double() - p_pi.square().sum(-1)).clamp(min=0)
        # Of one token it is rest_pi^2, of more it is less.
        rest = rest * (squares / rest_pi.square().clamp(min=1e-300)).clamp(max=1)
    return pi[..., -1] - mu[..., -1] + (p_pi * (p_mu - p_pi)).sum(-1) + rest


@torch.no_grad()
def exact_tv(logits: Tensor, rollout_logits: Tensor) -> Tensor:
    """Half the sum over the vocabulary of |mu - pi|; ``[..., V]`` unnormalised logits (or
    log-probs) -> ``[...]``.
    """
    assert logits.shape == rollout_logits.shape
    pi, mu = (x.double().softmax(-1) for x in (logits, rollout_logits))
    return 0.5 * (mu - pi).abs().sum(-1)


@torch.no_grad()
def exact_kl(logits: Tensor, rollout_logits: Tensor) -> Tensor:
    """Sum over the vocabulary of mu log(mu / pi); ``[..., V]`` unnormalised logits (or log-probs)
    -> ``[...]``.
    """
    assert logits.shape == rollout_logits.shape
    pi, mu = (x.double().log_softmax(-1) for x in (logits, rollout_logits))
    return _kl_term(mu.exp(), mu, pi).sum(-1).clamp(min=0)


def _kl_term(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q), 0 where p = 0 whatever the logarithms are; NaN where p is NaN."""
    return torch.where(p == 0, 0.0, p * (log_p - log_q))


def _clamped(log_p: Tensor) -> Tensor:
    """Float64, at most 0: a log-probability computed as logit - lse can end a rounding step
    above.
    """
    return log_p.detach().double().clamp(max=0)


def _probability(log_p: Tensor) -> Tensor:
    return _clamped(log_p).exp()


def _rest(p: Tensor) -> Tensor:
    return (1 - p.sum(-1, dtype=torch.float64)).clamp(min=0)
