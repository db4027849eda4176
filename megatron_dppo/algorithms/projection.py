"""TROLL's projection of pi onto a KL ball around mu (arXiv 2510.03817), over TopK(mu), the sampled token and "other".

Legend: K = ids of TopK(mu); P = K + 2 points: TopK(mu), the sampled token (probability 0 if TopK(mu) has it), and
"other" with the rest of each distribution. l = log pi and m = log mu at the points. y = the sampled token.

The projection p minimises KL(p || pi) among the distributions with KL(p || mu) <= bound. If pi is within the bound,
p = pi. Else p is proportional to pi^(1 - x) mu^x, and bisection finds x in (0, 1]. x changes with pi, so that the
constraint holds. With u = m - l, and E, Var and Cov under p, the differential of log p at y is

    d log p(y) = (1 - x) [ dl(y) - E dl - (u(y) - E u) Cov(u, dl) / Var(u) ].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import Anchor, TokenInputs, rollout
from megatron_dppo.algorithms.rules import topk_of

HALVINGS = 44
"""Number of bisections of the interval of x; the error of x is then at most 6e-14."""


@dataclass(frozen=True)
class Projection:
    """The projection at each token, float64 and without gradient.

    Attributes:
        log_ratio: log p(y) - log mu(y).
        distance: KL(pi || p); 0 if pi is within the bound.
        explicit_slope: 1 - x, the part of the derivative of log p(y) by log pi(y) that comes from the term dl(y) above.
        column_slopes: ``[..., K + 1]``, the derivatives of log p(y) by log pi at TopK(mu) and at y that come from the
            other terms, E dl and Cov(u, dl). The last column is 0 if TopK(mu) has y.
        distance_slopes: ``[..., K + 1]``, the derivative of KL(pi || p), with p fixed, by log pi at TopK(mu) and at y.
    """

    log_ratio: Tensor
    distance: Tensor
    explicit_slope: Tensor
    column_slopes: Tensor
    distance_slopes: Tensor


@torch.no_grad()
def projected(inputs: TokenInputs, kl_bound: float) -> Projection:
    """Project pi at each token; tokens within ``kl_bound`` nats keep their own log-probability.

    Sources: two descriptions of the paper's method, and the configuration of the authors' code
    (NiklasFreymuth/troll) with its bound of 0.05, regression of 1 and K of up to 256. Two differences: their centre is
    pi' of the trainer, ours is mu; they give tokens outside the sparse distribution almost no probability, we put these
    tokens into the bucket "other", as the Top-K divergences do. The paper's text and the library that solves the
    projection (pbecker93/discrete_trpl) were not read.
    """
    columns = topk_of(inputs, rollout)
    log_pi, log_mu = _points(*columns)
    x = _interpolation(log_pi, log_mu, kl_bound)
    log_p = _mix(log_pi, log_mu, x)
    p = log_p.exp()
    is_unchanged = x == 0
    # u at the points, and u - E u at the points and at y.
    difference = torch.where(p > 0, log_mu - log_pi, 0.0)
    mean_difference = (p * difference).sum(-1, keepdim=True)
    centred = difference - mean_difference
    variance = (p * centred.square()).sum(-1, keepdim=True).clamp(min=1e-300)
    sampled_log_pi = columns[0][..., -1:].detach().double()
    sampled_log_mu = columns[1][..., -1:].detach().double()
    sampled_centred = sampled_log_mu - sampled_log_pi - mean_difference
    scale = (1 - x)[..., None]
    # The terms E dl and Cov(u, dl) by log pi of each point, as if the points' probabilities were independent. E dl is
    # the sum of p dl, and Cov(u, dl) is the sum of p (u - E u) dl.
    point_slopes = -scale * p * (1 + sampled_centred * centred / variance)
    gaps = torch.where(p > 0, log_pi - log_p, 0.0)
    pi = log_pi.exp()
    # pi(other) is 1 minus the sum of pi over the columns. So log pi(other) has the derivative -pi(c) / pi(other) by
    # log pi of a column c.
    column_slopes = point_slopes[..., :-1] - point_slopes[..., -1:] * pi[..., :-1] / pi[..., -1:]
    distance_slopes = pi[..., :-1] * (gaps[..., :-1] - gaps[..., -1:])
    sampled_mix = (1 - x) * sampled_log_pi[..., 0] + x * sampled_log_mu[..., 0]
    sampled_log_p = sampled_mix - _normaliser(log_pi, log_mu, x)
    sampled_log_p = torch.where(is_unchanged, sampled_log_pi[..., 0], sampled_log_p)
    return Projection(
        log_ratio=sampled_log_p - sampled_log_mu[..., 0],
        distance=torch.where(is_unchanged, 0.0, (pi * gaps).sum(-1)),
        explicit_slope=1 - x,
        column_slopes=torch.where(is_unchanged[..., None], 0.0, column_slopes),
        distance_slopes=torch.where(is_unchanged[..., None], 0.0, distance_slopes),
    )


@torch.no_grad()
def projected_ratio(inputs: TokenInputs, anchor: Anchor, *, kl_bound: float) -> Tensor:
    """w = p(y) / mu(y) with the projected policy p: TROLL's importance ratio."""
    return projected(inputs, kl_bound).log_ratio.exp().to(inputs.log_probs.dtype)


def _points(topk: Tensor, rollout_topk: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return log pi and log mu at the P points, [..., P] float64, normalised; -inf in columns that are not valid."""
    # The rest has a rounding error of about ``resolution``. The clamp keeps its logarithm finite.
    resolution = 4 * torch.finfo(topk.dtype).eps
    points = []
    for log_probs in (topk, rollout_topk):
        log_p = torch.where(valid, log_probs.detach().double().clamp(max=0), -torch.inf)
        rest = (1 - log_p.exp().sum(-1, keepdim=True)).clamp(min=resolution).log()
        points.append(torch.cat([log_p, rest], -1).log_softmax(-1))
    return points[0], points[1]


def _interpolation(log_pi: Tensor, log_mu: Tensor, kl_bound: float) -> Tensor:
    """Find each token's x: 0 if KL(pi || mu) is within the bound, else the x at which KL(p || mu) equals the bound."""
    zero = torch.zeros_like(log_pi[..., 0])
    is_far = _kl(log_pi, log_mu, zero) > kl_bound
    low = zero
    high = torch.where(is_far, 1.0, zero)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        is_outside = _kl(log_pi, log_mu, middle) > kl_bound
        low = torch.where(is_outside, middle, low)
        high = torch.where(is_outside, high, middle)
    return high


def _normaliser(log_pi: Tensor, log_mu: Tensor, x: Tensor) -> Tensor:
    return _unnormalised(log_pi, log_mu, x).logsumexp(-1)


def _mix(log_pi: Tensor, log_mu: Tensor, x: Tensor) -> Tensor:
    """Return the logarithm of the distribution proportional to pi^(1 - x) mu^x."""
    return _unnormalised(log_pi, log_mu, x).log_softmax(-1)


def _unnormalised(log_pi: Tensor, log_mu: Tensor, x: Tensor) -> Tensor:
    """Return (1 - x) log pi + x log mu; -inf at points where log mu is -inf."""
    x = x[..., None]
    is_absent = log_mu == -torch.inf
    mixed = (1 - x) * log_pi + x * torch.where(is_absent, 0.0, log_mu)
    return torch.where(is_absent, -torch.inf, mixed)


def _kl(log_pi: Tensor, log_mu: Tensor, x: Tensor) -> Tensor:
    """Compute KL(p || mu), nats, of p proportional to pi^(1 - x) mu^x."""
    log_p = _mix(log_pi, log_mu, x)
    is_present = log_p > -torch.inf
    return torch.where(is_present, log_p.exp() * (log_p - log_mu), 0.0).sum(-1)
