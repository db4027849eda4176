"""TROLL's projection, compared with a solver in plain Python, and its gradient, compared with finite differences."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_dppo.algorithms import projection
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.policy_loss import policy_loss
from tests.unit.test_later_rules import centered_inputs
from tests.unit.token_inputs import inputs

F64 = torch.float64
BOUND = 0.05


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def solve_projection(pi, mu, bound):
    """Return the projection of pi: pi within the bound, else the geometric mixture of pi and mu at the bound."""

    def mix(x):
        raw = [a ** (1 - x) * b**x for a, b in zip(pi, mu, strict=True)]
        return [r / sum(raw) for r in raw]

    if kl(pi, mu) <= bound:
        return pi
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(mix(middle), mu) > bound else (low, middle)
    return mix(high)


def policies(seed, vocabulary=7, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(vocabulary, generator=g, dtype=F64)
    return mu + spread * torch.randn(vocabulary, generator=g, dtype=F64), mu


def tokens_of(logits, mu_logits, sampled, k, advantage=1.0):
    """Return one token for each id in ``sampled``. All tokens have the same logits of pi and mu."""
    count = len(sampled)
    advantages = torch.full((count,), advantage, dtype=F64)
    at = torch.tensor(sampled)
    return centered_inputs(logits.expand(count, -1), mu_logits.expand(count, -1), at, k, advantages)


@pytest.mark.parametrize("k", [2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_the_projection_is_the_one_of_a_plain_solver(seed, k):
    logits, mu_logits = policies(seed)
    pi, mu = logits.softmax(-1), mu_logits.softmax(-1)
    order = mu.argsort(descending=True).tolist()
    for sampled in range(7):
        kept_ids = order[:k] + ([] if sampled in order[:k] else [sampled])
        rest = [i for i in range(7) if i not in kept_ids]
        buckets = [[i] for i in kept_ids] + ([rest] if rest else [])
        masses = [[float(p[b].sum()) for b in buckets] for p in (pi, mu)]
        p = solve_projection(masses[0], masses[1], BOUND)
        result = projection.projected(tokens_of(logits, mu_logits, [sampled], k), BOUND)
        at = kept_ids.index(sampled)
        assert result.log_ratio.exp().item() == pytest.approx(p[at] / masses[1][at], rel=1e-9)
        assert result.distance.item() == pytest.approx(kl(masses[0], p), rel=1e-6, abs=1e-12)
        assert kl(p, masses[1]) <= BOUND * (1 + 1e-9)


def test_a_policy_within_the_bound_is_left_as_it_is():
    logits, mu_logits = policies(2)
    pi, mu = logits.softmax(-1), mu_logits.softmax(-1)
    distance = kl(pi.tolist(), mu.tolist())
    x = tokens_of(logits, mu_logits, range(7), 7)
    inside = projection.projected(x, distance * (1 + 1e-9))
    assert torch.equal(inside.log_ratio, x.log_probs - x.rollout_log_probs)
    assert (inside.distance == 0).all()
    assert (inside.column_slopes == 0).all()
    assert (projection.projected(x, distance * (1 - 1e-6)).explicit_slope < 1).all()
    # Then the loss is that of PG-IS, and so is the gradient.
    troll = build_algorithm("troll", {"kl_bound": distance * 1.001, "topk": 7})
    leaf = logits.clone().requires_grad_()
    x = tokens_of(leaf, mu_logits, range(7), 7)
    (gradient,) = torch.autograd.grad(policy_loss(troll, x).loss, leaf, retain_graph=True)
    (plain,) = torch.autograd.grad(policy_loss(build_algorithm("pg-is"), x).loss, leaf)
    assert torch.equal(gradient, plain)


def objective(logits, mu_logits, sampled, k, advantage, fixed, regression):
    """Return -A p(y) / mu(y) + regression KL(pi || fixed) as a number.

    ``fixed`` is the projection at the logits where the gradient is tested: the regression has no gradient through it.
    """
    result = projection.projected(tokens_of(logits, mu_logits, [sampled], k), BOUND)
    mu = mu_logits.softmax(-1)
    order = mu.argsort(descending=True).tolist()
    kept_ids = order[:k] + ([] if sampled in order[:k] else [sampled])
    pi = logits.softmax(-1)
    masses = [float(pi[i]) for i in kept_ids]
    masses.append(max(1 - sum(masses), 4 * torch.finfo(F64).eps))
    return -advantage * result.log_ratio.exp().item() + regression * kl(masses, fixed)


@pytest.mark.parametrize(
    ("sampled", "k", "advantage"), [(0, 3, 1.0), (5, 3, -2.0), (2, 7, 1.5), (6, 1, 1.0)]
)
@pytest.mark.parametrize("seed", range(2))
def test_the_gradient_goes_through_the_projection_and_its_constraint(seed, sampled, k, advantage):
    logits, mu_logits = policies(seed + 10, spread=2.0)
    pi, mu = logits.softmax(-1), mu_logits.softmax(-1)
    order = mu.argsort(descending=True).tolist()
    kept_ids = order[:k] + ([] if sampled in order[:k] else [sampled])
    masses = []
    for p in (pi, mu):
        kept_masses = [float(p[i]) for i in kept_ids]
        masses.append([*kept_masses, max(1 - sum(kept_masses), 4 * torch.finfo(F64).eps)])
    assert kl(*masses) > 1.1 * BOUND
    fixed = solve_projection(masses[0], masses[1], BOUND)
    leaf = logits.clone().requires_grad_()
    algorithm = build_algorithm("troll", {"topk": k, "regression": 0.7})
    sums = policy_loss(algorithm, tokens_of(leaf, mu_logits, [sampled], k, advantage))
    (gradient,) = torch.autograd.grad(sums.loss, leaf)
    value = objective(logits, mu_logits, sampled, k, advantage, fixed, 0.7)
    assert sums.loss.item() == pytest.approx(value)
    penalty = sums.metrics.values()["loss/penalty"]
    assert penalty == pytest.approx(0.7 * kl(masses[0], fixed), rel=1e-6)
    for i in range(7):
        step = torch.zeros_like(logits)
        step[i] = 1e-5
        ends = [
            objective(logits + s * step, mu_logits, sampled, k, advantage, fixed, 0.7)
            for s in (1, -1)
        ]
        expected = (ends[0] - ends[1]) / 2e-5
        assert gradient[i].item() == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_regression_draws_pi_into_the_ball():
    """With advantages of 0, gradient steps lower KL(pi || mu) until pi is in the ball, where the gradient is 0."""
    logits, mu_logits = policies(4)
    troll = build_algorithm("troll", {"topk": 7})
    current = logits.clone()
    for _ in range(150):
        leaf = current.clone().requires_grad_()
        x = tokens_of(leaf, mu_logits, range(7), 7, advantage=0.0)
        (slope,) = torch.autograd.grad(policy_loss(troll, x).loss / 7, leaf)
        current = current - 3 * slope
    distance = kl(current.softmax(-1).tolist(), mu_logits.softmax(-1).tolist())
    assert 0 < distance < 1.05 * BOUND
    assert kl(logits.softmax(-1).tolist(), mu_logits.softmax(-1).tolist()) > 2 * BOUND


def test_tokens_that_do_not_train_have_no_gradient_and_a_factor_scales_all_of_it():
    logits, mu_logits = policies(6)
    troll = build_algorithm("troll", {"topk": 3})
    leaf = logits.clone().requires_grad_()
    x = tokens_of(leaf, mu_logits, [0, 5], 3)
    (whole,) = torch.autograd.grad(policy_loss(troll, x).loss, leaf, retain_graph=True)
    scale = torch.full((2,), 0.25, dtype=F64)
    (quarter,) = torch.autograd.grad(policy_loss(troll, x, scale).loss, leaf, retain_graph=True)
    torch.testing.assert_close(quarter, whole / 4)
    for blocked in (
        replace(x, loss_mask=torch.zeros(2, dtype=torch.bool)),
        replace(x, rollout_log_probs=torch.full((2,), -math.inf, dtype=F64)),
    ):
        sums = policy_loss(troll, blocked)
        (gradient,) = torch.autograd.grad(sums.loss, leaf, retain_graph=True)
        assert (gradient == 0).all()
        assert sums.metrics.values()["loss/penalty"] == 0


def test_a_peaked_policy_is_projected_without_infinite_numbers():
    """pi is certain of one id up to float32 rounding, and mu is uniform. The mass of all other ids is then only
    rounding error, but every slope must be finite.
    """
    mu_logits = torch.zeros(7)
    logits = torch.tensor([60.0, 0, 0, 0, 0, 0, 0]).requires_grad_()
    troll = build_algorithm("troll", {"topk": 3})
    for sampled in (0, 4):
        x = tokens_of(logits, mu_logits, [sampled], 3)
        (gradient,) = torch.autograd.grad(policy_loss(troll, x).loss, logits)
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 100


def test_without_topk_there_is_nothing_to_project_on():
    with pytest.raises(ValueError, match="Top-K"):
        policy_loss(build_algorithm("troll"), inputs([0.5], [0.5], [1.0]))
