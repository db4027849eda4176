"""The paper's theory (arXiv 2602.04879) on policies small enough to enumerate every response.

T = tokens of a response, V = vocabulary. A policy is a table: one distribution for each prefix.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch

from megatron_dppo.algorithms.divergence import exact_kl, exact_tv
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import build_algorithm, policy_loss

V, T = 3, 4


@dataclass(frozen=True)
class World:
    """All V^T responses: their rewards, and log pi and log mu of each of their tokens [V^T, T]."""

    rewards: torch.Tensor
    pi_logits: torch.Tensor
    pi: torch.Tensor
    mu: torch.Tensor
    divergence: torch.Tensor
    """TV of pi and mu at each token's prefix [V^T, T]."""

    @property
    def ratios(self):
        return (self.pi - self.mu).exp()

    @property
    def weight(self):
        """Probability of each response under mu."""
        return self.mu.sum(1).exp()


def world(seed: int, spread: float) -> World:
    g = torch.Generator().manual_seed(seed)
    responses = torch.tensor(list(itertools.product(range(V), repeat=T)))
    # The number of a prefix of length t: its digits in base V, after all the shorter ones.
    powers = torch.tensor([V**i for i in range(T)])
    states = torch.stack(
        [powers[:t].sum() + (responses[:, :t] * powers[:t]).sum(1) for t in range(T)], 1
    )
    count = sum(V**t for t in range(T))
    mu = torch.randn(count, V, generator=g, dtype=torch.float64)
    pi = (mu + spread * torch.randn(count, V, generator=g, dtype=torch.float64)).requires_grad_()

    def tokens(logits):
        return logits.log_softmax(-1)[states].gather(2, responses[..., None])[..., 0]

    rewards = torch.rand(len(responses), generator=g, dtype=torch.float64) * 2 - 1
    return World(rewards, pi, tokens(pi), tokens(mu), exact_tv(pi, mu)[states])


def surrogate(w: World):
    """L' = E_mu[R sum_t (r_t - 1)]."""
    return (w.weight * w.rewards * (w.ratios - 1).sum(1)).sum()


def improvement(w: World):
    """J(pi) - J(mu)."""
    return (w.rewards * (w.pi.sum(1).exp() - w.weight)).sum()


SEEDS_AND_SPREADS = [(s, d) for s in range(6) for d in (0.01, 0.3, 2.0)]


@pytest.mark.parametrize(("seed", "spread"), SEEDS_AND_SPREADS)
def test_performance_difference_identity(seed, spread):
    w = world(seed, spread)
    r = w.ratios
    later = torch.stack([r[:, t + 1 :].prod(1) for t in range(T)], 1)
    delta = (w.weight * w.rewards * ((r - 1) * (1 - later)).sum(1)).sum()
    torch.testing.assert_close(improvement(w), surrogate(w) - delta, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("seed", "spread"), SEEDS_AND_SPREADS)
def test_both_bounds_on_the_improvement(seed, spread):
    w = world(seed, spread)
    xi = w.rewards.abs().max()
    quadratic = 2 * xi * T * (T - 1) * w.divergence.max() ** 2
    linear = 4 * xi * (w.weight * w.divergence.sum(1)).sum()
    assert improvement(w) >= surrogate(w) - quadratic - 1e-13
    assert improvement(w) >= surrogate(w) - linear - 1e-13
    assert w.divergence.max() > spread / 10  # the bounds hold something back


def test_quadratic_bound_is_second_order_in_the_divergence():
    """A hundredth of the step leaves a gap ten thousand times smaller, surrogate against truth."""
    large, small = (world(3, d) for d in (0.1, 0.001))
    gaps = [(improvement(w) - surrogate(w)).abs() for w in (large, small)]
    assert gaps[1] / gaps[0] < 5e-4


def test_expected_policy_loss_has_the_gradient_of_the_surrogate():
    """Over all responses, weighed by mu, pg-is is an exact gradient of -L'."""
    w = world(1, 0.5)
    tokens = TokenInputs(
        log_probs=w.pi,
        rollout_log_probs=w.mu,
        advantages=(w.weight * w.rewards)[:, None].expand(-1, T),
        loss_mask=torch.ones(len(w.pi), T, dtype=torch.bool),
    )
    loss = policy_loss(build_algorithm("pg-is"), tokens).loss
    (ours,) = torch.autograd.grad(loss, w.pi_logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-surrogate(w), w.pi_logits)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)


def test_pinsker_on_every_state():
    g = torch.Generator().manual_seed(0)
    pi, mu = (torch.randn(500, 6, generator=g, dtype=torch.float64) * 2 for _ in range(2))
    assert (exact_tv(pi, mu).square() <= exact_kl(pi, mu) / 2).all()
