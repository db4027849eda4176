"""The paper's theory (arXiv 2602.04879) on policies small enough to enumerate every response.

T = tokens of a response, V = vocabulary. A policy is a table: one distribution for each prefix.
"""

import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from megatron_dppo.algorithms import sequence_rules
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.divergence import exact_kl, exact_tv
from megatron_dppo.algorithms.inputs import TokenInputs, prefix_totals, rollout
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.rules import measure_divergence

V, T = 3, 4
LONG = 6
"""Tokens of a response in the tests of CPPO's bound."""


@dataclass(frozen=True)
class World:
    """All V^T responses: their rewards, and log pi and log mu of each of their tokens [V^T, T]."""

    rewards: torch.Tensor
    pi_logits: torch.Tensor
    pi: torch.Tensor
    mu: torch.Tensor
    divergence: torch.Tensor
    """TV of pi and mu at each token's prefix [V^T, T]."""
    mu_logits: torch.Tensor
    states: torch.Tensor
    """Row of the logits at each token's prefix [V^T, T]."""

    @property
    def ratios(self):
        return (self.pi - self.mu).exp()

    @property
    def weight(self):
        """Probability of each response under mu."""
        return self.mu.sum(1).exp()


def world(seed: int, spread: float | list[float], tokens: int = T) -> World:
    """Return a random world. ``spread``: scale of the noise between the logits of pi and mu, or one per position."""
    g = torch.Generator().manual_seed(seed)
    responses = torch.tensor(list(itertools.product(range(V), repeat=tokens)))
    # Prefixes are numbered by their length, and prefixes of equal length by their digits in base V.
    powers = torch.tensor([V**i for i in range(tokens)])
    states = torch.stack(
        [powers[:t].sum() + (responses[:, :t] * powers[:t]).sum(1) for t in range(tokens)], 1
    )
    count = sum(V**t for t in range(tokens))
    mu = torch.randn(count, V, generator=g, dtype=torch.float64)
    spreads = spread if isinstance(spread, list) else [spread] * tokens
    state_spreads = torch.tensor(spreads, dtype=torch.float64).repeat_interleave(powers)[:, None]
    noise = torch.randn(count, V, generator=g, dtype=torch.float64)
    pi = (mu + state_spreads * noise).requires_grad_()

    def token_log_probs(logits):
        return logits.log_softmax(-1)[states].gather(2, responses[..., None])[..., 0]

    rewards = torch.rand(len(responses), generator=g, dtype=torch.float64) * 2 - 1
    divergence = exact_tv(pi, mu)[states]
    return World(rewards, pi, token_log_probs(pi), token_log_probs(mu), divergence, mu, states)


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
    assert w.divergence.max() > spread / 10  # pi differs from mu: the bounds are not trivial


def test_quadratic_bound_is_second_order_in_the_divergence():
    """If pi is 100 times nearer to mu, the gap between improvement and surrogate is about 10,000 times smaller."""
    large, small = (world(3, d) for d in (0.1, 0.001))
    gaps = [(improvement(w) - surrogate(w)).abs() for w in (large, small)]
    assert gaps[1] / gaps[0] < 5e-4


def test_expected_policy_loss_has_the_gradient_of_the_surrogate():
    """Summed over all responses, each weighed by its probability under mu, pg-is has the gradient of -L'."""
    w = world(1, 0.5)
    tokens = TokenInputs(
        log_probs=w.pi,
        rollout_log_probs=w.mu,
        advantages=(w.weight * w.rewards)[:, None].expand(-1, T),
        loss_mask=torch.ones(len(w.pi), T, dtype=torch.bool),
    )
    loss = policy_loss(build_algorithm("pg-is"), tokens).loss
    (gradient,) = torch.autograd.grad(loss, w.pi_logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-surrogate(w), w.pi_logits)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-13)


def as_tokens(w: World, advantages):
    """Return a batch of every response of ``w``. TopK(mu) is the whole vocabulary, so that D is exact."""
    count, length = w.pi.shape
    log_pi, log_mu = (x.detach().log_softmax(-1)[w.states] for x in (w.pi_logits, w.mu_logits))

    def with_sampled(log_p, sampled):
        return torch.cat([log_p, sampled.detach()[..., None]], -1)

    is_in_topk = torch.arange(V + 1) < V  # the last column repeats the sampled token
    return TokenInputs(
        log_probs=w.pi.detach(), rollout_log_probs=w.mu, advantages=advantages,
        loss_mask=torch.ones(count, length, dtype=torch.bool),
        sequence_ids=torch.arange(count)[:, None].expand(-1, length),
        topk_log_probs=with_sampled(log_pi, w.pi),
        rollout_topk_log_probs=with_sampled(log_mu, w.mu),
        topk_valid=is_in_topk.expand(count, length, -1),
    )  # fmt: skip


WEIGHT_MIN = 0.8


def region(w: World):
    """Return the smallest (d, d_b) with w_t D_t <= d and S_t <= d_b W_t at every prefix, by CPPO's weights and sums."""
    x = as_tokens(w, torch.ones_like(w.mu))
    weight, weights_before = sequence_rules.position_weights(x, weight_min=WEIGHT_MIN)
    distance = measure_divergence("topk_tv", x, rollout)
    torch.testing.assert_close(distance, w.divergence)
    spent = weight * distance
    budget = prefix_totals(x, spent) / (weights_before + weight)
    return float(spent.max()), float(budget.max())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [0.05, 0.5, 2.0])
def test_cppos_bound_for_any_reward(seed, spread):
    """|J(pi) - J(mu) - L'| <= 2 xi T (T - 1) d d_b / w_min (arXiv 2606.10968), with the worst rewards |R| <= xi."""
    w = world(seed, spread, LONG)
    d, budget = region(w)
    gap = (w.pi.sum(1).exp() - w.weight - w.weight * (w.ratios - 1).sum(1)).abs().sum()
    bound = 2 * LONG * (LONG - 1) * d * budget / WEIGHT_MIN
    assert gap <= bound
    assert gap > bound / 300  # the bound is not vacuous


def test_cppos_bound_is_below_dppos_where_one_late_step_is_large():
    w = world(2, [0.02] * (LONG - 1) + [1.0], LONG)
    d, budget = region(w)
    assert d * budget / WEIGHT_MIN < 0.3 * float(w.divergence.max()) ** 2


@pytest.mark.parametrize("seed", range(6))
def test_the_mask_of_cppo_trains_all_of_its_region_and_blocks_beyond_its_slack(seed):
    """S_t <= d_b W_t and w D <= d imply Z_t <= d + d_b W_(t-1) - S_(t-1) where d_b <= d, which the rule checks."""
    w = world(seed, 0.3, LONG)
    d, budget = region(w)
    x = as_tokens(w, (w.pi - w.mu).detach().sign())  # every update leads further away from mu
    numbers = {"weight_min": WEIGHT_MIN, "budget_low": budget, "budget_high": budget}
    mask = partial(sequence_rules.prefix_budget, x, rollout, measure="topk_tv", **numbers)
    assert mask(tv_threshold=d * (1 + 1e-9)).all()
    blocked = ~mask(tv_threshold=d * 0.9)
    assert blocked.any()
    assert not blocked.all()


def test_pinsker_on_every_state():
    g = torch.Generator().manual_seed(0)
    pi, mu = (torch.randn(500, 6, generator=g, dtype=torch.float64) * 2 for _ in range(2))
    assert (exact_tv(pi, mu).square() <= exact_kl(pi, mu) / 2).all()
