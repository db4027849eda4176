"""The distance between pi and mu at a token: total variation and KL(mu || pi), computed from the known parts of the
two distributions.

pi is the policy that trains, mu the policy that sampled. They are given as natural log-probabilities, or as logits for
the exact divergences. All results are float64 and carry no gradient. Divergences are never negative. A result is NaN if
one of its log-probabilities is NaN; in ``topk_kl``, a NaN of log pi where mu = 0 may not count.
For both divergences 0 <= Binary <= Top-K <= exact (data-processing inequality), and TV^2 <= KL / 2 (Pinsker).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def binary_tv(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Compute |mu(a) - pi(a)| at the sampled token a, in [0, 1] (arXiv 2602.04879, Binary TV).

    This is the TV of the two-point distributions {a, not a}.
    """
    return (_probability(rollout_log_probs) - _probability(log_probs)).abs()


@torch.no_grad()
def binary_kl(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Compute mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) at the sampled token (arXiv 2602.04879,
    Binary KL).

    The result D is inf if pi = 0 < mu. Near p = 1, log p is about -(1 - p), so 1 - p and log p have the same relative
    error. This error depends on the library that computed log p:

    - ``policy_stats`` computes log pi with a relative error e, even if log pi is near 0. In float32, e is below 1e-5,
      and the error of D is below e (1 + D).
    - An engine that takes the logarithm of a float32 softmax has an absolute error u of about 2^-24 in log mu near 0.
      The error of D is then u |log((1 - mu) / (1 - pi)) - log(mu / pi)|. In float32, 1 - pi is 0 or at least
      1.4e-45, so -log(1 - pi) is below 104, and -log(1 - mu) is at most 17. So if D is below 80, the error is below
      104 u < 7e-6. Every KL threshold of ``table.py`` is larger.

    If log pi is exactly 0, pi was rounded to 1, and the exact value of 1 - pi is unknown. 1 - pi is then set to half of
    the dtype's eps, its largest possible value: the softmax's sum, 1 for this token and 1 - pi for all others, rounds
    to 1. So D is a lower bound.
    """
    # Put both policies into one tensor. This halves the number of small operations, which take most of a mask's time.
    log_p = clamped(torch.stack([rollout_log_probs.detach(), log_probs.detach()]))
    # expm1 keeps the relative precision. 1 - exp(log p) would have the absolute error of numbers near 1, and D could
    # become negative.
    complement = -torch.expm1(log_p)
    log_half_eps = math.log(0.5 * torch.finfo(log_probs.dtype).eps)
    log_complement = torch.where(log_p == 0, log_half_eps, complement.log())
    sampled_term = kl_term(log_p[0].exp(), log_p[0], log_p[1])
    complement_term = kl_term(complement[0], log_complement[0], log_complement[1])
    return (sampled_term + complement_term).clamp(min=0)


SMALLEST = 1e-6
"""Lower bound of p and of 1 - p in ``binary_kl_both_ways``."""


@torch.no_grad()
def binary_kl_both_ways(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Compute the larger of the binary KL(mu || pi) and KL(pi || mu), nats.

    Both are ``binary_kl`` of probabilities that are cut to [1e-6, 1 - 1e-6]. KL(pi || mu) divides by mu and by 1 - mu.
    Without the cut, its value would depend on how an engine rounds a mu near 0 or 1.
    """
    low = math.log(SMALLEST)
    high = math.log1p(-SMALLEST)
    pi = log_probs.detach().double().clamp(low, high)
    mu = rollout_log_probs.detach().double().clamp(low, high)
    return torch.maximum(binary_kl(pi, mu), binary_kl(mu, pi))


@torch.no_grad()
def topk_tv(topk_log_probs: Tensor, rollout_topk_log_probs: Tensor, valid: Tensor) -> Tensor:
    """Compute 0.5 sum |mu - pi| over A' and "other" (arXiv 2602.04879, Top-K TV); ``[..., K + 1]`` -> ``[...]``.

    A' has the ids of the ``valid`` columns: TopK(mu) and the sampled token. "other" is one bucket with the rest of
    each distribution's mass.
    """
    assert topk_log_probs.shape == rollout_topk_log_probs.shape == valid.shape
    pi = torch.where(valid, topk_log_probs.detach().clamp(max=0).exp(), 0.0)
    mu = torch.where(valid, rollout_topk_log_probs.detach().clamp(max=0).exp(), 0.0)
    # Without the bucket "other" the result could be below binary_tv.
    other = (_rest(mu) - _rest(pi)).abs()
    return 0.5 * ((mu - pi).abs().sum(-1, dtype=torch.float64) + other)


@torch.no_grad()
def topk_kl(topk_log_probs: Tensor, rollout_topk_log_probs: Tensor, valid: Tensor) -> Tensor:
    """Compute sum mu log(mu / pi) over A' and "other" (arXiv 2602.04879, Top-K KL); ``[..., K + 1]`` -> ``[...]``.

    The mass of "other" is 1 - (sum over A'), with a rounding error of about u (``resolution``), four times the input
    dtype's eps. Let m and q be the masses of "other" under mu and pi. If m is at most u, the code uses 0 for m. If q is
    below u, the code uses u for q. So rounding never makes the value of a peaked distribution infinite. Both
    replacements change the term m log(m / q). If q is below u, the term can become too small, by at most m log(u / q).
    The value is never below ``binary_kl`` of the sampled token, whose column is the last.
    """
    assert topk_log_probs.shape == rollout_topk_log_probs.shape == valid.shape
    resolution = 4 * torch.finfo(topk_log_probs.dtype).eps
    log_pi = topk_log_probs.detach().clamp(max=0)
    log_mu = rollout_topk_log_probs.detach().clamp(max=0)
    pi = torch.where(valid, log_pi.exp(), 0.0)
    mu = torch.where(valid, log_mu.exp(), 0.0)
    listed_terms = kl_term(mu, log_mu, log_pi).sum(-1, dtype=torch.float64)
    other_mu = _rest(mu)
    other_pi = _rest(pi).clamp(min=resolution)
    log_quotient = other_mu.clamp(min=resolution).log() - other_pi.log()
    other_term = torch.where(other_mu <= resolution, 0.0, other_mu * log_quotient)
    # binary_kl is a lower bound of the exact value, and computes its 1 - p more precisely than the mass of "other".
    return torch.maximum(listed_terms + other_term, binary_kl(log_pi[..., -1], log_mu[..., -1]))


@torch.no_grad()
def topk_kl_change(
    topk_log_probs: Tensor,
    rollout_topk_log_probs: Tensor,
    valid: Tensor,
    *,
    tail_ids: Tensor | None = None,
    sum_squares: Tensor | None = None,
) -> Tensor:
    """Compute the derivative of KL(mu || pi) when the logits move along the gradient of log pi(k).

    k is the sampled token. The gradient of log pi(k) by the logits is e_k - pi, with the one-hot vector e_k. The
    gradient of KL(mu || pi) by the logits is pi - mu. The derivative is the scalar product of both gradients:
    (pi_k - mu_k) + sum of pi_i (mu_i - pi_i) over the vocabulary; ``[..., K + 1]`` -> ``[...]``, of either sign.

    mu is unknown outside A' (``topk_tv``), so the sum over tokens outside A' is estimated. With K = V no token is
    outside, and the derivative is exact. pi_k and mu_k are read from the last column, which is k's, even if this column
    is invalid because TopK(mu) has k too. Give at most one of ``tail_ids`` and ``sum_squares``.

    Args:
        topk_log_probs: log pi at A'.
        rollout_topk_log_probs: log mu at A'.
        valid: True for the columns of A'.
        tail_ids: ``[...]``, the number n of tokens outside A'. The estimate assumes that these tokens are equally
            likely: pi_r (mu_r - pi_r) / n, where pi_r and mu_r are the sums of pi and mu over these tokens. None:
            n = 1.
        sum_squares: ``[...]``, the sum of pi^2 over the whole vocabulary. The estimate then assumes that all tokens
            outside A' have an equal mu / pi: (mu_r / pi_r - 1) times the sum of pi^2 over these tokens.
    """
    assert topk_log_probs.shape == rollout_topk_log_probs.shape == valid.shape
    pi = topk_log_probs.detach().double().clamp(max=0).exp()
    mu = rollout_topk_log_probs.detach().double().clamp(max=0).exp()
    listed_pi = torch.where(valid, pi, 0.0)
    listed_mu = torch.where(valid, mu, 0.0)
    rest_pi = _rest(listed_pi)
    rest_mu = _rest(listed_mu)
    tail = rest_pi * (rest_mu - rest_pi)
    if tail_ids is not None:
        tail = tail / tail_ids.clamp(min=1)
    if sum_squares is not None:
        rest_squares = (sum_squares.double() - listed_pi.square().sum(-1)).clamp(min=0)
        # The tail is rest_pi^2 (mu_r / pi_r - 1). Replace the square of the sum, rest_pi^2, by the sum of squares. The
        # sum of squares is at most rest_pi^2, but rounding may exceed this bound.
        tail = tail * (rest_squares / rest_pi.square().clamp(min=1e-300)).clamp(max=1)
    listed_sum = (listed_pi * (listed_mu - listed_pi)).sum(-1)
    return pi[..., -1] - mu[..., -1] + listed_sum + tail


@torch.no_grad()
def exact_tv(logits: Tensor, rollout_logits: Tensor) -> Tensor:
    """Compute 0.5 sum |mu - pi| over the vocabulary; ``[..., V]`` unnormalised logits (or log-probs) -> ``[...]``."""
    assert logits.shape == rollout_logits.shape
    pi = logits.double().softmax(-1)
    mu = rollout_logits.double().softmax(-1)
    return 0.5 * (mu - pi).abs().sum(-1)


@torch.no_grad()
def exact_kl(logits: Tensor, rollout_logits: Tensor) -> Tensor:
    """Compute sum mu log(mu / pi) over the vocabulary; ``[..., V]`` unnormalised logits (or log-probs) -> ``[...]``."""
    assert logits.shape == rollout_logits.shape
    pi = logits.double().log_softmax(-1)
    mu = rollout_logits.double().log_softmax(-1)
    return kl_term(mu.exp(), mu, pi).sum(-1).clamp(min=0)


def kl_term(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute p log(p / q). If p = 0, the result is 0, even if a logarithm is infinite or NaN. NaN if p is NaN."""
    return torch.where(p == 0, 0.0, p * (log_p - log_q))


def clamped(log_p: Tensor) -> Tensor:
    """Return ``log_p`` in float64, cut to at most 0. A log-probability that is computed as logit - lse can be a
    rounding step above 0.
    """
    return log_p.detach().double().clamp(max=0)


def _probability(log_p: Tensor) -> Tensor:
    return clamped(log_p).exp()


def _rest(p: Tensor) -> Tensor:
    """Compute 1 - sum of ``p``, at least 0."""
    return (1 - p.sum(-1, dtype=torch.float64)).clamp(min=0)
