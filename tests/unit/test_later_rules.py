"""Rules of other papers than DPPO's: values worked by hand, and references in float64 that loop over responses."""

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


def trains(name, x, **options):
    return decide(build_algorithm(name, options), x).trains.tolist()


def weights(name, x, **options):
    return decide(build_algorithm(name, options), x).capped


# --- rules that look at one token


def test_kpop_does_not_read_digits_that_an_engine_has_not():
    """In float32, log mu = 0 stands for any mu above 1 - 3e-8. Probabilities are cut to [1e-6, 1 - 1e-6], so with
    pi = .9985 the KL is .0095 nats, not infinite."""
    x = inputs([0.9985, 0.008], [0.5, 1e-8], [1.0, -1.0], dtype=torch.float32)
    x = replace(x, rollout_log_probs=torch.tensor([0.0, math.log(1e-8)]))
    found = divergence.binary_kl_both_ways(x.log_probs, x.rollout_log_probs)
    by_hand = [
        0.9985 * math.log(0.9985) + 0.0015 * math.log(0.0015 / 1e-6),
        0.008 * math.log(0.008 / 1e-6) + 0.992 * math.log(0.992),
    ]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-3)
    assert trains("kpop", x) == [True, True]


def test_a_recomputed_policy_is_compared_with_itself_whatever_mu_says():
    """pi = pi' = (.9, .05, .05), and mu = .5 at the sampled token. The divergence of pi from pi' is 0 for any mu."""
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
        distance = rules.measure_divergence(algorithm.preset.divergence, x, algorithm.anchor)
        assert distance.tolist() == pytest.approx([0.0], abs=1e-6)
        moved = replace(x, log_probs=torch.tensor([0.901]).log())
        assert trains(name, moved) == [True]
    # With the rollout as the anchor, mu counts in the same columns.
    assert float(rules.measure_divergence("topk_kl", x, rollout)) > 0.5


def test_bellman_weight_and_clip_by_hand():
    # (1.1 - mu) / (1.1 - pi) = 0.6 / 0.35, 0.6 / 0.85, 0.2 / 1.0, and 1.0 / 0.15 cut to 3
    x = inputs([0.75, 0.25, 0.1, 0.95], [0.5, 0.5, 0.9, 0.1], [-1.0, 1.0, 1.0, -1.0])
    assert weights("bpo", x).tolist() == pytest.approx([0.6 / 0.35, 0.6 / 0.85, 0.2, 3.0])
    # With -A every step leads outward, and every weight is beyond its bound: 1.28 if -A > 0, 0.8 if -A < 0.
    assert trains("bpo", replace(x, advantages=-x.advantages)) == [False, False, False, False]
    assert trains("bpo", x) == [True] * 4
    # The ratio of this rare token is 40, but its weight is near 1.
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
    assert trains("dppo-symmetric", x, tv_threshold=0.25 - 1e-9) == [False, False, False, True]
    assert trains("dppo-symmetric", x, tv_threshold=0.25 + 1e-9) == [True] * 4


def test_kpop_takes_the_larger_kl_whatever_the_sign():
    # mu = .5, pi = .1: KL(mu || pi) = .5 log 5 + .5 log(5 / 9) = .5108, KL(pi || mu) = .1 log .2 + .9 log 1.8 = .3681
    larger = 0.5 * math.log(5) + 0.5 * math.log(5 / 9)
    for pi, mu in ((0.1, 0.5), (0.5, 0.1)):
        x = inputs([pi, pi], [mu, mu], [1.0, -1.0])
        found = divergence.binary_kl_both_ways(x.log_probs, x.rollout_log_probs)
        assert found.tolist() == pytest.approx([larger, larger])
        assert trains("kpop", x, kl_threshold=larger * (1 + 1e-9)) == [True, True]
        assert trains("kpop", x, kl_threshold=larger * (1 - 1e-9)) == [False, False]


def test_the_soft_gate_is_the_derivative_of_its_published_loss():
    x = inputs([0.75, 0.25, 0.5, 0.3], [0.5, 0.5, 0.5, 0.1], [1.0, -2.0, 0.5, -1.0])
    tau = torch.tensor([1.0, 1.05, 1.0, 1.05], dtype=F64)
    ratio = (x.log_probs - x.rollout_log_probs).exp()
    published = -(x.advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))).sum()
    (expected,) = torch.autograd.grad(published, x.log_probs)
    (found,) = torch.autograd.grad(policy_loss(build_algorithm("sapo"), x).loss, x.log_probs)
    torch.testing.assert_close(found, expected)
    assert weights("sapo", x)[2] == 1  # r = 1


def whole_topk(pi, mu, sampled):
    """Return Top-K tensors [1, V + 1] of the whole vocabulary. The sampled token's own column is not valid."""
    log = lambda p: torch.tensor([[*p, p[sampled]]], dtype=F64).log()  # noqa: E731
    return log(pi), log(mu), torch.tensor([[True] * len(pi) + [False]])


def topk_inputs(pi, mu, sampled, advantage):
    names = ("topk_log_probs", "rollout_topk_log_probs", "topk_valid")
    topk = dict(zip(names, whole_topk(pi, mu, sampled), strict=True))
    squares = torch.tensor([sum(p * p for p in pi)], dtype=F64)
    more = {"tail_ids": torch.zeros(1, dtype=torch.int64), "sum_squares": squares}
    return inputs([pi[sampled]], [mu[sampled]], [advantage], **topk, **more)


PI, MU = [0.21, 0.75, 0.04], [0.20, 0.50, 0.30]


@pytest.mark.parametrize("name", ["pdm-aggregated", "pdm-uniform", "pdm-tail", "pdm-exact"])
def test_predictive_mask_asks_where_the_kl_goes_not_where_the_ratio_does(name):
    """The KL is .39 and r is 1.05, but a step that raises token 0 lowers the KL: its predicted change is
    G = .01 - .0021 - .1875 + .0104 = -.1692."""
    change = divergence.topk_kl_change(*whole_topk(PI, MU, 0))
    assert change.tolist() == pytest.approx([-0.1692])
    assert divergence.topk_kl(*whole_topk(PI, MU, 0)).item() == pytest.approx(0.391980, abs=1e-6)
    for advantage, is_blocked in ((1.0, False), (-1.0, True)):
        x = topk_inputs(PI, MU, 0, advantage)
        assert trains(name, x) == [not is_blocked]
        assert trains("dppo-topk-kl", x) == [is_blocked]
        assert trains(name, x, kl_threshold=0.392) == [True]


def test_the_predicted_change_is_the_derivative_of_the_kl_along_the_step():
    g = torch.Generator().manual_seed(5)
    for sampled in range(6):
        logits, mu = torch.randn(2, 6, generator=g, dtype=F64)
        mu, pi = mu.softmax(-1), logits.softmax(-1)
        step = torch.nn.functional.one_hot(torch.tensor(sampled), 6) - pi
        kl = lambda t: (mu * (mu.log() - (logits + t * step).log_softmax(-1))).sum()  # noqa: E731, B023
        zero, one = torch.tensor([0.0, 1.0], dtype=F64)
        expected = torch.autograd.functional.jvp(kl, zero, one)[1]
        found = divergence.topk_kl_change(*whole_topk(pi.tolist(), mu.tolist(), sampled))
        assert found.item() == pytest.approx(expected.item())


def test_the_tail_is_one_token_or_many():
    # TopK(mu) has only the sampled token, with mu = .5 and pi = .3. The rest has pi = .7 and mu = .5. As one token it
    # adds .7 (.5 - .7) = -.14, as four equal tokens a fourth of that.
    pi, mu = torch.tensor([[0.3, 0.3]], dtype=F64), torch.tensor([[0.5, 0.5]], dtype=F64)
    topk = (pi.log(), mu.log(), torch.tensor([[True, False]]))
    inside = -0.2 + 0.3 * 0.2
    assert divergence.topk_kl_change(*topk).item() == pytest.approx(inside - 0.14)
    tail = torch.tensor([4])
    assert divergence.topk_kl_change(*topk, tail_ids=tail).item() == pytest.approx(inside - 0.035)
    # With pi = .4 and .3 in the rest, and mu / pi = 5 / 7 for both, the rest adds (5 / 7 - 1)(.16 + .09).
    squares = torch.tensor([0.09 + 0.16 + 0.09], dtype=F64)
    change = divergence.topk_kl_change(*topk, sum_squares=squares)
    assert change.item() == pytest.approx(inside - 2 / 7 * 0.25)
    # With the sum .09 + .49 one token has the whole rest. Larger sums count as this one, sums below .09 as .09.
    for sum_of_squares, share in ((0.09 + 0.49, 1), (0.7, 1), (0.05, 0)):
        squares = torch.tensor([sum_of_squares], dtype=F64)
        change = divergence.topk_kl_change(*topk, sum_squares=squares)
        assert change.item() == pytest.approx(inside - 0.14 * share)


def test_a_proportional_tail_is_exact_where_it_is_one_and_better_than_one_token_or_many():
    g = torch.Generator().manual_seed(8)
    pi = torch.randn(50, 40, generator=g, dtype=F64).mul(2).softmax(-1)
    mu = torch.randn(50, 40, generator=g, dtype=F64).mul(0.3).exp() * pi
    mu[:, 6:] = pi[:, 6:] * 0.8  # mu / pi is equal in the whole tail
    mu /= mu.sum(-1, keepdim=True)
    exact = pi[:, 0] - mu[:, 0] + (pi * (mu - pi)).sum(-1)
    columns = [0, 1, 2, 3, 4, 5, 0]  # the sampled token is the first of TopK(mu)
    valid = torch.tensor([[True] * 6 + [False]]).expand(50, 7)
    topk = pi[:, columns].log(), mu[:, columns].log(), valid
    found = divergence.topk_kl_change(*topk, sum_squares=pi.square().sum(-1))
    torch.testing.assert_close(found, exact)
    ids = torch.full((50,), 34)
    one_token = divergence.topk_kl_change(*topk)
    many_tokens = divergence.topk_kl_change(*topk, tail_ids=ids)
    for estimate in (one_token, many_tokens):
        assert (estimate - exact).abs().mean() > 1e-3


def test_a_uniform_tail_needs_its_size_which_the_statistics_know():
    x = replace(topk_inputs(PI, MU, 0, 1.0), tail_ids=None)
    with pytest.raises(ValueError, match=mentioning("tail_ids")):
        trains("pdm-uniform", x)
    with pytest.raises(ValueError, match=mentioning("sum_squares")):
        trains("pdm-tail", replace(x, sum_squares=None))
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
    """Return the inputs of one response with mu = .2, pi = .2 + ``distances`` and A > 0: every step leads outward."""
    count = len(distances)
    ids = torch.zeros(count, dtype=torch.int64)
    return inputs([0.2 + d for d in distances], [0.2] * count, [1.0] * count, sequence_ids=ids)


def test_cppo_blocks_a_steady_drift_that_dppo_keeps():
    x = all_outward([0.10] * 100)
    assert trains("dppo-binary-tv", x) == [True] * 100
    assert trains("cppo-binary-tv", x) == [True] + [False] * 99
    fixed = {"budget_low": 0.015, "budget_high": 0.015}  # the budget for post-trained models
    assert trains("cppo-binary-tv", x, **fixed) == [True] + [False] * 99


def test_cppo_of_the_binary_kl_by_hand():
    # KL(.2 || .3) = .2 log(2 / 3) + .8 log(8 / 7) = .02573 is below d = .05. b is cut to .0032, and w is near 1. So the
    # second token's bound is .05 + .0032 - .0257 = .0275, and the third's is .05 + .0064 - .0513 = .0051.
    x = all_outward([0.10] * 100)
    assert trains("dppo-binary-kl", x) == [True] * 100
    assert trains("cppo-binary-kl", x) == [True, True] + [False] * 98
    exact = 0.2 * math.log(2 / 3) + 0.8 * math.log(8 / 7)
    for threshold, first in ((exact * (1 + 1e-9), True), (exact * (1 - 1e-9), False)):
        assert trains("cppo-binary-kl", x, kl_threshold=threshold)[:2] == [first, False]


def test_cppo_keeps_a_late_step_that_dppo_blocks():
    x = all_outward([0.0] * 99 + [0.17])
    assert trains("dppo-binary-tv", x)[-1] is False
    assert trains("cppo-binary-tv", x) == [True] * 100
    # The last token has the weight 0.8, and 0.8 * 0.1875 is the threshold 0.15.
    for late, expected in ((0.1874, True), (0.1876, False)):
        assert trains("cppo-binary-tv", all_outward([0.0] * 99 + [late]))[-1] is expected


def test_cppo_counts_what_it_blocks_and_what_leads_back():
    # d = .15, b = .04, w = 1, .9, .8. The 2nd token spends .9 * .11 = .099, and its bound is .15 + .04 - .1 = .09. The
    # 3rd spends .08. Its bound is .15 + .04 * 1.9 - .199 = .027, also if the 2nd is blocked or leads back to mu. If the
    # 2nd spends nothing, the 3rd token's bound is .126.
    def middle(distance, advantage):
        advantages = torch.tensor([1.0, advantage, 1.0], dtype=F64)
        return replace(all_outward([0.1, distance, 0.1]), advantages=advantages)

    assert trains("cppo-binary-tv", middle(0.11, 1.0)) == [True, False, False]
    assert trains("cppo-binary-tv", middle(0.11, -1.0)) == [True, True, False]
    assert trains("cppo-binary-tv", middle(0.0, 1.0)) == [True, True, True]


def test_cppos_budget_is_the_90th_percentile_of_the_response():
    # b is the tenth of the eleven distances in order, .03. The third token's bound is .0501 + 2 * .03 - .06 > .03.
    x = all_outward([0.05, 0.01, 0.03] + [0.01] * 8)
    numbers = {"tv_threshold": 0.0501, "weight_min": 1.0, "budget_low": 0.0}
    assert trains("cppo-binary-tv", x, **numbers, budget_high=1.0)[:3] == [True] * 3
    assert trains("cppo-binary-tv", x, **numbers, budget_high=0.01)[:3] == [True, True, False]


def test_rules_of_whole_responses_train_exactly_at_their_bounds():
    # On policy every ratio is 1, and every drift, k2 and k3 is 0. The bounds allow these values and no others.
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
    # Two responses of one token have log r = log .5 and log 2. If A > 0 the second is cut to 0.15, if A < 0 the first
    # is cut to -0.15, and if A = 0 neither is cut.
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
    assert trains("cppo-binary-tv", x, tv_threshold=float(distance[0]), **numbers)[0] is True
    # The first token spends .4 of .05, so no further step may lead outward. With r = 1 or A = 0 a step leads nowhere.
    for second, advantage, expected in ((0.0, 1.0, True), (0.3, 0.0, True), (0.3, 1.0, False)):
        y = replace(
            all_outward([0.4, second]), advantages=torch.tensor([1.0, advantage], dtype=F64)
        )
        assert trains("cppo-binary-tv", y, tv_threshold=0.05, **numbers) == [False, expected]
    # log r = 3.2 is outward, too.
    rare = inputs([0.5], [0.02], [1.0], sequence_ids=torch.tensor([0]))
    assert trains("cppo-binary-tv", rare, tv_threshold=0.05, **numbers) == [False]


def test_cppos_budget_is_not_the_largest_of_the_response():
    # b is the tenth of the eleven distances in order, .02. The second token's bound is .0801 + .02 - .09 < .02.
    x = all_outward([0.09, 0.02] + [0.01] * 9)
    numbers = {"tv_threshold": 0.0801, "weight_min": 1.0, "budget_low": 0.0, "budget_high": 1.0}
    assert trains("cppo-binary-tv", x, **numbers)[:2] == [False, False]
    assert trains("cppo-binary-tv", x, **{**numbers, "budget_low": 0.09})[:2] == [False, True]


def cppo_by_loop(distances, outward, d, low, high, weight_min):
    """Return which tokens of one response train, in plain Python."""
    count = len(distances)
    ordered = sorted(distances)
    place = 0.9 * (count - 1)
    under = ordered[math.floor(place)]
    over = ordered[min(math.floor(place) + 1, count - 1)]
    budget = min(max(under + (place - math.floor(place)) * (over - under), low), high)
    spent = weights_before = 0.0
    decisions = []
    for t in range(count):
        w = 1 - (1 - weight_min) * t / max(count - 1, 1)
        z = w * distances[t]
        decisions.append(not outward[t] or z <= min(d, d + budget * weights_before - spent))
        spent, weights_before = spent + z, weights_before + w
    return decisions


def responses(seed, count=5, longest=14):
    """Return the inputs of packed responses and their prompts, pi, mu, and (rows, advantage) of each response."""
    rng, rows_and_advantages, ids, mask = random.Random(seed), [], [], []
    for number in range(count):
        for is_response, length in ((False, rng.randint(0, 3)), (True, rng.randint(1, longest))):
            for _ in range(length):
                # Some tokens of a response do not train.
                mask.append(is_response and rng.random() > 0.15)
                ids.append(number)
    advantages = [rng.choice((-1.0, 1.0)) for _ in range(count)]
    pi = [rng.uniform(0.05, 0.6) for _ in ids]
    mu = [min(max(p + rng.gauss(0, 0.06), 0.01), 0.9) for p in pi]
    for number in range(count):
        rows = [i for i, n in enumerate(ids) if n == number and mask[i]]
        rows_and_advantages.append((rows, advantages[number]))
    x = inputs(
        pi, mu, [advantages[n] for n in ids], loss_mask=mask, sequence_ids=torch.tensor(ids),
        recomputed=[min(max(q + rng.gauss(0, 0.04), 0.01), 0.9) for q in mu],
    )  # fmt: skip
    return x, pi, mu, rows_and_advantages


@pytest.mark.parametrize("seed", range(8))
def test_sequence_rules_are_those_of_a_loop_over_responses(seed):
    x, pi, mu, rows_and_advantages = responses(seed)
    numbers = {"tv_threshold": 0.08, "budget_low": 0.02, "budget_high": 0.04, "weight_min": 0.8}
    cppo = trains("cppo-binary-tv", x, **numbers)
    kl_numbers = {"kl_threshold": 0.01, "budget_low": 0.001, "budget_high": 0.004}
    cppo_kl = trains("cppo-binary-kl", x, **kl_numbers)
    gmpo_weights = weights("gmpo", x, log_clip=0.15)
    gmpo_trains = trains("gmpo", x, log_clip=0.15)
    minpro = weights("minpro", x)
    largest, mean = trains("trm-max", x, largest_k2=0.1), trains("trm-mean", x, mean_k3=0.03)
    geometric = trains("geometric-mask", x, sequence_low=0.9, sequence_high=1.1)
    vaco = trains("vaco", x, largest_shift=0.15)
    drifted = trains("off-policy-sequence-mask", x, drift_threshold=0.02)
    for rows, a in rows_and_advantages:
        logs = [math.log(pi[i] / mu[i]) for i in rows]
        gaps = [abs(pi[i] - mu[i]) for i in rows]
        outward = [a * value > 0 for value in logs]
        loop = cppo_by_loop(gaps, outward, 0.08, 0.02, 0.04, 0.8) if rows else []
        assert [cppo[i] for i in rows] == loop
        pairs = [(pi[i], mu[i]) for i in rows]
        kls = [q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) for p, q in pairs]
        loop = cppo_by_loop(kls, outward, 0.01, 0.001, 0.004, 0.8) if rows else []
        assert [cppo_kl[i] for i in rows] == loop
        if not rows:
            continue
        average = lambda values: sum(values) / len(rows)  # noqa: E731, B023
        cut = [min(v, 0.15) if a > 0 else max(v, -0.15) for v in logs]
        assert gmpo_weights[rows].tolist() == pytest.approx([math.exp(average(cut))] * len(rows))
        assert [gmpo_trains[i] for i in rows] == [a * v <= 0.15 for v in logs]
        # The lowest ratio before each token.
        lowest = [min([math.exp(v) for v in logs[:t]], default=1.0) for t in range(len(rows))]
        expected = [min(math.exp(v) * low, 5) for v, low in zip(logs, lowest, strict=True)]
        assert minpro[rows].tolist() == pytest.approx(expected)
        # These rules train or block the whole response.
        decisions = {
            "max": (largest, max(v * v / 2 for v in logs) <= 0.1),
            "mean": (mean, average([math.expm1(v) - v for v in logs]) <= 0.03),
            "drift": (drifted, a >= 0 or -average(logs) <= 0.02),
        }
        for name, (found, loop) in decisions.items():
            assert [found[i] for i in rows] == [loop] * len(rows), name
        old = [math.exp(x.recomputed_log_probs[i]) for i in rows]
        mismatch = [math.log(p / mu[i]) for p, i in zip(old, rows, strict=True)]
        ratios = [pi[i] / p for p, i in zip(old, rows, strict=True)]
        clipped = [r > 1.2 if a > 0 else r < 0.8 for r in ratios]
        is_in_band = 0.9 <= math.exp(average(mismatch)) <= 1.1
        assert [geometric[i] for i in rows] == [is_in_band and not c for c in clipped]
        is_near = average([abs(math.expm1(m)) for m in mismatch]) <= 0.15
        loop = [(is_near or a * m <= 0) and not c for m, c in zip(mismatch, clipped, strict=True)]
        assert [vaco[i] for i in rows] == loop


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
        for name, numbers in options.items():
            decisions = torch.tensor(trains(name, x, **numbers))[x.loss_mask]
            found.setdefault(name, []).append(decisions)
    for name, parts in found.items():
        assert 0.1 < float(torch.cat(parts).double().mean()) < 0.95, name


@pytest.mark.parametrize("name", ["cppo-binary-tv", "minpro", "gmpo", "trm-mean"])
def test_a_responses_numbers_do_not_depend_on_what_it_is_packed_with(name):
    """The numbers are equal bit by bit: the order in which a response's tokens are added up is that of the response."""
    x, *_, rows_and_advantages = responses(3)
    algorithm = build_algorithm(name)
    whole = decide(algorithm, x)
    for number in range(len(rows_and_advantages)):
        rows = torch.nonzero(x.sequence_ids == number).flatten()
        fields = {f: getattr(x, f) for f in x.__dataclass_fields__}
        response = {f: None if v is None else v[rows] for f, v in fields.items()}
        response["sequence_ids"] = torch.zeros_like(rows)
        found = decide(algorithm, TokenInputs(**response))
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
    assert trains("cppo-binary-tv", x) == [True]


def test_cppo_of_topk_counts_what_the_sampled_token_does_not_show():
    # At each token the binary TV is .05, and the Top-K TV is .3.
    topk = {
        "topk_log_probs": torch.tensor([[0.3, 0.15]], dtype=F64).log().expand(4, 2),
        "rollout_topk_log_probs": torch.tensor([[0.6, 0.1]], dtype=F64).log().expand(4, 2),
        "topk_valid": torch.ones(4, 2, dtype=torch.bool),
    }
    ids = torch.zeros(4, dtype=torch.int64)
    x = inputs([0.15] * 4, [0.1] * 4, [1.0] * 4, sequence_ids=ids, **topk)
    assert trains("cppo-topk-tv", x) == [False] * 4
    assert trains("cppo-topk-tv", x, tv_threshold=0.31) == [True, False, False, False]
    # The Top-K KL is .6 log 2 + .1 log(2 / 3) + .3 log(6 / 11) = .1935, and the binary KL is .0109.
    assert trains("cppo-binary-kl", x)[0] is True
    assert trains("cppo-topk-kl", x) == [False] * 4
    assert trains("cppo-topk-kl", x, kl_threshold=0.194) == [True, False, False, False]


# --- rules that look at an optimiser step


def cut_by_sorting(values, limit):
    """Return how many of the smallest values have a mean of at most ``limit``. Equal values all count, or none does."""
    ordered, count_within = sorted(values), 0
    for count in range(1, len(ordered) + 1):
        is_last_of_equals = count == len(ordered) or ordered[count] != ordered[count - 1]
        if is_last_of_equals and sum(ordered[:count]) <= limit * count:
            count_within = count
    return count_within


def level_by_sorting(values, limit):
    """Return the level c for which the mean of min(value, c) is ``limit``; inf if the values' mean is not above it."""
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
ONE_REPLICA = lambda values: values  # noqa: E731
"""The sum over the replicas if there is only one."""


@pytest.mark.parametrize("limit", [1e-6, 0.01, 0.04, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_cut_of_the_outward_moment_is_the_level_of_a_sorted_list(seed, limit):
    g = torch.Generator().manual_seed(seed)
    log_ratio = 0.4 * torch.randn(200, generator=g)
    outward = [v * v for v, a in zip(log_ratio.tolist(), SIGNS.tolist(), strict=True) if a * v > 0]
    cut = step_rules.outward_moment_cut(log_ratio, SIGNS, ONE_REPLICA, second_moment=limit)
    assert cut == pytest.approx(level_by_sorting(outward, limit), rel=1e-6)
    assert (cut == math.inf) == (limit == 1)
    if cut < math.inf:
        assert sum(min(v, cut) for v in outward) <= limit * len(outward)
    # Tokens that lead back to mu, or whose A is 0, count neither in the sum nor in the number of tokens.
    back = log_ratio.clone()
    back[SIGNS * log_ratio <= 0] *= 50
    assert step_rules.outward_moment_cut(back, SIGNS, ONE_REPLICA, second_moment=limit) == cut
    none = torch.zeros_like(SIGNS)
    assert (
        step_rules.outward_moment_cut(log_ratio, none, ONE_REPLICA, second_moment=limit) == math.inf
    )


def test_m2po_by_hand_is_a_clip_of_what_leads_outward():
    """log r = .1, -.3, .5, -.4, .6 with A = 1, -1, 1, 1, -1: the first three lead outward, with (log r)^2 = .01, .09
    and .25. With a budget of .04 the level c solves .01 + c + c = 3 * .04: c = .055, so .09 and .25 are blocked."""
    log_ratio = torch.tensor([0.1, -0.3, 0.5, -0.4, 0.6], dtype=F64)
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=F64)
    cut = step_rules.outward_moment_cut(log_ratio, advantages, ONE_REPLICA, second_moment=0.04)
    assert cut == pytest.approx(0.055, rel=1e-6)
    # A budget just above the mean of the three, .35 / 3, blocks none of them.
    enough = step_rules.outward_moment_cut(
        log_ratio, advantages, ONE_REPLICA, second_moment=0.35 / 3 + 1e-6
    )
    assert enough == math.inf
    x = inputs((0.2 * log_ratio.exp()).tolist(), [0.2] * 5, advantages.tolist())
    at = lambda bound: replace(x, step_bound=torch.full((5,), bound, dtype=F64))  # noqa: E731
    assert trains("m2po", at(cut)) == [True, False, False, True, True]
    # The same as PPO's clip at e^-sqrt(c) and e^sqrt(c).
    clip = {"clip_low": 1 - math.exp(-math.sqrt(cut)), "clip_high": math.expm1(math.sqrt(cut))}
    assert trains("grpo", x, **clip) == trains("m2po", at(cut))
    assert trains("m2po-areal", at(cut)) == [True, False, False, False, False]
    # Exactly at its cut a token trains.
    exact = float((x.log_probs.detach() - x.rollout_log_probs)[1].square())
    assert trains("m2po", at(exact))[1] is True
    assert trains("m2po", at(exact * (1 - 1e-12)))[1] is False


@pytest.mark.parametrize("limit", [1e-6, 0.01, 0.04, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_cut_of_the_second_moment_is_that_of_a_sorted_list(seed, limit):
    g = torch.Generator().manual_seed(seed)
    log_ratio = 0.4 * torch.randn(200, generator=g)
    log_ratio[:20] = log_ratio[20:40]  # equal values
    cut = step_rules.second_moment_cut(log_ratio, SIGNS, ONE_REPLICA, second_moment=limit)
    values = log_ratio.square().double()
    count_within = cut_by_sorting(values.tolist(), limit)
    assert int((values <= cut).sum()) == count_within
    if 0 < count_within < 200:
        below, above = values.sort().values[count_within - 1 : count_within + 1].tolist()
        assert cut == pytest.approx((below + above) / 2, abs=1e-3 * (above - below))
    assert (count_within == 200) == (cut == math.inf) == (limit == 1)


def test_a_step_by_hand_as_areal_reads_it():
    # (log r)^2 = .01, .04, .25, .01: the mean of all four is .0775, the mean of the three smallest is .02.
    log_ratio = torch.tensor([0.1, -0.2, 0.5, -0.1], dtype=F64)
    found = [
        step_rules.second_moment_cut(log_ratio, SIGNS[:4], ONE_REPLICA, second_moment=limit)
        for limit in (0.05, 0.015, 0.0776)
    ]
    assert 0.04 < found[0] < 0.25
    assert 0.01 < found[1] < 0.04
    assert found[2] == math.inf
    x = inputs((0.2 * log_ratio.exp()).tolist(), [0.2] * 4, [1.0, 1.0, 1.0, -1.0])
    bounded = replace(x, step_bound=torch.full((4,), 0.1, dtype=F64))
    assert trains("m2po-areal", bounded) == [True, True, False, True]
    for name in ("m2po", "m2po-areal"):
        with pytest.raises(ValueError, match="step_bound"):
            trains(name, x)


def test_what_engine_and_trainer_disagree_on_blocks_a_response_whatever_pi_has_become():
    """Two responses of two tokens: pi' / mu is 1.02 and 1.02 in the first, 1.02 and 1 / 1.02 in the second. pi is 1.1
    pi'."""
    old, mu = [0.51, 0.51, 0.51, 0.5], [0.5, 0.5, 0.5, 0.51]
    ids = torch.tensor([0, 0, 1, 1])
    pi = [1.1 * p for p in old]
    x = inputs(pi, mu, [1.0] * 4, recomputed=old, sequence_ids=ids)
    assert trains("geometric-mask", x) == [False, False, True, True]
    # The means of |rho - 1| are .02 and (.02 + .0196) / 2 = .0198. With A > 0, rho < 1 leads back.
    assert trains("vaco", x, largest_shift=0.0199) == [False, False, True, True]
    assert trains("vaco", x, largest_shift=0.0197) == [False, False, False, True]
    falling = replace(x, advantages=-x.advantages)
    assert trains("vaco", falling, largest_shift=0.0197) == [True, True, True, False]
    # Both rules also have PPO's clip of pi / pi', which is now 1.21.
    further = replace(x, log_probs=x.log_probs.detach() + math.log(1.1))
    for name in ("geometric-mask", "vaco"):
        assert trains(name, further) == [False] * 4


@pytest.mark.parametrize("name", ["m2po", "m2po-areal"])
def test_a_bound_does_not_depend_on_which_replica_has_which_tokens(name):
    """Three threads stand for replicas that sum with each other. The third has no token. All find the bound that one
    replica with all tokens finds."""
    g = torch.Generator().manual_seed(2)
    log_ratio = 0.3 * torch.randn(90, generator=g)
    advantages = torch.randn(90, generator=g)
    step_bound = build_algorithm(name).step_bound
    expected = step_bound(log_ratio, advantages, ONE_REPLICA)
    assert 0 < expected < math.inf
    ratio_parts = [log_ratio[:33], log_ratio[33:], log_ratio[:0]]
    advantage_parts = [advantages[:33], advantages[33:], advantages[:0]]
    barrier = threading.Barrier(3)
    shared = [torch.empty(0)] * 3

    def find_bound(rank):
        def total(values):
            shared[rank] = values
            barrier.wait(timeout=30)
            whole = torch.stack(shared).sum(0)
            barrier.wait(timeout=30)
            return whole

        return step_bound(ratio_parts[rank], advantage_parts[rank], total)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(find_bound, range(3))) == [expected] * 3


# --- score centering


def centered_inputs(logits, mu_logits, sampled, k, advantages):
    """Return inputs of T tokens with K ids of TopK(mu) and the sampled id. They pass gradients to ``logits`` [T, V]."""
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
    """Return the exact mean, over the tokens that mu samples, of the loss's gradient by the logits with A = 1.

    Every id of the vocabulary is one token of the batch, and its weight, mu, has the place of its advantage.
    """
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
    """TopK(mu) has the whole vocabulary here. Truncated importance sampling without centering has another mean."""
    pi, mu = two_policies(seed)
    centered = expected_gradient(pi, mu, 7, ratio_cap=ratio_cap)
    torch.testing.assert_close(centered, torch.zeros_like(mu), rtol=0, atol=1e-14)
    assert expected_gradient(pi, mu, 7, "pg-tis", ratio_cap=ratio_cap).norm() > 0.01


def test_a_centered_score_has_the_mean_zero_where_the_tail_is_proportional():
    """K is 3 of 7 ids. At the other four mu is 1.7 times pi, up to normalisation."""
    pi, mu = two_policies(8)
    rare = mu.topk(4, largest=False).indices
    with torch.no_grad():
        # The - 4 keeps all four below the other ids in mu.
        mu[rare] = pi.detach()[rare] - pi.detach().logsumexp(0) - 4 + math.log(1.7)
    gradient = expected_gradient(pi, mu, 3, ratio_cap=0.8)
    torch.testing.assert_close(gradient, torch.zeros_like(mu), rtol=0, atol=1e-14)


def test_centering_by_hand():
    # mu = (.5, .3 | .2), pi = (.6, .1 | .3), rho = .2 / .3 = 2/3.
    # C = 2: min(1, C rho) = 1, and c = (min(.6, 1) - .6, min(.1, .6) - .1) = (0, 0).
    # C = 1: min(1, C rho) = 2/3, and c = (.5 - .6 2/3, .1 - .1 2/3).
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
    """Centering moves two tokens. The second is blocked because its log mu is -inf, or it is outside the loss mask."""
    pi, mu = two_policies(6)
    x = centered_inputs(
        pi.expand(2, -1), mu.expand(2, -1), torch.tensor([1, 1]), 3, torch.ones(2, dtype=F64)
    )
    algorithm = build_algorithm("score-centering", {"ratio_cap": 0.5})
    (twice,) = torch.autograd.grad(policy_loss(algorithm, x).loss, pi, retain_graph=True)
    once = twice / 2
    topk = rules.centering(x, 0.5)
    assert (topk.abs().sum(-1) > 0.01).all()
    mask = torch.tensor([True, False])
    with_infinity = x.rollout_log_probs.clone()
    with_infinity[1] = -math.inf
    for blocked in (replace(x, loss_mask=mask), replace(x, rollout_log_probs=with_infinity)):
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
    """Return the gates of one branch's trained tokens, in plain Python."""
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
    """Return (value, slope) of the repair term at one branch's trained tokens, by the published formula."""
    beta, found = math.sqrt(0.0005), []
    for start in range(0, len(gaps), size):
        part = gaps[start : start + size]
        q = max(-0.03 - sum(part) / len(part), 0)
        q = q if sum(advantages[start : start + size]) > 0 else 0.0
        root = math.sqrt(1 + (q / beta) ** 2)
        found += [(beta**2 * (root - 1), -q / root)] * len(part)
    return found


def far_responses(seed):
    """Return the inputs of five packed responses, and the rows of each response's trained tokens.

    log pi' - log mu and log pi - log mu reach into the tail. Some tokens do not train.
    """
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
    """Segments have two tokens, and A < 0. Means of exactly -0.5 and -1.5 are in the tier above. A gap of exactly -6 is
    not in the tail."""

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
    # One token in the tail gives 0.55. The mean is 0, and the token whose gap is +6.5 keeps its weight.
    assert gate(-6.5, 6.5) == [pytest.approx(0.55), 1.0]
    assert gate(-6.0, 6.0) == [1.0, 1.0]
    # The third token is a segment of its own. With A > 0 nothing is gated.
    assert gate(-2.0, -2.0, -0.25) == [pytest.approx(0.1), pytest.approx(0.1), 1.0]
    assert gate(-2.0, -2.0, advantage=1.0) == [1.0, 1.0]


@pytest.mark.parametrize("advantages", [(2.0, -1.0), (-2.0, 1.0)])
def test_the_mean_advantage_of_a_segment_decides_about_its_repair(advantages):
    """The two tokens of the segment have advantages of both signs, as with credit by turn. By hand: the mean gap is
    -0.05, so q = 0.02, and the root is sqrt(1 + 0.0004 / 0.0005)."""
    mu = torch.full((2,), -0.25, dtype=F64)
    x = TokenInputs(
        log_probs=mu + torch.tensor([-0.1, 0.0], dtype=F64),
        rollout_log_probs=mu,
        advantages=torch.tensor(advantages, dtype=F64),
        loss_mask=torch.ones(2, dtype=torch.bool),
        sequence_ids=torch.zeros(2, dtype=torch.int64),
    )
    value, slope = triage.repair(x, recomputed, repair_segment=2, repair=1.0)
    is_repaired = float(sum(advantages) > 0)
    root = math.sqrt(1.8)
    assert value.tolist() == pytest.approx([is_repaired * 0.0005 * (root - 1)] * 2)
    assert slope.tolist() == pytest.approx([-is_repaired * 0.02 / root] * 2)


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
    with_infinity = x.rollout_log_probs.clone()
    with_infinity[torch.nonzero(counted)[0]] = -math.inf
    sums = policy_loss(build_algorithm("triage"), replace(x, rollout_log_probs=with_infinity))
    assert sums.loss.isfinite()
    assert torch.autograd.grad(sums.loss, x.log_probs)[0].isfinite().all()
