"""The code keeps the paper's bounds (arXiv 2602.04879), on policies small enough to enumerate: each divergence of the
package in the bounds, and each mask of the table in training.

With two tokens, two steps, the same divergence D in each state and the worst rewards, the bound
|J(pi) - J(mu) - L'| <= 2 xi T (T - 1) D^2 is an equality. A divergence that is too small by any
factor breaks it, one that is too large leaves a gap.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatron_dppo.algorithms import divergence
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.table import PRESETS

pytestmark = pytest.mark.second

F64 = torch.float64


def log_policies(rising: bool):
    """Return log pi and log mu [state, token] of two tokens, with mu = (1/2, 1/2) and |pi - mu| = 0.06."""
    d = 0.06 if rising else -0.06
    mu = torch.full((3, 2), 0.5, dtype=F64)
    return (mu + torch.tensor([d, -d], dtype=F64)).log(), mu.log()


def on_topk(f, k):
    """Return a function that applies ``f`` to ``k`` ids of TopK(mu) and the sampled token, here always token 0."""

    def distance(pi, mu):
        ids = torch.tensor([[1, 0, 0]] if k == 2 else [[0, 0]]).expand(len(pi), -1)
        valid = torch.tensor([[True] * k + [False]]).expand(len(pi), -1)
        return f(pi.gather(1, ids), mu.gather(1, ids), valid)

    return distance


def on_sampled_token(f):
    return lambda pi, mu: f(pi[:, 0], mu[:, 0])


TV = {
    "binary": on_sampled_token(divergence.binary_tv),
    "top-1": on_topk(divergence.topk_tv, 1),
    "top-2": on_topk(divergence.topk_tv, 2),
    "exact": divergence.exact_tv,
}
KL = {
    "binary": on_sampled_token(divergence.binary_kl),
    "top-1": on_topk(divergence.topk_kl, 1),
    "top-2": on_topk(divergence.topk_kl, 2),
    "exact": divergence.exact_kl,
}


def worst_gap(pi, mu):
    """Return the maximum of J(pi) - J(mu) - L' over all rewards |R| <= 1, for responses of two tokens."""
    gaps = []
    for first, second in itertools.product(range(2), repeat=2):
        p_mu = (mu[0, first] + mu[1 + first, second]).exp()
        r = [
            (pi[0, first] - mu[0, first]).exp(),
            (pi[1 + first, second] - mu[1 + first, second]).exp(),
        ]
        gaps.append(p_mu * (r[0] * r[1] - 1 - (r[0] - 1) - (r[1] - 1)))
    return torch.stack(gaps).abs().sum()


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("name", list(TV))
def test_worst_rewards_reach_the_quadratic_bound_of_every_tv(name, rising):
    pi, mu = log_policies(rising)
    d = TV[name](pi, mu).max()
    horizon, gap = 2, worst_gap(pi, mu)
    bound = 2 * horizon * (horizon - 1) * d**2
    assert gap <= bound * (1 + 1e-12)
    torch.testing.assert_close(gap, bound, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("name", list(KL))
def test_worst_rewards_reach_pinskers_bound_of_every_kl_to_second_order(name, rising):
    """TV^2 <= KL / 2 is an equality at mu = 1/2, except for terms of fourth order."""
    pi, mu = log_policies(rising)
    bound = 2 * 2 * KL[name](pi, mu).max() / 2
    assert worst_gap(pi, mu) <= bound
    torch.testing.assert_close(worst_gap(pi, mu), bound, rtol=2 * 0.12**2, atol=0)


@pytest.mark.parametrize("name", list(TV))
def test_the_linear_bound_holds_with_every_tv(name):
    pi, mu = log_policies(True)
    assert worst_gap(pi, mu) <= 4 * 2 * TV[name](pi, mu).max()


def one_state(logit, algorithm_name, mu_rises, direction=1.0):
    """Return two responses of one token each: token 0 and token 1 of one state.

    ``logit``: logit of token 0 minus logit of token 1. ``mu_rises``: mu of token 0.
    """
    step_bound = build_algorithm(algorithm_name).step_bound
    advantages = torch.tensor([1.0, -1.0], dtype=F64) * direction  # 1: token 0 is to rise
    mu = torch.tensor([mu_rises, 1 - mu_rises], dtype=F64).log()
    pi = torch.stack(
        [torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)]
    )
    bound = 0.0 if step_bound is None else step_bound((pi - mu).detach(), advantages, lambda x: x)
    other_token = torch.tensor([[1], [0]])

    def other_and_sampled(x):
        return torch.cat([x[other_token], x[:, None]], 1)

    has_gradient = build_algorithm(algorithm_name).needs_topk_gradient
    return TokenInputs(
        log_probs=pi,
        rollout_log_probs=mu,
        advantages=advantages,
        loss_mask=torch.ones(2, dtype=torch.bool),
        recomputed_log_probs=mu,
        topk_log_probs=other_and_sampled(pi if has_gradient else pi.detach()),
        rollout_topk_log_probs=other_and_sampled(mu),
        topk_valid=torch.ones(2, 2, dtype=torch.bool),
        sequence_ids=torch.arange(2),
        tail_ids=torch.zeros(2, dtype=torch.int64),
        sum_squares=(2 * pi.detach()).exp().sum().expand(2),
        step_bound=torch.full((2,), bound, dtype=F64),
    )


RATE, STEPS = 0.002, 300


def train(name, mu_rises=0.5, direction=1.0, **options):
    """Return pi of token 0 after up to ``STEPS`` steps of plain gradient descent on the expected loss."""
    algorithm = build_algorithm(name, options)
    logit = torch.tensor(math.log(mu_rises / (1 - mu_rises)), dtype=F64, requires_grad=True)
    for _ in range(STEPS):
        x = one_state(logit, name, mu_rises, direction)
        (grad,) = torch.autograd.grad(policy_loss(algorithm, x).loss, logit)
        if grad == 0 or torch.sigmoid(logit) > 0.8:
            break
        logit = (logit - 8 * RATE * grad).detach().requires_grad_()
    return torch.sigmoid(logit).item()


KL_RADIUS = 0.5 * math.sqrt(1 - math.exp(-2 * 0.05))
"""|pi - 1/2| at which KL((1/2, 1/2) || pi) = -log(1 - 4 d^2) / 2 is 0.05."""
RADIUS = {
    # pi' equals mu here, so the mismatch of engine and trainer is 0, and only the clip of pi / pi' acts.
    "ppo": 0.1, "grpo": 0.1, "icepop": 0.1, "geometric-mask": 0.1, "vaco": 0.1,
    # The rising token's r may reach 1.28. The falling token stops before, at r = 0.8.
    **dict.fromkeys(["grpo-clip-higher", "minirl", "minirl-tis", "relax-high", "relax-low",
                     "relax-both", "triage"], 0.14),
    **{name: 0.15 for name in PRESETS if name.endswith("-tv")},
    **{name: KL_RADIUS for name in PRESETS if name.endswith("-kl")},
    "gspo": 2e-4,
    # The falling token's weight passes 0.8 at pi = 0.35. The rising token's has passed 1.28 before, at pi = 0.63125.
    "bpo": 0.15,
    **{name: 0.5 * math.sqrt(1 - math.exp(-2 * 0.15)) for name in PRESETS if name.startswith("pdm")},
    "dppo-symmetric": 0.3,
    "kpop": 0.5 * math.sqrt(1 - math.exp(-2 * 0.1)),
    # The rising token's log r may reach 0.4. The falling token stops nearer to mu, at log r = -0.4.
    "gmpo": 0.5 * math.expm1(0.4),
    # r = 1.3504 has r - 1 - log r = 0.05.
    "trm-mean": 0.1752,
    # The falling token is cut where the mean of both tokens' (log r)^2 passes 0.04. The rising token's log r may reach
    # 0.2, and is cut there.
    "m2po": 0.5 * math.expm1(0.2),
    # The falling token is dropped where the mean of both (log r)^2 passes 0.04. The rising one alone may reach 0.2.
    "m2po-areal": 0.5 * math.expm1(0.2),
    # At p = 1/2 + d, log 2 - H(p) = 0.05. The projection moves nothing beyond.
    "troll": 0.156781,
}  # fmt: skip
"""Where training from mu = (1/2, 1/2) must stop: |pi - mu|, worked by hand from each mask."""
UNCONFINED = [
    "pg-is", "pg-tis", "cispo", "drpo", "mask-0.5", "mask-0.8", "mask-0.5-recompute",
    "sapo", "minpro", "score-centering", "trm-max", "off-policy-sequence-mask",
]  # fmt: skip
BOTH_WAYS = ["dppo-symmetric", "kpop", "trm-max", "trm-mean", "m2po-areal"]
"""Their masks block tokens far from mu also where the update leads back to mu."""


def test_every_preset_is_driven():
    assert sorted([*RADIUS, *UNCONFINED]) == sorted(PRESETS)


@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize("name", list(RADIUS))
def test_training_stops_at_the_edge_of_the_trust_region(name, direction):
    moved = (train(name, direction=direction) - 0.5) * direction
    assert RADIUS[name] <= moved <= RADIUS[name] + 8 * RATE


@pytest.mark.parametrize("name", UNCONFINED)
def test_training_without_a_trust_region_goes_on(name):
    assert train(name) > 0.75


@pytest.mark.parametrize("name", ["dppo-binary-tv", "dppo-topk-tv"])
@pytest.mark.parametrize(("signs", "radius"), [([1.0, 0.0], 0.2), ([0.0, 1.0], 0.05)])
def test_one_sided_thresholds_hold_each_sign(name, signs, radius):
    """Either only token 0 has an advantage, A = 1, or only token 1, A = -1. Both raise token 0."""
    options = {"tv_threshold": 0.2, "tv_threshold_negative": 0.05}
    moved = train(name, direction=torch.tensor(signs), **options) - 0.5
    assert radius <= moved <= radius + 8 * RATE


@pytest.mark.parametrize(("name", "drop"), [("mask-0.5", 0.5), ("mask-0.8", 0.8)])
def test_minimal_masks_stop_the_falling_token_alone(name, drop):
    """mu of the falling token is 0.9. Both tokens train until pi is 0.9 - drop; then only the rising token trains."""
    x = one_state(torch.tensor(0.0, dtype=F64), name, 0.1)
    mask = build_algorithm(name).mask
    for fallen, trains in ((drop - 0.01, True), (drop + 0.01, False)):
        pi = torch.tensor([0.1 + fallen, 0.9 - fallen], dtype=F64).log()
        assert mask(replace(x, log_probs=pi)).tolist() == [True, trains]


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_some_masks_block_the_way_back_too(name):
    x = one_state(torch.tensor(-6.0, dtype=F64), name, 0.5)
    assert policy_loss(build_algorithm(name), x).blocked[0]


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in BOTH_WAYS])
def test_an_update_back_to_the_anchor_is_never_blocked(name):
    """pi is far from mu on the other side: no token is blocked, and the update reduces the distance."""
    logit = torch.tensor(-3.0, dtype=F64, requires_grad=True)  # token 0 has fallen and is to rise
    sums = policy_loss(build_algorithm(name), one_state(logit, name, 0.5))
    assert not sums.blocked.any()
    (grad,) = torch.autograd.grad(sums.loss, logit)
    assert grad < 0


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in BOTH_WAYS])
def test_what_is_blocked_would_have_moved_further_out(name):
    """At each pi and for both signs of A, the update of a blocked token would raise |log pi - log mu|."""
    blocked_tokens = set()
    for at, direction in itertools.product(torch.linspace(-4, 4, 41), (1.0, -1.0)):
        logit = at.double().requires_grad_()
        x = one_state(logit, name, 0.5, direction)
        sums = policy_loss(build_algorithm(name), x)
        for token in torch.nonzero(sums.blocked).flatten().tolist():
            outward = torch.sign(x.log_probs[token] - x.rollout_log_probs[token])
            assert outward == torch.sign(x.advantages[token])
            blocked_tokens.add(token)
    if name in RADIUS and name != "troll":  # troll blocks nothing: it pulls pi back to the edge
        assert blocked_tokens == {0, 1}
