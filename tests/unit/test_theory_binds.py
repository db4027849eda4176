"""The paper's theory (arXiv 2602.04879) holds of the code: each divergence of the package in the
bounds, and each mask of the table in training, on policies small enough to enumerate.

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

F64 = torch.float64


def columns(rising: bool):
    """log pi and log mu [state, token] of two tokens, mu = (1/2, 1/2) and |pi - mu| = 0.06."""
    d = 0.06 if rising else -0.06
    mu = torch.full((3, 2), 0.5, dtype=F64)
    return (mu + torch.tensor([d, -d], dtype=F64)).log(), mu.log()


def topk(f, k):
    """``f`` of TopK(mu) with ``k`` ids and the sampled token, here always token 0."""

    def distance(pi, mu):
        ids = torch.tensor([[1, 0, 0]] if k == 2 else [[0, 0]]).expand(len(pi), -1)
        valid = torch.tensor([[True] * k + [False]]).expand(len(pi), -1)
        return f(pi.gather(1, ids), mu.gather(1, ids), valid)

    return distance


def sampled(f):
    return lambda pi, mu: f(pi[:, 0], mu[:, 0])


TV = {
    "binary": sampled(divergence.binary_tv),
    "top-1": topk(divergence.topk_tv, 1),
    "top-2": topk(divergence.topk_tv, 2),
    "exact": divergence.exact_tv,
}
KL = {
    "binary": sampled(divergence.binary_kl),
    "top-1": topk(divergence.topk_kl, 1),
    "top-2": topk(divergence.topk_kl, 2),
    "exact": divergence.exact_kl,
}


def worst_gap(pi, mu):
    """max over |R| <= 1 of J(pi) - J(mu) - L' for responses of two tokens, and L' there."""
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
    pi, mu = columns(rising)
    d = TV[name](pi, mu).max()
    horizon, gap = 2, worst_gap(pi, mu)
    bound = 2 * horizon * (horizon - 1) * d**2
    assert gap <= bound * (1 + 1e-12)
    torch.testing.assert_close(gap, bound, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("name", list(KL))
def test_worst_rewards_reach_pinskers_bound_of_every_kl_to_second_order(name, rising):
    """TV^2 <= KL / 2 is an equality at mu = 1/2 but for terms of fourth order."""
    pi, mu = columns(rising)
    bound = 2 * 2 * KL[name](pi, mu).max() / 2
    assert worst_gap(pi, mu) <= bound
    torch.testing.assert_close(worst_gap(pi, mu), bound, rtol=2 * 0.12**2, atol=0)


@pytest.mark.parametrize("name", list(TV))
def test_the_linear_bound_holds_with_every_tv(name):
    pi, mu = columns(True)
    assert worst_gap(pi, mu) <= 4 * 2 * TV[name](pi, mu).max()


def one_state(logit, algorithm_name, mu_rises, direction=1.0):
    """Both tokens of a state as one response each: ``logit`` is that of token 0 less that of 1."""
    step_bound = build_algorithm(algorithm_name).step_bound
    advantages = torch.tensor([1.0, -1.0], dtype=F64) * direction  # by 1, token 0 is to rise
    mu = torch.tensor([mu_rises, 1 - mu_rises], dtype=F64).log()
    pi = torch.stack(
        [torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)]
    )
    bound = 0.0 if step_bound is None else step_bound((pi - mu).detach(), advantages, lambda x: x)
    other = torch.tensor([[1], [0]])
    both = lambda x: torch.cat([x[other], x[:, None]], 1)  # noqa: E731
    has_gradient = build_algorithm(algorithm_name).needs_topk_gradient
    return TokenInputs(
        log_probs=pi,
        rollout_log_probs=mu,
        advantages=advantages,
        loss_mask=torch.ones(2, dtype=torch.bool),
        recomputed_log_probs=mu,
        topk_log_probs=both(pi if has_gradient else pi.detach()),
        rollout_topk_log_probs=both(mu),
        topk_valid=torch.ones(2, 2, dtype=torch.bool),
        sequence_ids=torch.arange(2),
        tail_ids=torch.zeros(2, dtype=torch.int64),
        sum_squares=(2 * pi.detach()).exp().sum().expand(2),
        step_bound=torch.full((2,), bound, dtype=F64),
    )


RATE, STEPS = 0.002, 300


def trained(name, mu_rises=0.5, direction=1.0, **options):
    """pi of token 0 after many steps of plain gradient descent against the expected loss."""
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
    # pi' is mu here: what engine and trainer disagree on is 0, and the clip of pi / pi' is left.
    "ppo": 0.1, "grpo": 0.1, "icepop": 0.1, "geometric-mask": 0.1, "vaco": 0.1,
    # r of the rising token may reach 1.28: the falling one has stopped at 0.8 by then.
    **dict.fromkeys(["grpo-clip-higher", "minirl", "minirl-tis", "relax-high", "relax-low",
                     "relax-both", "triage"], 0.14),
    **{name: 0.15 for name in PRESETS if name.endswith("-tv")},
    **{name: KL_RADIUS for name in PRESETS if name.endswith("-kl")},
    "gspo": 2e-4,
    # The falling token's weight passes 0.8 at pi = 0.35; the rising one's has passed 1.28 at 0.63125 by then.
    "bpo": 0.15,
    **{name: 0.5 * math.sqrt(1 - math.exp(-2 * 0.15)) for name in PRESETS if name.startswith("pdm")},
    "dppo-symmetric": 0.3,
    "kpop": 0.5 * math.sqrt(1 - math.exp(-2 * 0.1)),
    # The rising token, whose log r may reach 0.4; the falling one stops at -0.4, nearer.
    "gmpo": 0.5 * math.expm1(0.4),
    # r = 1.3504 has r - 1 - log r = 0.05.
    "trm-mean": 0.1752,
    # The falling token is cut where both squares' mean passes 0.04; the rising one's log r may be 0.2, with the cut
    # there too.
    "m2po": 0.5 * math.expm1(0.2),
    # The falling token is dropped where both squares' mean passes 0.04; the rising one alone may have log r = 0.2.
    "m2po-areal": 0.5 * math.expm1(0.2),
    # p = 1/2 + d has log 2 - H(p) = 0.05: from there the projection no longer moves.
    "troll": 0.156781,
}  # fmt: skip
"""Where training from mu = (1/2, 1/2) must stop: |pi - mu|, worked by hand from each mask."""
UNCONFINED = [
    "pg-is", "pg-tis", "cispo", "drpo", "mask-0.5", "mask-0.8", "mask-0.5-recompute",
    "sapo", "minpro", "score-centering", "trm-max", "off-policy-sequence-mask",
]  # fmt: skip
BOTH_WAYS = ["dppo-symmetric", "kpop", "trm-max", "trm-mean", "m2po-areal"]
"""They block whatever is far from mu, also on its way back."""


def test_every_preset_is_driven():
    assert sorted([*RADIUS, *UNCONFINED]) == sorted(PRESETS)


@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize("name", list(RADIUS))
def test_training_stops_at_the_edge_of_the_trust_region(name, direction):
    moved = (trained(name, direction=direction) - 0.5) * direction
    assert RADIUS[name] <= moved <= RADIUS[name] + 8 * RATE


@pytest.mark.parametrize("name", UNCONFINED)
def test_training_without_a_trust_region_goes_on(name):
    assert trained(name) > 0.75


@pytest.mark.parametrize("name", ["dppo-binary-tv", "dppo-topk-tv"])
@pytest.mark.parametrize(("signs", "radius"), [([1.0, 0.0], 0.2), ([0.0, 1.0], 0.05)])
def test_one_sided_thresholds_hold_each_sign(name, signs, radius):
    """Token 0 alone has an advantage, A = 1, or token 1 alone, A = -1; both move token 0 up."""
    options = {"tv_threshold": 0.2, "tv_threshold_negative": 0.05}
    moved = trained(name, direction=torch.tensor(signs), **options) - 0.5
    assert radius <= moved <= radius + 8 * RATE


@pytest.mark.parametrize(("name", "drop"), [("mask-0.5", 0.5), ("mask-0.8", 0.8)])
def test_minimal_masks_stop_the_falling_token_alone(name, drop):
    """mu of the falling token is 0.9; pi falls to 0.9 - drop by both, then by the rising one only."""
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
    """pi far out on the other side: everything trains, and the distance falls."""
    logit = torch.tensor(-3.0, dtype=F64, requires_grad=True)  # token 0 has fallen, and is to rise
    sums = policy_loss(build_algorithm(name), one_state(logit, name, 0.5))
    assert not sums.blocked.any()
    (grad,) = torch.autograd.grad(sums.loss, logit)
    assert grad < 0


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in BOTH_WAYS])
def test_what_is_blocked_would_have_moved_further_out(name):
    """At each state, sign of A and side: a blocked token's own step raises |log pi - log mu|."""
    found = set()
    for at, direction in itertools.product(torch.linspace(-4, 4, 41), (1.0, -1.0)):
        logit = at.double().requires_grad_()
        x = one_state(logit, name, 0.5, direction)
        sums = policy_loss(build_algorithm(name), x)
        for token in torch.nonzero(sums.blocked).flatten().tolist():
            outward = torch.sign(x.log_probs[token] - x.rollout_log_probs[token])
            assert outward == torch.sign(x.advantages[token])
            found.add(token)
    if name in RADIUS and name != "troll":  # which blocks nothing, and pulls pi back to the edge
        assert found == {0, 1}
