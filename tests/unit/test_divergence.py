"""Divergences: values worked out by hand, probabilities near 0 and 1, and the order of the divergences."""

import math
from itertools import pairwise

import pytest
import torch

from megatron_dppo.algorithms.divergence import (
    binary_kl,
    binary_tv,
    exact_kl,
    exact_tv,
    topk_kl,
    topk_tv,
)


def logs(*p: float) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64).log()


def random_policies(states: int = 400, vocab: int = 12, spread: float = 3.0):
    generator = torch.Generator().manual_seed(5)
    mu = torch.randn(states, vocab, generator=generator, dtype=torch.float64) * spread
    pi = mu + torch.randn(states, vocab, generator=generator, dtype=torch.float64)
    return pi.log_softmax(-1), mu.log_softmax(-1)


def at_topk(pi, mu, sampled, k):
    """Top-K tensors as the loop builds them: TopK(mu), and the sampled token, valid only if TopK(mu) lacks it."""
    ids = mu.topk(k).indices
    is_new = ~(ids == sampled[:, None]).any(1)
    ids = torch.cat([ids, sampled[:, None]], 1)
    valid = torch.cat([torch.ones(len(ids), k, dtype=torch.bool), is_new[:, None]], 1)
    return pi.gather(1, ids), mu.gather(1, ids), valid


def test_values_worked_by_hand():
    pi, mu = logs(0.5), logs(0.25)
    assert binary_tv(pi, mu).item() == pytest.approx(0.25)
    # 1/4 log(1/2) + 3/4 log(3/2)
    assert binary_kl(pi, mu).item() == pytest.approx(-0.25 * math.log(2) + 0.75 * math.log(1.5))
    pi, mu = logs(0.5, 0.2, 0.2, 0.1)[None], logs(0.4, 0.4, 0.1, 0.1)[None]
    # |-.1| + |.2| + |-.1| + 0, halved
    assert exact_tv(pi, mu).item() == pytest.approx(0.2)
    expected = 0.4 * math.log(0.8) + 0.4 * math.log(2) + 0.1 * math.log(0.5)
    assert exact_kl(pi, mu).item() == pytest.approx(expected)


def test_topk_counts_the_other_bucket_and_skips_what_is_not_valid():
    # mu = (.4, .4, .1, .1), pi = (.5, .2, .2, .1); A' = {0, 1} and the sampled token 2.
    pi, mu = logs(0.5, 0.2, 0.2)[None], logs(0.4, 0.4, 0.1)[None]
    valid = torch.tensor([[True, True, True]])
    assert topk_tv(pi, mu, valid).item() == pytest.approx(0.5 * (0.1 + 0.2 + 0.1 + 0.0))
    # The sampled token is 0, which TopK holds: "other" is then {2, 3}, mu .2 and pi .3.
    valid = torch.tensor([[True, True, False]])
    pi, mu = logs(0.5, 0.2, 0.5)[None], logs(0.4, 0.4, 0.4)[None]
    assert topk_tv(pi, mu, valid).item() == pytest.approx(0.5 * (0.1 + 0.2 + 0.1))
    expected = 0.4 * math.log(0.8) + 0.4 * math.log(2) + 0.2 * math.log(2 / 3)
    assert topk_kl(pi, mu, valid).item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pi", [-30.0, -1e-9, -0.7, 0.0])
@pytest.mark.parametrize("mu", [-30.0, -1e-9, -0.7, 0.0])
def test_binary_is_finite_and_never_negative_at_both_ends(pi, mu, dtype):
    pi, mu = torch.tensor([pi], dtype=dtype), torch.tensor([mu], dtype=dtype)
    for value in (binary_tv(pi, mu), binary_kl(pi, mu)):
        assert value.isfinite().all()
        assert value.item() >= 0
        assert value.dtype == torch.float64
    if pi == mu:
        assert binary_kl(pi, mu).item() == 0


def test_binary_kl_near_certainty_is_exact():
    # mu = 1 - 1e-9, pi = 1 - 1e-3: (1 - mu) log((1 - mu) / (1 - pi)) + mu log(mu / pi)
    mu, pi = torch.tensor([-1e-9], dtype=torch.float64), torch.tensor([-1e-3], dtype=torch.float64)
    q_mu, q_pi = -math.expm1(-1e-9), -math.expm1(-1e-3)
    expected = math.exp(-1e-9) * (1e-3 - 1e-9) + q_mu * math.log(q_mu / q_pi)
    assert binary_kl(pi, mu).item() == pytest.approx(expected, rel=1e-12)


NEAR_CERTAIN = (-1e-1, -1e-3, -1e-5, -1e-6, -1e-7, -1e-8, -1e-20)


@pytest.mark.parametrize("log_pi", NEAR_CERTAIN)
@pytest.mark.parametrize("log_mu", [*NEAR_CERTAIN, 0.0, -1.0, -20.0])
def test_binary_kl_of_float32_is_that_of_the_same_numbers_in_float64(log_pi, log_mu):
    """The divergence of float32 log-probabilities is as precise as the divergence of the same numbers in float64."""
    pi, mu = (torch.tensor([x], dtype=torch.float32) for x in (log_pi, log_mu))
    a, b = float(pi), float(mu)
    rest_mu = -math.expm1(b)
    expected = math.exp(b) * (b - a)
    if rest_mu > 0:
        expected += rest_mu * (math.log(rest_mu) - math.log(-math.expm1(a)))
    # The two terms cancel to first order, so the sum has the rounding error of one term in float64.
    slack = 1e-14 * abs(math.exp(b) * (b - a))
    assert binary_kl(pi, mu).item() == pytest.approx(max(0, expected), rel=1e-12, abs=slack)
    # An engine's log mu has an error of 2^-24. It moves the divergence by less than 6e-6.
    kl_with_error = binary_kl(pi, (mu - 2.0**-24).float()).item()
    assert abs(kl_with_error - expected) < 6e-6


@pytest.mark.parametrize("log_pi", NEAR_CERTAIN)
def test_topk_kl_is_no_less_than_the_binary_one_near_certainty(log_pi):
    pi = torch.tensor([[-25.0, log_pi]])
    mu = torch.tensor([[0.003, 0.995]]).log()
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert topk_kl(pi, mu, valid) >= binary_kl(pi[:, 1], mu[:, 1])


def test_a_token_that_cannot_be_sampled_any_more_is_infinitely_far():
    assert binary_kl(torch.tensor([-math.inf]), torch.tensor([-1.0])).item() == math.inf
    assert binary_tv(torch.tensor([-math.inf]), torch.tensor([0.0])).item() == 1


def test_rounding_of_a_peaked_distribution_gives_no_infinite_topk_kl():
    # A' has all the mass. In float32, its sums are a few units above or below 1.
    mu = torch.tensor([0.7, 0.2, 0.1]).log()[None].expand(3, -1)
    pi = mu + torch.tensor([[6e-8], [0.0], [-6e-8]])
    valid = torch.ones(3, 3, dtype=torch.bool)
    assert topk_kl(pi, mu, valid).max().item() < 1e-6
    assert topk_tv(pi, mu, valid).max().item() < 1e-6


@pytest.mark.parametrize("k", [1, 3, 8])
def test_binary_topk_exact_are_ordered_and_obey_pinsker(k):
    pi, mu = random_policies()
    sampled = torch.multinomial(mu.exp(), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    a, b = pi.gather(1, sampled[:, None])[:, 0], mu.gather(1, sampled[:, None])[:, 0]
    parts = at_topk(pi, mu, sampled, k)
    tv = [binary_tv(a, b), topk_tv(*parts), exact_tv(pi, mu)]
    kl = [binary_kl(a, b), topk_kl(*parts), exact_kl(pi, mu)]
    for low, high in [(0, 1), (1, 2)]:
        assert (tv[low] <= tv[high] + 1e-12).all()
        assert (kl[low] <= kl[high] + 1e-12).all()
    for t, d in zip(tv, kl, strict=True):
        assert (t >= 0).all()
        assert (t.square() <= d / 2 + 1e-12).all()
    assert tv[0].max() > 0.1  # not all compared values are near zero


def test_topk_grows_with_k_and_is_exact_at_the_whole_vocabulary():
    pi, mu = random_policies()
    sampled = mu.argmin(1)
    tv = [topk_tv(*at_topk(pi, mu, sampled, k)) for k in range(1, 13)]
    kl = [topk_kl(*at_topk(pi, mu, sampled, k)) for k in range(1, 13)]
    for small, large in pairwise(tv):
        assert (small <= large + 1e-12).all()
    for small, large in pairwise(kl):
        assert (small <= large + 1e-12).all()
    torch.testing.assert_close(tv[-1], exact_tv(pi, mu), rtol=0, atol=1e-12)
    torch.testing.assert_close(kl[-1], exact_kl(pi, mu), rtol=0, atol=1e-12)


def test_topk_ignores_the_order_of_ids_and_what_stands_under_invalid_ones():
    pi, mu = random_policies(states=20)
    parts = at_topk(pi, mu, mu.argmax(1), 5)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    for divergence in (topk_tv, topk_kl):
        torch.testing.assert_close(divergence(*(p[:, order] for p in parts)), divergence(*parts))
        poisoned = [torch.where(parts[2], p, -123.0) for p in parts[:2]]
        torch.testing.assert_close(divergence(*[*poisoned, parts[2]]), divergence(*parts))


def test_ratio_constant_in_the_other_bucket_makes_topk_kl_exact():
    mu = logs(0.4, 0.3, 0.2, 0.1)[None]
    pi = logs(0.6, 0.2, 0.2 * 2 / 3, 0.1 * 2 / 3)[None]
    parts = at_topk(pi, mu, torch.tensor([0]), 2)
    torch.testing.assert_close(topk_kl(*parts), exact_kl(pi, mu))


def test_no_divergence_carries_a_gradient():
    pi = logs(0.5, 0.2)[None].requires_grad_()
    mu = logs(0.4, 0.3)[None]
    valid = torch.ones(1, 2, dtype=torch.bool)
    for value in (binary_tv(pi, mu), binary_kl(pi, mu), topk_tv(pi, mu, valid),
                  topk_kl(pi, mu, valid), exact_tv(pi, mu), exact_kl(pi, mu)):  # fmt: skip
        assert not value.requires_grad


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float64, 53)])
def test_a_log_probability_of_exactly_zero_leaves_half_a_unit_of_rounding(dtype, bits):
    """If log pi = 0, 1 - pi counts as 2^-bits. At mu = 1/2 the KL is 1/2 log(1/2) + 1/2 (log(1/2) - log 2^-bits)."""
    pi, mu = torch.zeros(1, dtype=dtype), torch.tensor([0.5], dtype=dtype).log()
    assert binary_kl(pi, mu).item() == pytest.approx((bits / 2 - 1) * math.log(2), rel=1e-6)
    assert binary_kl(pi, pi).item() == 0
    # mu = .999: .999 log .999 + .001 (log .001 + bits log 2), below DPPO's threshold of .05.
    mu = torch.tensor([0.999], dtype=dtype).log()
    expected = 0.999 * math.log(0.999) + 0.001 * (math.log(0.001) + bits * math.log(2))
    assert binary_kl(pi, mu).item() == pytest.approx(expected, rel=1e-3)
    assert expected < 0.03


def test_rounding_of_pi_to_one_does_not_raise_its_divergence():
    """At logits 37 to 60 nats apart, float64 rounds pi to 1. D of the rounded pi is at most D of the exact pi."""
    gap = torch.linspace(37, 60, 24, dtype=torch.float64)
    true_log_pi = -torch.log1p((-gap).exp())
    rounded = torch.stack([gap, torch.zeros_like(gap)], -1).log_softmax(-1)[:, 0]
    assert (rounded == 0).all()
    assert (true_log_pi < 0).all()
    for mu in (0.9, 0.99, 0.999, 0.9999):
        log_mu = torch.full_like(gap, mu).log()
        rounded_kl = binary_kl(rounded, log_mu)
        true_kl = binary_kl(true_log_pi, log_mu)
        assert (rounded_kl <= true_kl + 1e-15).all()
        # A rounded pi counts as a gap of 53 log 2 = 36.7. The smallest gap here, 37, is less than .3 nats away.
        assert rounded_kl[0] == pytest.approx(true_kl[0].item(), abs=0.3 * (1 - mu))


def test_a_log_probability_above_zero_counts_as_zero():
    above_zero, zero = (torch.tensor([[v, -50.0]], dtype=torch.float64) for v in (0.5, 0.0))
    mu, valid = logs(0.6, 0.3)[None], torch.ones(1, 2, dtype=torch.bool)
    for f in (topk_tv, topk_kl):
        assert f(above_zero, mu, valid).item() == f(zero, mu, valid).item()
        assert f(mu, above_zero, valid).item() == f(mu, zero, valid).item()
    for binary in (binary_tv, binary_kl):
        assert binary(above_zero[:, 0], mu[:, 0]).item() == binary(zero[:, 0], mu[:, 0]).item()


def test_exact_divergences_are_over_the_last_axis_whatever_comes_before():
    pi, mu = random_policies(states=6, vocab=4)
    for f in (exact_tv, exact_kl):
        cube = f(pi.view(2, 3, 4), mu.view(2, 3, 4))
        torch.testing.assert_close(cube, f(pi, mu).view(2, 3))


def test_the_mass_of_other_is_known_to_four_units_of_the_dtypes_resolution():
    """In float32, eps = 2^-23. Only one id is valid, so "other" has the rest of each distribution."""
    unit, valid = 4 * 2.0**-23, torch.tensor([[True, False]])
    half, certain = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1, 0.5]]).log()
    # The rest of pi is 0 and counts as 2^-21: 1/2 log(1/2) + 1/2 (log(1/2) - log 2^-21) = 19/2 log 2.
    assert topk_kl(certain, half, valid).item() == pytest.approx(9.5 * math.log(2), rel=1e-6)
    # The rest of mu is exactly four units and counts as 0. One term is left: (1 - 4 eps) log((1 - 4 eps) / (1/2)).
    nearly_one = torch.tensor([[-unit, math.log(0.5)]])
    assert 1 - nearly_one[0, 0].double().exp().float().item() == unit
    expected = math.log(2) - 2 * unit
    assert topk_kl(half, nearly_one, valid).item() == pytest.approx(expected, abs=3e-7)


def test_rounding_makes_no_kl_negative_and_no_rest_below_zero():
    # The rest of mu counts as 0, so the only term is mu log(mu / pi) = -4 eps.
    pi, mu = torch.tensor([[0, -1.0]]), torch.tensor([[-(2.0**-21), -1.0]])
    assert topk_kl(pi, mu, torch.tensor([[True, False]])).item() == 0
    g = torch.Generator().manual_seed(4)
    mu = torch.randn(300, 10, generator=g, dtype=torch.float64)
    pi = mu + 1e-12 * torch.randn(300, 10, generator=g, dtype=torch.float64)
    assert (exact_kl(pi, mu) >= 0).all()
    assert (binary_kl(-pi.abs(), -mu.abs()) >= 0).all()
    # A' has .6 + .6 of mu and .6 + .4 of pi, so both rests are 0.
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert topk_tv(logs(0.6, 0.4)[None], logs(0.6, 0.6)[None], valid).item() == pytest.approx(0.1)


def test_float32_entries_are_summed_in_float64():
    pi, mu = (x.float()[:, :6] for x in random_policies())
    p, m = pi.exp(), mu.exp()
    rest_p, rest_m = (1 - x.double().sum(-1) for x in (p, m))
    valid = torch.ones_like(p, dtype=torch.bool)
    has_rest = rest_m > 1e-3
    tv = 0.5 * ((m - p).abs().double().sum(-1) + (rest_m - rest_p).abs())
    torch.testing.assert_close(topk_tv(pi, mu, valid)[has_rest], tv[has_rest], rtol=0, atol=1e-12)
    kl = (m * (mu - pi)).double().sum(-1) + rest_m * (rest_m.log() - rest_p.log())
    torch.testing.assert_close(topk_kl(pi, mu, valid)[has_rest], kl[has_rest], rtol=0, atol=1e-12)
