"""The rules after the paper: fixtures worked by hand, and float64 oracles in plain loops over responses."""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from megatron_dppo.algorithms import divergence, rules, sequence_rules, step_rules, triage
from megatron_dppo.algorithms import inputs as reductions
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.decisions import decide
from megatron_dppo.algorithms.inputs import TokenInputs, recomputed, rollout
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.trainer.token_loss import inputs_from
from megatron_dppo.vocab_parallel import policy_stats
from tests.messages import mentioning
from tests.unit.test_token_loss import K, V, packed, samples
from tests.unit.token_inputs import inputs

F64 = torch.float64
ONE_RESPONSE = {"sequence_ids": torch.zeros(100, dtype=torch.int64)}


def trained(name, x, **options):
    return decide(build_algorithm(name, options), x).trains.tolist()


def weights(name, x, **options):
    return decide(build_algorithm(name, options), x).capped


# --- rules that look at one token


def test_kpop_does_not_read_digits_that_an_engine_has_not():
    """log mu = 0 is a mu of 1 - 3e-8 in float32, and a pi of .9985 near it: .0095 nats with the rest cut to 1e-6."""
    x = inputs([0.9985, 0.008], [0.5, 1e-8], [1.0, -1.0], dtype=torch.float32)
    x = replace(x, rollout_log_probs=torch.tensor([0.0, math.log(1e-8)]))
    found = divergence.binary_kl_both_ways(x.log_probs, x.rollout_log_probs)
    by_hand = [
        0.9985 * math.log(0.9985) + 0.0015 * math.log(0.0015 / 1e-6),
        0.008 * math.log(0.008 / 1e-6) + 0.992 * math.log(0.992),
    ]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-3)
    assert trained("kpop", x) == [True, True]


def test_a_recomputed_policy_is_compared_with_itself_whatever_mu_says():
    """pi = pi' = (.9, .05, .05) and mu = .5 at the sampled token: D is 0, and log(.9 / .5) is no part of it."""
    policy = torch.tensor([[0.9, 0.05, 0.05]]).log()
    x = inputs([0.9], [0.5], [1.0], recomputed=[0.9], dtype=torch.float32)
    x = replace(
        x,
        topk_log_probs=torch.cat([policy, x.log_probs.detach()[:, None]], 1),
        rollout_topk_log_probs=torch.cat([policy, x.rollout_log_probs[:, None]], 1),
        topk_valid=torch.tensor([[True, True, True, False]]),
    )
    for name in ("recomputed-exact-kl", "recomputed-exact-tv"):
        algorithm = build_algorithm(name)
        decided = rules.measure_divergence(algorithm.preset.divergence, x, algorithm.anchor)
        assert decided.tolist() == pytest.approx([0.0], abs=1e-6)
        moved = replace(x, log_probs=torch.tensor([0.901]).log())
        assert trained(name, moved) == [True]
    # The same columns against the rollout: mu is what it says.
    assert float(rules.measure_divergence("topk_kl", x, rollout)) > 0.5


def test_bellman_weight_and_clip_by_hand():
    # (1.1 - mu) / (1.1 - pi) = 0.6 / 0.35, 0.6 / 0.85, 0.2 / 1.0, and 1.0 / 0.15 cut to 3
    x = inputs([0.75, 0.25, 0.1, 0.95], [0.5, 0.5, 0.9, 0.1], [-1.0, 1.0, 1.0, -1.0])
    assert weights("bpo", x).tolist() == pytest.approx([0.6 / 0.35, 0.6 / 0.85, 0.2, 3.0])
    # Outward and beyond the clip of the weight: 1.714 > 1.28 with A > 0, 0.706 < 0.8 with A < 0.
    assert trained("bpo", replace(x, advantages=-x.advantages)) == [False, False, False, False]
    assert trained("bpo", x) == [True] * 4
    # A rare token's weight hardly moves where its ratio is 40.
    assert weights("bpo", inputs([0.04], [0.001], [1.0])).tolist() == pytest.approx([1.099 / 1.06])


def test_bellman_weight_without_smoothing_has_the_gradient_of_log_pi_and_the_binary_kl():
    pi = torch.tensor([0.3, 0.7, 0.05], dtype=F64)
    mu = torch.tensor([0.5, 0.2, 0.06], dtype=F64)
    log_pi = pi.log().requires_grad_()
    kl = mu * (mu.log() - log_pi) + (1 - mu) * ((1 - mu).log() - torch.log1p(-log_pi.exp()))
    (slope,) = torch.autograd.grad((log_pi + kl).sum(), log_pi)
    x = inputs(pi.tolist(), mu.tolist(), [1.0] * 3)
    torch.testing.assert_close(rules.complementary_ratio(x, rollout, smoothing=0.0), slope)


def test_symmetric_mask_blocks_by_distance_alone_and_trains_at_it():
    x = inputs([0.75, 0.75, 0.25, 0.6], [0.5] * 4, [1.0, -1.0, 1.0, 1.0])
    assert trained("dppo-symmetric", x, tv_threshold=0.25 - 1e-9) == [False, False, False, True]
    assert trained("dppo-symmetric", x, tv_threshold=0.25 + 1e-9) == [True] * 4


def test_kpop_takes_the_larger_kl_whatever_the_sign():
    # mu = .5, pi = .1: KL(mu || pi) = .5 log 5 + .5 log(5 / 9) = .5108, the other .1 log .2 + .9 log 1.8 = .3681
    larger = 0.5 * math.log(5) + 0.5 * math.log(5 / 9)
    for pi, mu in ((0.1, 0.5), (0.5, 0.1)):
        x = inputs([pi, pi], [mu, mu], [1.0, -1.0])
        found = divergence.binary_kl_both_ways(x.log_probs, x.rollout_log_probs)
        assert found.tolist() == pytest.approx([larger, larger])
        assert trained("kpop", x, kl_threshold=larger * (1 + 1e-9)) == [True, True]
        assert trained("kpop", x, kl_threshold=larger * (1 - 1e-9)) == [False, False]


def test_the_soft_gate_is_the_derivative_of_its_published_loss():
    x = inputs([0.75, 0.25, 0.5, 0.3], [0.5, 0.5, 0.5, 0.1], [1.0, -2.0, 0.5, -1.0])
    tau = torch.tensor([1.0, 1.05, 1.0, 1.05], dtype=F64)
    ratio = (x.log_probs - x.rollout_log_probs).exp()
    published = -(x.advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))).sum()
    (expected,) = torch.autograd.grad(published, x.log_probs)
    (found,) = torch.autograd.grad(policy_loss(build_algorithm("sapo"), x).loss, x.log_probs)
    torch.testing.assert_close(found, expected)
    assert weights("sapo", x)[2] == 1  # r = 1


def at_all(pi, mu, sampled):
    """Top-K tensors [1, V + 1] of the whole vocabulary; the sampled token's own column is not valid."""
    log = lambda p: torch.tensor([[*p, p[sampled]]], dtype=F64).log()  # noqa: E731
    return log(pi), log(mu), torch.tensor([[True] * len(pi) + [False]])


def predicted(pi, mu, sampled, advantage):
    names = ("topk_log_probs", "rollout_topk_log_probs", "topk_valid")
    topk = dict(zip(names, at_all(pi, mu, sampled), strict=True))
    squares = torch.tensor([sum(p * p for p in pi)], dtype=F64)
    more = {"tail_ids": torch.zeros(1, dtype=torch.int64), "sum_squares": squares}
    return inputs([pi[sampled]], [mu[sampled]], [advantage], **topk, **more)


PI, MU = [0.21, 0.75, 0.04], [0.20, 0.50, 0.30]


@pytest.mark.parametrize("name", ["pdm-aggregated", "pdm-uniform", "pdm-tail", "pdm-exact"])
def test_predictive_mask_asks_where_the_kl_goes_not_where_the_ratio_does(name):
    """KL .39 and r = 1.05, but the step on token 0 lowers the KL: G = .01 - .0021 - .1875 + .0104 = -.1692."""
    change = divergence.topk_kl_change(*at_all(PI, MU, 0))
    assert change.tolist() == pytest.approx([-0.1692])
    assert divergence.topk_kl(*at_all(PI, MU, 0)).item() == pytest.approx(0.391980, abs=1e-6)
    for advantage, blocks in ((1.0, False), (-1.0, True)):
        x = predicted(PI, MU, 0, advantage)
        assert trained(name, x) == [not blocks]
        assert trained("dppo-topk-kl", x) == [blocks]
        assert trained(name, x, kl_threshold=0.392) == [True]


def test_the_predicted_change_is_the_derivative_of_the_kl_along_the_step():
    g = torch.Generator().manual_seed(5)
    for sampled in range(6):
        logits, mu = torch.randn(2, 6, generator=g, dtype=F64)
        mu, pi = mu.softmax(-1), logits.softmax(-1)
        step = torch.nn.functional.one_hot(torch.tensor(sampled), 6) - pi
        kl = lambda t: (mu * (mu.log() - (logits + t * step).log_softmax(-1))).sum()  # noqa: E731, B023
        zero, one = torch.tensor([0.0, 1.0], dtype=F64)
        expected = torch.autograd.functional.jvp(kl, zero, one)[1]
        found = divergence.topk_kl_change(*at_all(pi.tolist(), mu.tolist(), sampled))
        assert found.item() == pytest.approx(expected.item())


def test_the_tail_is_one_token_or_many():
    # TopK(mu) = {.5}, k = that; pi there .3, so the rest has .7 and .5: .7 (.5 - .7) = -.14, or a fourth of it.
    pi, mu = torch.tensor([[0.3, 0.3]], dtype=F64), torch.tensor([[0.5, 0.5]], dtype=F64)
    topk = (pi.log(), mu.log(), torch.tensor([[True, False]]))
    inside = -0.2 + 0.3 * 0.2
    assert divergence.topk_kl_change(*topk).item() == pytest.approx(inside - 0.14)
    tail = torch.tensor([4])
    assert divergence.topk_kl_change(*topk, tail_ids=tail).item() == pytest.approx(inside - 0.035)
    # Of .4 and .3 in the rest, whose mu / pi is 5 / 7: (5 / 7 - 1)(.16 + .09), whatever the ids of the rest are.
    squares = torch.tensor([0.09 + 0.16 + 0.09], dtype=F64)
    of_squares = divergence.topk_kl_change(*topk, sum_squares=squares)
    assert of_squares.item() == pytest.approx(inside - 2 / 7 * 0.25)
    # All of it at one id is the one token; more there can't be, and less than nothing neither.
    for found, share in ((0.09 + 0.49, 1), (0.7, 1), (0.05, 0)):
        squares = torch.tensor([found], dtype=F64)
        change = divergence.topk_kl_change(*topk, sum_squares=squares)
        assert change.item() == pytest.approx(inside - 0.14 * share)


def test_a_proportional_tail_is_exact_where_it_is_one_and_better_than_one_token_or_many():
    g = torch.Generator().manual_seed(8)
    pi = torch.randn(50, 40, generator=g, dtype=F64).mul(2).softmax(-1)
    mu = torch.randn(50, 40, generator=g, dtype=F64).mul(0.3).exp() * pi
    mu[:, 6:] = pi[:, 6:] * 0.8  # the tail's mu / pi is one
    mu /= mu.sum(-1, keepdim=True)
    exact = pi[:, 0] - mu[:, 0] + (pi * (mu - pi)).sum(-1)
    columns = [0, 1, 2, 3, 4, 5, 0]  # the sampled token is the first of TopK(mu)
    valid = torch.tensor([[True] * 6 + [False]]).expand(50, 7)
    topk = pi[:, columns].log(), mu[:, columns].log(), valid
    found = divergence.topk_kl_change(*topk, sum_squares=pi.square().sum(-1))
    torch.testing.assert_close(found, exact)
    ids = torch.full((50,), 34)
    for other in (divergence.topk_kl_change(*topk), divergence.topk_kl_change(*topk, tail_ids=ids)):
        assert (other - exact).abs().mean() > 1e-3


def test_a_uniform_tail_needs_its_size_which_the_statistics_know():
    x = replace(predicted(PI, MU, 0, 1.0), tail_ids=None)
    with pytest.raises(ValueError, match=mentioning("tail_ids")):
        trained("pdm-uniform", x)
    with pytest.raises(ValueError, match=mentioning("sum_squares")):
        trained("pdm-tail", replace(x, sum_squares=None))
    batch = packed(samples(), range(2))
    ids = batch.columns["topk_ids"].long()
    stats = policy_stats(
        torch.zeros(batch.num_tokens, V), batch.target_ids, vocab_size=V, topk_ids=ids,
        with_squares=True,
    )  # fmt: skip
    x = inputs_from(stats, batch)
    assert x.sum_squares.tolist() == pytest.approx([1 / V] * batch.num_tokens)
    assert x.tail_ids.tolist() == [V - int(v) for v in x.topk_valid.sum(1)]
    assert {V - K, V - K - 1} == set(x.tail_ids[x.loss_mask].tolist())


# --- rules that look at a response


def all_outward(distances):
    """A response of tokens with mu = .2 that rise by ``distances`` with A > 0."""
    count = len(distances)
    ids = torch.zeros(count, dtype=torch.int64)
    return inputs([0.2 + d for d in distances], [0.2] * count, [1.0] * count, sequence_ids=ids)


def test_cppo_blocks_a_steady_drift_that_dppo_keeps():
    x = all_outward([0.10] * 100)
    assert trained("dppo-binary-tv", x) == [True] * 100
    assert trained("cppo-binary-tv", x) == [True] + [False] * 99
    fixed = {"budget_low": 0.015, "budget_high": 0.015}  # that of post-trained models
    assert trained("cppo-binary-tv", x, **fixed) == [True] + [False] * 99


def test_cppo_of_the_binary_kl_by_hand():
    # KL(.2 || .3) = .2 log(2 / 3) + .8 log(8 / 7) = .02573, below .05; b is cut to .0032. With w near 1 the second has
    # .05 + .0032 - .0257, and the third .05 + .0064 - .0513.
    x = all_outward([0.10] * 100)
    assert trained("dppo-binary-kl", x) == [True] * 100
    assert trained("cppo-binary-kl", x) == [True, True] + [False] * 98
    exact = 0.2 * math.log(2 / 3) + 0.8 * math.log(8 / 7)
    for threshold, first in ((exact * (1 + 1e-9), True), (exact * (1 - 1e-9), False)):
        assert trained("cppo-binary-kl", x, kl_threshold=threshold)[:2] == [first, False]


def test_cppo_keeps_a_late_step_that_dppo_blocks():
    x = all_outward([0.0] * 99 + [0.17])
    assert trained("dppo-binary-tv", x)[-1] is False
    assert trained("cppo-binary-tv", x) == [True] * 100
    # It is the last token's weight, 0.8: 0.8 * 0.1875 = 0.15.
    for late, expected in ((0.1874, True), (0.1876, False)):
        assert trained("cppo-binary-tv", all_outward([0.0] * 99 + [late]))[-1] is expected


def test_cppo_counts_what_it_blocks_and_what_leads_back():
    # Three steps of .1 with the budget 0.04: the 2nd is beyond .15 + .04 - .1; so is the 3rd, whether the 2nd leads
    # back or not, but a 2nd of nothing leaves it room: w = 1, .9, .8; .08 <= .15 + .04 * 1.9 - .1.
    def middle(distance, advantage):
        advantages = torch.tensor([1.0, advantage, 1.0], dtype=F64)
        return replace(all_outward([0.1, distance, 0.1]), advantages=advantages)

    assert trained("cppo-binary-tv", middle(0.1, 1.0)) == [True, False, False]
    assert trained("cppo-binary-tv", middle(0.1, -1.0)) == [True, True, False]
    assert trained("cppo-binary-tv", middle(0.0, 1.0)) == [True, True, True]


def test_cppos_budget_is_the_90th_percentile_of_the_response():
    # Of eleven tokens the tenth in order: .03. The third then has .0501 + 2 * .03 - .06, more than it takes.
    x = all_outward([0.05, 0.01, 0.03] + [0.01] * 8)
    numbers = {"tv_threshold": 0.0501, "weight_min": 1.0, "budget_low": 0.0}
    assert trained("cppo-binary-tv", x, **numbers, budget_high=1.0)[:3] == [True] * 3
    assert trained("cppo-binary-tv", x, **numbers, budget_high=0.01)[:3] == [True, True, False]


def test_rules_of_whole_responses_train_exactly_at_their_bounds():
    # On policy every ratio is 1, every drift, k2 and k3 is 0: the bounds leave no room around these.
    same, ids = [0.5, 0.25], torch.tensor([0, 1])
    x = inputs(same, same, [1.0, -1.0], recomputed=same, sequence_ids=ids)
    for mask in (
        sequence_rules.geometric_band(
            x, recomputed, sequence_low=1.0, sequence_high=1.0, clip_low=0.0, clip_high=0.0
        ),
        sequence_rules.mean_shift(x, recomputed, largest_shift=0.0, clip_low=0.0, clip_high=0.0),
        sequence_rules.drifted_sequence(x, rollout, drift_threshold=0.0),
        sequence_rules.largest_token(x, rollout, largest_k2=0.0),
        sequence_rules.mean_token(x, rollout, mean_k3=0.0),
        sequence_rules.log_ratio_clip(x, rollout, log_clip=0.0),
    ):
        assert mask.tolist() == [True, True]


def test_without_advantage_nothing_drifts_and_nothing_is_cut():
    # log r = log .5 and log 2, a response each; with A of either sign one of them is cut to 0.15 in size.
    x = inputs([0.25, 0.5], [0.5, 0.25], [0.0, 0.0], sequence_ids=torch.tensor([0, 1]))
    assert sequence_rules.drifted_sequence(x, rollout, drift_threshold=0.1).tolist() == [True, True]
    weight = sequence_rules.clipped_geometric_mean(x, rollout, log_clip=0.15)
    assert weight.tolist() == pytest.approx([0.5, 2.0])
    for sign, expected in ((1.0, [0.5, math.exp(0.15)]), (-1.0, [math.exp(-0.15), 2.0])):
        signed = replace(x, advantages=torch.full_like(x.advantages, sign))
        weight = sequence_rules.clipped_geometric_mean(signed, rollout, log_clip=0.15)
        assert weight.tolist() == pytest.approx(expected)


def test_cppo_trains_exactly_at_its_bound_and_what_does_not_lead_outward():
    x = all_outward([0.1, 0.0])
    distance = divergence.binary_tv(x.log_probs.detach(), x.rollout_log_probs)
    numbers = {"weight_min": 1.0, "budget_low": 0.0, "budget_high": 1e-9}
    assert trained("cppo-binary-tv", x, tv_threshold=float(distance[0]), **numbers)[0] is True
    # .4 is spent of .05: nothing is left for a step outward, and a ratio of 1 or an A of 0 needs none.
    for second, advantage, expected in ((0.0, 1.0, True), (0.3, 0.0, True), (0.3, 1.0, False)):
        y = replace(
            all_outward([0.4, second]), advantages=torch.tensor([1.0, advantage], dtype=F64)
        )
        assert trained("cppo-binary-tv", y, tv_threshold=0.05, **numbers) == [False, expected]
    # log r = 3.2 is outward, too.
    rare = inputs([0.5], [0.02], [1.0], sequence_ids=torch.tensor([0]))
    assert trained("cppo-binary-tv", rare, tv_threshold=0.05, **numbers) == [False]


def test_cppos_budget_is_not_the_largest_of_the_response():
    # Of eleven tokens the tenth in order is .02: the second has .0801 + .02 - .09, less than it takes.
    x = all_outward([0.09, 0.02] + [0.01] * 9)
    numbers = {"tv_threshold": 0.0801, "weight_min": 1.0, "budget_low": 0.0, "budget_high": 1.0}
    assert trained("cppo-binary-tv", x, **numbers)[:2] == [False, False]
    assert trained("cppo-binary-tv", x, **{**numbers, "budget_low": 0.09})[:2] == [False, True]


def cppo_by_loop(distances, outward, d, low, high, weight_min):
    """Which tokens of one response train, in plain Python."""
    count = len(distances)
    ordered = sorted(distances)
    place = 0.9 * (count - 1)
    under = ordered[math.floor(place)]
    over = ordered[min(math.floor(place) + 1, count - 1)]
    budget = min(max(under + (place - math.floor(place)) * (over - under), low), high)
    spent = weights_before = 0.0
    kept = []
    for t in range(count):
        w = 1 - (1 - weight_min) * t / max(count - 1, 1)
        z = w * distances[t]
        kept.append(not outward[t] or z <= min(d, d + budget * weights_before - spent))
        spent, weights_before = spent + z, weights_before + w
    return kept


def responses(seed, count=5, longest=14):
    """Packed responses between prompts and padding; each: (pi, mu, advantage, rows of the pack)."""
    rng, made, rows, ids, mask = random.Random(seed), [], [], [], []
    for number in range(count):
        for part, length in ((False, rng.randint(0, 3)), (True, rng.randint(1, longest))):
            for _ in range(length):
                mask.append(part and rng.random() > 0.15)  # not all of a response trains
                ids.append(number)
    advantages = [rng.choice((-1.0, 1.0)) for _ in range(count)]
    pi = [rng.uniform(0.05, 0.6) for _ in ids]
    mu = [min(max(p + rng.gauss(0, 0.06), 0.01), 0.9) for p in pi]
    for number in range(count):
        rows = [i for i, n in enumerate(ids) if n == number and mask[i]]
        made.append((rows, advantages[number]))
    x = inputs(
        pi, mu, [advantages[n] for n in ids], loss_mask=mask, sequence_ids=torch.tensor(ids),
        recomputed=[min(max(q + rng.gauss(0, 0.04), 0.01), 0.9) for q in mu],
    )  # fmt: skip
    return x, pi, mu, made


@pytest.mark.parametrize("seed", range(8))
def test_sequence_rules_are_those_of_a_loop_over_responses(seed):
    x, pi, mu, made = responses(seed)
    numbers = {"tv_threshold": 0.08, "budget_low": 0.02, "budget_high": 0.04, "weight_min": 0.8}
    cppo = trained("cppo-binary-tv", x, **numbers)
    of_kl = {"kl_threshold": 0.01, "budget_low": 0.001, "budget_high": 0.004}
    cppo_kl = trained("cppo-binary-kl", x, **of_kl)
    gmpo = weights("gmpo", x, log_clip=0.15), trained("gmpo", x, log_clip=0.15)
    minpro = weights("minpro", x)
    largest, mean = trained("trm-max", x, largest_k2=0.1), trained("trm-mean", x, mean_k3=0.03)
    geometric = trained("geometric-mask", x, sequence_low=0.9, sequence_high=1.1)
    vaco = trained("vaco", x, largest_shift=0.15)
    drifted = trained("off-policy-sequence-mask", x, drift_threshold=0.02)
    for rows, a in made:
        logs = [math.log(pi[i] / mu[i]) for i in rows]
        gaps = [abs(pi[i] - mu[i]) for i in rows]
        outward = [a * value > 0 for value in logs]
        loop = cppo_by_loop(gaps, outward, 0.08, 0.02, 0.04, 0.8) if rows else []
        assert [cppo[i] for i in rows] == loop
        pairs = [(pi[i], mu[i]) for i in rows]
        gaps = [q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) for p, q in pairs]
        loop = cppo_by_loop(gaps, outward, 0.01, 0.001, 0.004, 0.8) if rows else []
        assert [cppo_kl[i] for i in rows] == loop
        if not rows:
            continue
        average = lambda values: sum(values) / len(rows)  # noqa: E731, B023
        cut = [min(v, 0.15) if a > 0 else max(v, -0.15) for v in logs]
        assert gmpo[0][rows].tolist() == pytest.approx([math.exp(average(cut))] * len(rows))
        assert [gmpo[1][i] for i in rows] == [a * v <= 0.15 for v in logs]
        lowest = [min([math.exp(v) for v in logs[:t]], default=1.0) for t in range(len(rows))]
        expected = [min(math.exp(v) * low, 5) for v, low in zip(logs, lowest, strict=True)]
        assert minpro[rows].tolist() == pytest.approx(expected)
        whole = {
            "max": (largest, max(v * v / 2 for v in logs) <= 0.1),
            "mean": (mean, average([math.expm1(v) - v for v in logs]) <= 0.03),
            "drift": (drifted, a >= 0 or -average(logs) <= 0.02),
        }
        for name, (found, loop) in whole.items():
            assert [found[i] for i in rows] == [loop] * len(rows), name
        old = [math.exp(x.recomputed_log_probs[i]) for i in rows]
        mismatch = [math.log(p / mu[i]) for p, i in zip(old, rows, strict=True)]
        ratios = [pi[i] / p for p, i in zip(old, rows, strict=True)]
        clipped = [r > 1.2 if a > 0 else r < 0.8 for r in ratios]
        band = 0.9 <= math.exp(average(mismatch)) <= 1.1
        assert [geometric[i] for i in rows] == [band and not c for c in clipped]
        near = average([abs(math.expm1(m)) for m in mismatch]) <= 0.15
        kept = [(near or a * m <= 0) and not c for m, c in zip(mismatch, clipped, strict=True)]
        assert [vaco[i] for i in rows] == kept


def test_the_random_responses_fall_on_both_sides():
    found = {}
    options = {
        "cppo-binary-tv": {"tv_threshold": 0.08},
        "cppo-binary-kl": {"kl_threshold": 0.01, "budget_low": 0.001, "budget_high": 0.004},
        "gmpo": {"log_clip": 0.15},
        "trm-max": {"largest_k2": 0.1}, "trm-mean": {"mean_k3": 0.03},
        "geometric-mask": {"sequence_low": 0.9, "sequence_high": 1.1}, "vaco": {"largest_shift": 0.15},
        "off-policy-sequence-mask": {"drift_threshold": 0.02},
    }  # fmt: skip
    for seed in range(8):
        x = responses(seed)[0]
        for name, given in options.items():
            of_masked = torch.tensor(trained(name, x, **given))[x.loss_mask]
            found.setdefault(name, []).append(of_masked)
    for name, parts in found.items():
        assert 0.1 < float(torch.cat(parts).double().mean()) < 0.95, name


@pytest.mark.parametrize("name", ["cppo-binary-tv", "minpro", "gmpo", "trm-mean"])
def test_a_responses_numbers_do_not_depend_on_what_it_is_packed_with(name):
    """Not by one bit: the order in which its tokens are added up is its own."""
    x, *_, made = responses(3)
    algorithm = build_algorithm(name)
    whole = decide(algorithm, x)
    for number in range(len(made)):
        rows = torch.nonzero(x.sequence_ids == number).flatten()
        fields = {f: getattr(x, f) for f in x.__dataclass_fields__}
        alone = {f: None if v is None else v[rows] for f, v in fields.items()}
        alone["sequence_ids"] = torch.zeros_like(rows)
        found = decide(algorithm, TokenInputs(**alone))
        assert torch.equal(found.weight, whole.weight[rows])
        assert torch.equal(found.trains, whole.trains[rows])


def test_reductions_leave_out_what_does_not_train_and_stop_at_responses():
    x = inputs([0.5] * 6, [0.5] * 6, [1.0] * 6, loss_mask=[False, True, True, True, False, True],
               sequence_ids=torch.tensor([0, 0, 0, 2, 2, 2]))  # fmt: skip
    values = torch.tensor([9.0, 3.0, 1.0, 2.0, math.nan, 5.0], dtype=F64)
    assert reductions.sequence_means(x, values).tolist() == [2, 2, 2, 3.5, 3.5, 3.5]
    assert reductions.sequence_maxima(x, values).tolist() == [3, 3, 3, 5, 5, 5]
    prefix = reductions.prefix_totals(x, values)
    assert prefix.tolist() == [0, 3, 4, 2, 2, 7]
    assert reductions.shift_by_one(x, prefix, 0.0).tolist() == [0, 0, 3, 0, 2, 2]
    assert reductions.prefix_minima(x, values).tolist() == [math.inf, 3, 1, 2, 2, 2]
    assert reductions.sequence_quantile(x, values, 0.5).tolist() == [2, 2, 2, 3.5, 3.5, 3.5]
    assert reductions.sequence_quantile(x, values, 0.9)[1] == pytest.approx(2.8)
    weight, weights_before = sequence_rules.position_weights(x, weight_min=0.6)
    assert weight[[1, 2, 3, 5]].tolist() == pytest.approx([1, 0.6, 1, 0.6])
    assert weights_before[[1, 2, 3, 5]].tolist() == pytest.approx([0, 1, 0, 1])
    assert reductions.sequence_maxima(replace(x, loss_mask=~x.loss_mask), values)[4] == math.inf


def test_one_token_has_the_whole_weight():
    x = all_outward([0.1])
    weight, weights_before = sequence_rules.position_weights(x, weight_min=0.8)
    assert (weight.tolist(), weights_before.tolist()) == ([1.0], [0.0])
    assert trained("cppo-binary-tv", x) == [True]


def test_cppo_of_topk_counts_what_the_sampled_token_does_not_show():
    # Binary .05, Top-K .3 at each token.
    topk = {
        "topk_log_probs": torch.tensor([[0.3, 0.15]], dtype=F64).log().expand(4, 2),
        "rollout_topk_log_probs": torch.tensor([[0.6, 0.1]], dtype=F64).log().expand(4, 2),
        "topk_valid": torch.ones(4, 2, dtype=torch.bool),
    }
    ids = torch.zeros(4, dtype=torch.int64)
    x = inputs([0.15] * 4, [0.1] * 4, [1.0] * 4, sequence_ids=ids, **topk)
    assert trained("cppo-topk-tv", x) == [False] * 4
    assert trained("cppo-topk-tv", x, tv_threshold=0.31) == [True, False, False, False]
    # KL: .6 log 2 + .1 log(2 / 3) + .3 log(6 / 11) = .1935, and .0109 of the sampled token alone.
    assert trained("cppo-binary-kl", x)[0] is True
    assert trained("cppo-topk-kl", x) == [False] * 4
    assert trained("cppo-topk-kl", x, kl_threshold=0.194) == [True, False, False, False]


# --- rules that look at an optimiser step


def cut_by_sorting(values, limit):
    """How many of the smallest values have a mean of at most ``limit``, in plain Python; equal ones are on one side."""
    ordered, kept = sorted(values), 0
    for count in range(1, len(ordered) + 1):
        is_last_of_equals = count == len(ordered) or ordered[count] != ordered[count - 1]
        if is_last_of_equals and sum(ordered[:count]) <= limit * count:
            kept = count
    return kept


def level_by_sorting(values, limit):
    """The level at which the values, cut to it, have the mean ``limit``, in plain Python; inf where they need none."""
    ordered = sorted(values)
    if sum(ordered) <= limit * len(ordered):
        return math.inf
    below = 0.0
    for i, value in enumerate(ordered):
        if below + value * (len(ordered) - i) >= limit * len(ordered):
            return (limit * len(ordered) - below) / (len(ordered) - i)
        below += value
    raise AssertionError


SIGNS = torch.tensor([1.0, -1.0, -1.0, 0.0]).repeat(50)
ALONE = lambda total: total  # noqa: E731


@pytest.mark.parametrize("limit", [1e-6, 0.01, 0.04, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_cut_of_the_outward_moment_is_the_level_of_a_sorted_list(seed, limit):
    g = torch.Generator().manual_seed(seed)
    log_ratio = 0.4 * torch.randn(200, generator=g)
    outward = [v * v for v, a in zip(log_ratio.tolist(), SIGNS.tolist(), strict=True) if a * v > 0]
    cut = step_rules.outward_moment_cut(log_ratio, SIGNS, ALONE, second_moment=limit)
    assert cut == pytest.approx(level_by_sorting(outward, limit), rel=1e-6)
    assert (cut == math.inf) == (limit == 1)
    if cut < math.inf:
        assert sum(min(v, cut) for v in outward) <= limit * len(outward)
    # What leads back to mu, or has no advantage, counts neither in the sum nor in the number.
    back = log_ratio.clone()
    back[SIGNS * log_ratio <= 0] *= 50
    assert step_rules.outward_moment_cut(back, SIGNS, ALONE, second_moment=limit) == cut
    none = torch.zeros_like(SIGNS)
    assert step_rules.outward_moment_cut(log_ratio, none, ALONE, second_moment=limit) == math.inf


def test_m2po_by_hand_is_a_clip_of_what_leads_outward():
    """log r = .1, -.3, .5, -.4, .6 with A = 1, -1, 1, 1, -1: the first three lead outward, with (log r)^2 = .01, .09
    and .25. At a budget of .04 the level c has .01 + c + c = .12: c = .055, so that .09 and .25 are blocked."""
    log_ratio = torch.tensor([0.1, -0.3, 0.5, -0.4, 0.6], dtype=F64)
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=F64)
    cut = step_rules.outward_moment_cut(log_ratio, advantages, ALONE, second_moment=0.04)
    assert cut == pytest.approx(0.055, rel=1e-6)
    # All of them fit where the mean of the three, .35 / 3, is the budget.
    enough = step_rules.outward_moment_cut(
        log_ratio, advantages, ALONE, second_moment=0.35 / 3 + 1e-6
    )
    assert enough == math.inf
    x = inputs((0.2 * log_ratio.exp()).tolist(), [0.2] * 5, advantages.tolist())
    at = lambda bound: replace(x, step_bound=torch.full((5,), bound, dtype=F64))  # noqa: E731
    assert trained("m2po", at(cut)) == [True, False, False, True, True]
    # The same as PPO's clip at e^-sqrt(c) and e^sqrt(c).
    clip = {"clip_low": 1 - math.exp(-math.sqrt(cut)), "clip_high": math.expm1(math.sqrt(cut))}
    assert trained("grpo", x, **clip) == trained("m2po", at(cut))
    assert trained("m2po-areal", at(cut)) == [True, False, False, False, False]
    # Exactly at its cut a token trains.
    exact = float((x.log_probs.detach() - x.rollout_log_probs)[1].square())
    assert trained("m2po", at(exact))[1] is True
    assert trained("m2po", at(exact * (1 - 1e-12)))[1] is False


@pytest.mark.parametrize("limit", [1e-6, 0.01, 0.04, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_cut_of_the_second_moment_is_that_of_a_sorted_list(seed, limit):
    g = torch.Generator().manual_seed(seed)
    log_ratio = 0.4 * torch.randn(200, generator=g)
    log_ratio[:20] = log_ratio[20:40]  # equal ones
    cut = step_rules.second_moment_cut(log_ratio, SIGNS, ALONE, second_moment=limit)
    values = log_ratio.square().double()
    kept = cut_by_sorting(values.tolist(), limit)
    assert int((values <= cut).sum()) == kept
    if 0 < kept < 200:
        below, above = values.sort().values[kept - 1 : kept + 1].tolist()
        assert cut == pytest.approx((below + above) / 2, abs=1e-3 * (above - below))
    assert (kept == 200) == (cut == math.inf) == (limit == 1)


def test_a_step_by_hand_as_areal_reads_it():
    # (log r)^2 = .01, .04, .25, .01: the mean of all is .0775; of the three smallest .02.
    log_ratio = torch.tensor([0.1, -0.2, 0.5, -0.1], dtype=F64)
    found = [
        step_rules.second_moment_cut(log_ratio, SIGNS[:4], ALONE, second_moment=limit)
        for limit in (0.05, 0.015, 0.0776)
    ]
    assert 0.04 < found[0] < 0.25
    assert 0.01 < found[1] < 0.04
    assert found[2] == math.inf
    x = inputs((0.2 * log_ratio.exp()).tolist(), [0.2] * 4, [1.0, 1.0, 1.0, -1.0])
    bounded = replace(x, step_bound=torch.full((4,), 0.1, dtype=F64))
    assert trained("m2po-areal", bounded) == [True, True, False, True]
    for name in ("m2po", "m2po-areal"):
        with pytest.raises(ValueError, match="step_bound"):
            trained(name, x)


def test_what_engine_and_trainer_disagree_on_blocks_a_response_whatever_pi_has_become():
    """Two tokens a response: pi' / mu = 1.02, 1.02 in the first, 1.02, 1 / 1.02 in the second; pi is 1.1 pi'."""
    old, mu = [0.51, 0.51, 0.51, 0.5], [0.5, 0.5, 0.5, 0.51]
    ids = torch.tensor([0, 0, 1, 1])
    pi = [1.1 * p for p in old]
    x = inputs(pi, mu, [1.0] * 4, recomputed=old, sequence_ids=ids)
    assert trained("geometric-mask", x) == [False, False, True, True]
    # Means of |rho - 1|: .02, and (.02 + .0196) / 2 = .0198. With A > 0, rho < 1 leads back.
    assert trained("vaco", x, largest_shift=0.0199) == [False, False, True, True]
    assert trained("vaco", x, largest_shift=0.0197) == [False, False, False, True]
    falling = replace(x, advantages=-x.advantages)
    assert trained("vaco", falling, largest_shift=0.0197) == [True, True, True, False]
    # Both have PPO's clip of pi / pi'.
    further = replace(x, log_probs=x.log_probs.detach() + math.log(1.1))
    for name in ("geometric-mask", "vaco"):
        assert trained(name, further) == [False] * 4


@pytest.mark.parametrize("name", ["m2po", "m2po-areal"])
def test_a_bound_does_not_depend_on_which_replica_has_which_tokens(name):
    """Three threads that sum with each other, one of them without a token, find what one finds of all tokens."""
    g = torch.Generator().manual_seed(2)
    log_ratio = 0.3 * torch.randn(90, generator=g)
    advantages = torch.randn(90, generator=g)
    step_bound = build_algorithm(name).step_bound
    expected = step_bound(log_ratio, advantages, ALONE)
    assert 0 < expected < math.inf
    signs = [advantages[:33], advantages[33:], advantages[:0]]
    parts, barrier = [log_ratio[:33], log_ratio[33:], log_ratio[:0]], threading.Barrier(3)
    shared = [torch.empty(0)] * 3

    def of_rank(rank):
        def total(values):
            shared[rank] = values
            barrier.wait(timeout=30)
            whole = torch.stack(shared).sum(0)
            barrier.wait(timeout=30)
            return whole

        return step_bound(parts[rank], signs[rank], total)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(of_rank, range(3))) == [expected] * 3


# --- score centering


def centered_inputs(logits, mu_logits, sampled, k, advantages):
    """Of T tokens over the vocabulary: K ids of TopK(mu) and the sampled one, with a gradient to ``logits`` [T, V]."""
    log_pi, log_mu = logits.log_softmax(-1), mu_logits.log_softmax(-1)
    ids = log_mu.topk(k).indices
    at = sampled[:, None]
    valid = torch.cat([torch.ones_like(ids, dtype=torch.bool), ~(ids == at).any(1, True)], 1)
    return TokenInputs(
        log_probs=log_pi.gather(1, at)[:, 0], rollout_log_probs=log_mu.gather(1, at)[:, 0],
        advantages=advantages, loss_mask=torch.ones(len(sampled), dtype=torch.bool),
        topk_log_probs=torch.cat([log_pi.gather(1, ids), log_pi.detach().gather(1, at)], 1),
        rollout_topk_log_probs=log_mu.gather(1, torch.cat([ids, at], 1)), topk_valid=valid,
    )  # fmt: skip


def expected_gradient(logits, mu_logits, k, name="score-centering", **options):
    """By the logits, exactly: the mean over what mu samples of a state's loss with A = 1."""
    vocabulary = logits.shape[-1]
    each = logits.expand(vocabulary, -1)
    algorithm = build_algorithm(name, options)
    everything = torch.arange(vocabulary)
    mu = mu_logits.softmax(-1)
    x = centered_inputs(each, mu_logits.expand(vocabulary, -1), everything, k, mu)
    (gradient,) = torch.autograd.grad(policy_loss(algorithm, x).loss, logits)
    return gradient


def two_policies(seed, vocabulary=7, spread=1.5):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(vocabulary, generator=g, dtype=F64)
    pi = mu + spread * torch.randn(vocabulary, generator=g, dtype=F64)
    return pi.requires_grad_(), mu


@pytest.mark.parametrize("ratio_cap", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_centered_score_has_the_mean_zero_under_mu(seed, ratio_cap):
    """With the whole of mu; truncated importance sampling alone does not."""
    pi, mu = two_policies(seed)
    centered = expected_gradient(pi, mu, 7, ratio_cap=ratio_cap)
    torch.testing.assert_close(centered, torch.zeros_like(mu), rtol=0, atol=1e-14)
    assert expected_gradient(pi, mu, 7, "pg-tis", ratio_cap=ratio_cap).norm() > 0.01


def test_a_centered_score_has_the_mean_zero_where_the_tail_is_proportional():
    """K = 3 of 7: mu of the other four is 1.7 times pi, but for normalisation."""
    pi, mu = two_policies(8)
    rare = mu.topk(4, largest=False).indices
    with torch.no_grad():
        # Below the others in mu whatever their order there.
        mu[rare] = pi.detach()[rare] - pi.detach().logsumexp(0) - 4 + math.log(1.7)
    gradient = expected_gradient(pi, mu, 3, ratio_cap=0.8)
    torch.testing.assert_close(gradient, torch.zeros_like(mu), rtol=0, atol=1e-14)


def test_centering_by_hand():
    # mu (.5, .3 | .2), pi (.6, .1 | .3), C = 2: rho = 2/3, min(1, 4/3) = 1; c = min(.6, 1) - .6, min(.1, .6) - .1 = 0.
    # C = 1: min(1, 2/3): c = .5 - .4, .1 - .1 2/3.
    mu, pi = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64), torch.tensor([[0.6, 0.1, 0.3]], dtype=F64)
    x = centered_inputs(pi.log(), mu.log(), torch.tensor([2]), 2, torch.ones(1, dtype=F64))
    assert rules.centering(x, 2.0).tolist() == [pytest.approx([0.0, 0.0])]
    assert rules.centering(x, 1.0).tolist() == [pytest.approx([0.1, 0.1 / 3])]


def test_centering_is_nothing_on_policy_and_adds_no_value():
    pi, mu = two_policies(3)
    same = centered_inputs(mu[None], mu[None], torch.tensor([4]), 3, torch.ones(1, dtype=F64))
    assert rules.centering(same, 2.0).abs().max() < 1e-15
    x = centered_inputs(pi[None], mu[None], torch.tensor([4]), 3, -torch.ones(1, dtype=F64))
    plain = policy_loss(build_algorithm("pg-tis", {"ratio_cap": 2}), x)
    centered = policy_loss(build_algorithm("score-centering"), x)
    assert centered.loss.item() == plain.loss.item()
    blocked = replace(x, rollout_log_probs=torch.tensor([-math.inf], dtype=F64))
    (gradient,) = torch.autograd.grad(
        policy_loss(build_algorithm("score-centering"), blocked).loss, pi
    )
    assert (gradient == 0).all()


def test_the_centering_of_a_token_that_does_not_train_has_no_gradient():
    """Of two tokens that centering moves, one is blocked by a number that is none, or outside the loss mask."""
    pi, mu = two_policies(6)
    both = centered_inputs(
        pi.expand(2, -1), mu.expand(2, -1), torch.tensor([1, 1]), 3, torch.ones(2, dtype=F64)
    )
    algorithm = build_algorithm("score-centering", {"ratio_cap": 0.5})
    (twice,) = torch.autograd.grad(policy_loss(algorithm, both).loss, pi, retain_graph=True)
    once = twice / 2
    topk = rules.centering(both, 0.5)
    assert (topk.abs().sum(-1) > 0.01).all()
    mask = torch.tensor([True, False])
    lost = both.rollout_log_probs.clone()
    lost[1] = -math.inf
    for blocked in (replace(both, loss_mask=mask), replace(both, rollout_log_probs=lost)):
        loss = policy_loss(algorithm, blocked).loss
        (found,) = torch.autograd.grad(loss, pi, retain_graph=True)
        torch.testing.assert_close(found, once)


def test_a_token_s_factor_scales_its_centering_too():
    pi, mu = two_policies(6)
    x = centered_inputs(pi[None], mu[None], torch.tensor([1]), 3, torch.ones(1, dtype=F64))
    algorithm = build_algorithm("score-centering", {"ratio_cap": 0.5})
    scaled = policy_loss(algorithm, x, torch.full((1,), 0.25, dtype=F64)).loss
    (quarter,) = torch.autograd.grad(scaled, pi, retain_graph=True)
    (whole,) = torch.autograd.grad(policy_loss(algorithm, x).loss, pi)
    torch.testing.assert_close(quarter, whole / 4)


# --- TRIAGE


def gate_by_loop(gaps, advantages, size):
    """The gate of one branch's trained tokens, in plain Python."""
    gates = []
    for start in range(0, len(gaps), size):
        part = gaps[start : start + size]
        signs = advantages[start : start + size]
        mean = sum(part) / len(part)
        tier = 0.1 if mean < -1.5 else 0.3 if mean < -0.5 else 1.0
        weight = min(tier, 1 - 0.9 * min(sum(g < -6 for g in part) / 2, 1))
        is_judged = sum(signs) < 0
        gates += [weight if is_judged and g < 0 else 1.0 for g in part]
    return gates


def repair_by_loop(gaps, advantages, size):
    """Value and slope of the repair of one branch's trained tokens, by the published formula with coefficient 1."""
    beta, found = math.sqrt(0.0005), []
    for start in range(0, len(gaps), size):
        part = gaps[start : start + size]
        q = max(-0.03 - sum(part) / len(part), 0)
        q = q if sum(advantages[start : start + size]) > 0 else 0.0
        root = math.sqrt(1 + (q / beta) ** 2)
        found += [(beta**2 * (root - 1), -q / root)] * len(part)
    return found


def far_responses(seed):
    """Five packed responses with gaps of pi' and of pi that reach into the tail; some tokens do not train."""
    rng = random.Random(seed)
    ids = [n for n in range(5) for _ in range(rng.randint(1, 14))]
    mask = [rng.random() > 0.2 for _ in ids]
    mu = [rng.uniform(-1.0, -0.1) for _ in ids]
    old = [m + rng.choice((-7.0, -2.0, -0.6, -0.2, 0.05)) for m in mu]
    pi = [o + rng.gauss(0, 0.1) for o in old]
    signs = [rng.choice((-1.0, 1.0)) for _ in range(5)]
    x = TokenInputs(
        log_probs=torch.tensor(pi, dtype=F64).requires_grad_(),
        rollout_log_probs=torch.tensor(mu, dtype=F64),
        recomputed_log_probs=torch.tensor(old, dtype=F64),
        advantages=torch.tensor([signs[n] for n in ids], dtype=F64),
        loss_mask=torch.tensor(mask),
        sequence_ids=torch.tensor(ids),
    )
    return x, [[i for i, n in enumerate(ids) if n == number and mask[i]] for number in range(5)]


@pytest.mark.parametrize("seed", range(6))
def test_triage_is_that_of_a_loop_over_segments(seed):
    x, rows_of = far_responses(seed)
    weight = triage.gated_ratio(x, recomputed, gate_segment=3)
    value, slope = triage.repair(x, recomputed, repair_segment=4, repair=0.5)
    gates = []
    for rows in rows_of:
        signs = x.advantages[rows].tolist()
        old = (x.recomputed_log_probs - x.rollout_log_probs)[rows].tolist()
        new = (x.log_probs - x.rollout_log_probs)[rows].detach()
        gate = gate_by_loop(old, signs, 3)
        expected = [g * math.exp(r) for g, r in zip(gate, new.tolist(), strict=True)]
        assert weight[rows].tolist() == pytest.approx(expected)
        repaired = repair_by_loop(new.tolist(), signs, 4)
        assert value[rows].tolist() == pytest.approx([0.5 * v for v, _ in repaired])
        assert slope[rows].tolist() == pytest.approx([0.5 * s for _, s in repaired])
        gates += gate
    assert {0.1, 1.0} <= set(gates)


def test_the_repair_s_slope_is_the_derivative_of_its_sum():
    x, _ = far_responses(3)
    log_probs = (x.rollout_log_probs + 0.02 * torch.linspace(-4, 0, len(x.log_probs))).detach()
    at = lambda values: replace(x, log_probs=values)  # noqa: E731
    value = lambda y: triage.repair(y, recomputed, repair_segment=4, repair=1.0)[0]  # noqa: E731
    _, slope = triage.repair(at(log_probs), recomputed, repair_segment=4, repair=1.0)
    assert slope.min() < -0.01
    for i in torch.nonzero(x.loss_mask).flatten().tolist():
        step = torch.zeros_like(log_probs)
        step[i] = 1e-6
        ends = [value(at(log_probs + s * step))[x.loss_mask].sum() for s in (1, -1)]
        assert slope[i].item() == pytest.approx(((ends[0] - ends[1]) / 2e-6).item(), abs=1e-6)


def test_triage_at_its_bounds_by_hand():
    """A segment of two, A < 0: means of -0.5 and -1.5 are in the tier above; a gap of -6 is not yet in the tail."""

    def gate(*gaps, advantage=-1.0):
        mu = torch.full((len(gaps),), -0.25, dtype=F64)
        old = mu + torch.tensor(gaps, dtype=F64)
        x = TokenInputs(
            log_probs=mu, rollout_log_probs=mu, recomputed_log_probs=old,
            advantages=torch.full_like(mu, advantage), loss_mask=torch.ones(len(gaps), dtype=torch.bool),
            sequence_ids=torch.zeros(len(gaps), dtype=torch.int64),
        )  # fmt: skip
        return triage.gated_ratio(x, recomputed, gate_segment=2).tolist()

    assert gate(-0.5, -0.5) == [1.0, 1.0]
    assert gate(-0.75, -0.5) == [pytest.approx(0.3)] * 2
    assert gate(-1.5, -1.5) == [pytest.approx(0.3)] * 2
    assert gate(-2.0, -1.5) == [pytest.approx(0.1)] * 2
    # One in the tail: 0.55; beside +6.5 the mean is 0, and the raised token keeps its weight.
    assert gate(-6.5, 6.5) == [pytest.approx(0.55), 1.0]
    assert gate(-6.0, 6.0) == [1.0, 1.0]
    # A third token is a segment of its own; with A > 0 nothing is gated.
    assert gate(-2.0, -2.0, -0.25) == [pytest.approx(0.1), pytest.approx(0.1), 1.0]
    assert gate(-2.0, -2.0, advantage=1.0) == [1.0, 1.0]


def test_triage_s_repair_reaches_the_loss_and_stops_at_numbers_that_are_none():
    x, _ = far_responses(1)
    repaired_rows = triage.repair(x, recomputed, repair_segment=128, repair=2.0)[1] != 0
    raised = torch.nonzero(x.loss_mask & repaired_rows)[0]
    log_probs = x.log_probs.detach().clone()
    log_probs[raised] = x.recomputed_log_probs[raised] + 0.5
    x = replace(x, log_probs=log_probs.requires_grad_())
    plain = policy_loss(build_algorithm("triage", {"repair": 0.0}), x)
    repaired = policy_loss(build_algorithm("triage", {"repair": 2.0}), x)
    value, slope = triage.repair(x, recomputed, repair_segment=128, repair=2.0)
    counted = x.loss_mask
    assert repaired.metrics.values()["loss/penalty"] == pytest.approx(float(value[counted].sum()))
    assert float(value[counted].sum()) > 0
    slopes = [
        torch.autograd.grad(sums.loss, x.log_probs, retain_graph=True)[0]
        for sums in (plain, repaired)
    ]
    torch.testing.assert_close(slopes[1] - slopes[0], torch.where(counted, slope, 0.0))
    # The clip blocks the raised token, and its segment is still repaired.
    assert plain.blocked[raised].all()
    assert slopes[1][raised].all()
    lost = x.rollout_log_probs.clone()
    lost[torch.nonzero(counted)[0]] = -math.inf
    sums = policy_loss(build_algorithm("triage"), replace(x, rollout_log_probs=lost))
    assert sums.loss.isfinite()
    assert torch.autograd.grad(sums.loss, x.log_probs)[0].isfinite().all()
