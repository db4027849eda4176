"""Losses with a teacher: values by hand, means and gradients by enumeration over a small vocabulary, and the mask."""

import math
from functools import partial

import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.distillation import (
    DISTANCES,
    Distillation,
    TeacherScores,
    TeacherTopk,
    forward_kl,
    reverse_kl,
)
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.metrics import table as names
from megatron_dppo.trainer.step import columns_of
from tests.unit.token_inputs import inputs

V = 7
MASKED = build_algorithm("dppo-binary-tv", {"tv_threshold": 0.15})
UNMASKED = build_algorithm("pg-is")


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def exact_reverse_kl(log_pi, log_teacher):
    return (log_pi.exp() * (log_pi - log_teacher)).sum(-1)


def exact_forward_kl(log_pi, log_teacher):
    return (log_teacher.exp() * (log_teacher - log_pi)).sum(-1)


EXACT = {"reverse": exact_reverse_kl, "forward": exact_forward_kl}


def policies(seed):
    """Return the logits of a policy, and the log-probabilities of a teacher: float64 [V]."""
    g = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, V, generator=g, dtype=torch.float64) * 1.5
    return logits, teacher.log_softmax(0)


def columns(ids, sampled):
    """Return the ids of the columns and their validity, for TopK(p_T) = ``ids``."""
    return torch.tensor([*ids, sampled]), torch.tensor([True] * len(ids) + [sampled not in ids])


def gradient_of(distance, logits, teacher, ids, sampled):
    """Return the value of a distance over columns, and its gradient by the logits."""
    logits = logits.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    index, valid = columns(ids, sampled)
    value, slopes = distance(log_pi[index], teacher[index], valid)
    (gradient,) = torch.autograd.grad((slopes * log_pi[index]).sum(), logits)
    return value, gradient


def test_the_reverse_kl_of_two_columns_and_the_bucket_by_hand():
    value, slopes = reverse_kl(logs(0.5, 0.2), logs(0.25, 0.4), torch.tensor([True, True]))
    rest = math.log(0.3 / 0.35)
    assert float(value) == pytest.approx(0.5 * math.log(2) - 0.2 * math.log(2) + 0.3 * rest)
    expected = [0.5 * (math.log(2) - rest), 0.2 * (-math.log(2) - rest)]
    assert slopes.tolist() == pytest.approx(expected)


def test_the_forward_kl_of_two_columns_and_the_bucket_by_hand():
    value, slopes = forward_kl(logs(0.5, 0.2), logs(0.25, 0.4), torch.tensor([True, True]))
    expected = -0.25 * math.log(2) + 0.4 * math.log(2) + 0.35 * math.log(0.35 / 0.3)
    assert float(value) == pytest.approx(expected)
    quotient = 0.35 / 0.3
    assert slopes.tolist() == pytest.approx([0.5 * quotient - 0.25, 0.2 * quotient - 0.4])


def test_an_invalid_column_belongs_to_the_bucket():
    one_column = reverse_kl(logs(0.5), logs(0.25), torch.tensor([True]))
    value, slopes = reverse_kl(logs(0.5, 0.2), logs(0.25, 0.4), torch.tensor([True, False]))
    assert float(value) == pytest.approx(float(one_column[0]))
    assert slopes.tolist() == pytest.approx([*one_column[1].tolist(), 0.0])


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("seed", range(5))
def test_all_ids_give_the_exact_divergence_and_gradient(name, seed):
    logits, teacher = policies(seed)
    value, gradient = gradient_of(DISTANCES[name], logits, teacher, range(V), sampled=2)
    logits.requires_grad_()
    exact = EXACT[name](logits.log_softmax(0), teacher)
    (expected,) = torch.autograd.grad(exact, logits)
    assert float(value) == pytest.approx(float(exact.detach()), abs=1e-13)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("ids", [[0], [0, 3], [5, 1, 4]])
def test_a_bucket_gives_a_lower_bound_and_the_gradient_of_the_partition(name, ids):
    logits, teacher = policies(11)
    value, gradient = gradient_of(DISTANCES[name], logits, teacher, ids, sampled=2)
    logits.requires_grad_()
    log_pi = logits.log_softmax(0)
    assert 0 < float(value) < float(EXACT[name](log_pi, teacher).detach())
    index, valid = columns(ids, 2)
    kept = index[valid]
    parts = []
    for log_p in (log_pi, teacher):
        rest = 1 - log_p[kept].exp().sum()
        parts.append(torch.cat([log_p[kept], rest.log()[None]]))
    (expected,) = torch.autograd.grad(EXACT[name](*parts), logits)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", DISTANCES)
def test_a_bucket_of_equally_scaled_ids_is_exact(name):
    """Outside of the columns pi / p_T is one number."""
    teacher = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    pi = torch.tensor([0.1, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    logits = (pi * torch.tensor(3.0)).log()
    value, gradient = gradient_of(DISTANCES[name], logits, teacher.log(), [0], sampled=1)
    logits.requires_grad_()
    exact = EXACT[name](logits.log_softmax(0), teacher.log())
    (expected,) = torch.autograd.grad(exact, logits)
    assert float(value) == pytest.approx(float(exact.detach()), abs=1e-14)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("distance", DISTANCES.values())
def test_masses_that_are_only_rounding_count_as_zero(distance):
    """In float32 the columns' sum may exceed 1. The bucket then has the mass 0 under both policies."""
    log_pi = torch.tensor([0.5, 0.5 + 1e-7]).log()
    log_teacher = torch.tensor([0.5, 0.5 - 2e-7]).log()
    value, slopes = distance(log_pi, log_teacher, torch.tensor([True, True]))
    assert abs(float(value)) < 1e-6
    assert slopes.abs().max() < 1e-6 or distance is forward_kl
    assert torch.isfinite(slopes).all()


def test_a_teacher_that_is_certain_where_the_policy_is_not_stays_finite_in_reverse():
    value, slopes = reverse_kl(
        torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 1e-30]).log(), torch.tensor([True, True])
    )
    assert float(value) == pytest.approx(
        0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-30), rel=1e-5
    )
    assert torch.isfinite(slopes).all()


def enumerated(distillation, logits, mu, teacher, ids=None):
    """Return the mean gradient of a loss over samples of ``mu``, by its sum over all ids with their probabilities."""
    logits = logits.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    tokens = TokenInputs(
        log_pi, mu, torch.zeros(V, dtype=torch.float64), torch.ones(V, dtype=torch.bool)
    )
    scores = TeacherScores(teacher)
    if ids is not None:
        rows = [columns(ids, sampled) for sampled in range(V)]
        index = torch.stack([row[0] for row in rows])
        valid = torch.stack([row[1] for row in rows])
        scores = TeacherScores(teacher, TeacherTopk(log_pi[index], teacher[index], valid))
    _, sums = distillation.sums(tokens, scores, token_scale=mu.exp())
    return torch.autograd.grad(sums.loss, logits)[0]


@pytest.mark.parametrize("is_off_policy", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_gradient_of_samples_is_the_reverse_kls(is_off_policy, masked):
    """With importance weights this holds under any mu. pg-is has neither mask nor cap."""
    logits, teacher = policies(3)
    mu = policies(4)[1] if is_off_policy else logits.log_softmax(0)
    distillation = Distillation(UNMASKED, "sampled", weight=2.0, rewards=False, masked=masked)
    gradient = enumerated(distillation, logits, mu, teacher)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(exact_reverse_kl(logits.log_softmax(0), teacher), logits)
    assert torch.allclose(gradient, 2.0 * expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", DISTANCES)
def test_the_mean_gradient_over_all_ids_is_exact_under_any_sampler(name):
    logits, teacher = policies(5)
    distillation = Distillation(UNMASKED, name, weight=0.5, rewards=False)
    gradient = enumerated(distillation, logits, policies(6)[1], teacher, ids=range(V))
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(EXACT[name](logits.log_softmax(0), teacher), logits)
    assert torch.allclose(gradient, 0.5 * expected, rtol=0, atol=1e-12)


# pi, mu, p_T of the sampled token. The first token has moved up by 0.4, and the teacher wants it higher still. The
# second has moved up too, and the teacher wants it lower. The third has not moved.
PI = [0.9, 0.9, 0.5]
MU = [0.5, 0.5, 0.5]
TEACHER = [0.95, 0.3, 0.8]


def example(advantages, **settings):
    """Return the loss's gradient by log pi of the sampled tokens, its metrics, and the blocked tokens."""
    tokens = inputs(PI, MU, advantages)
    teacher = logs(*TEACHER)
    # One other id has all the rest but 0.01.
    other_pi = (1 - tokens.log_probs.detach().exp() - 0.01).log()
    other_teacher = (1 - teacher.exp() - 0.01).log()
    scores = TeacherScores(
        teacher,
        TeacherTopk(
            torch.stack([other_pi, tokens.log_probs], 1),
            torch.stack([other_teacher, teacher], 1),
            torch.ones(3, 2, dtype=torch.bool),
        ),
    )
    effective, sums = Distillation(MASKED, **settings).sums(tokens, scores)
    (gradient,) = torch.autograd.grad(sums.loss, tokens.log_probs)
    return gradient, sums, effective


def drawn():
    return [math.log(t / p) for t, p in zip(TEACHER, PI, strict=True)]


def test_the_mask_blocks_a_sampled_token_that_moves_further_away():
    gradient, sums, effective = example([0, 0, 0], loss="sampled", rewards=False)
    a = drawn()
    assert gradient.tolist() == pytest.approx([0, -1.8 * a[1], -a[2]])
    assert sums.blocked.tolist() == [True, False, False]
    assert effective.advantages.tolist() == pytest.approx(a)
    assert float(sums.metrics.sums[names.TEACHER_GAP]) == pytest.approx(-sum(a))


def test_the_advantage_of_the_rewards_and_the_teachers_add_up_before_the_mask():
    gradient, sums, effective = example([1.0, 1.0, -2.0], loss="sampled", weight=0.5)
    a = drawn()
    total = [1 + 0.5 * a[0], 1 + 0.5 * a[1], -2 + 0.5 * a[2]]
    assert effective.advantages.tolist() == pytest.approx(total)
    # 1 + a / 2 is positive for both of the first tokens, so that both would move further up.
    assert sums.blocked.tolist() == [True, True, False]
    assert gradient.tolist() == pytest.approx([0, 0, -total[2]])


def test_without_a_mask_all_samples_of_the_teacher_train_beside_the_masked_rewards():
    a = drawn()
    gradient, sums, _ = example([1.0, 0, 0], loss="sampled", masked=False)
    assert sums.blocked.tolist()[0] is True
    assert gradient.tolist() == pytest.approx([-1.8 * a[0], -1.8 * a[1], -a[2]])
    gradient, sums, _ = example([1.0, 0, 0], loss="sampled", masked=False, rewards=False)
    assert not sums.blocked.any()
    assert gradient.tolist() == pytest.approx([-1.8 * a[0], -1.8 * a[1], -a[2]])


@pytest.mark.parametrize("loss", DISTANCES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_mask_leaves_out_the_distance_of_a_token_that_the_teacher_draws_further_away(
    loss, masked
):
    gradient, sums, _ = example([0, 0, 0], loss=loss, rewards=False, masked=masked, weight=3.0)
    is_zero = [g == 0 for g in gradient.tolist()]
    assert is_zero == [masked, False, False]
    assert float(sums.metrics.sums[names.TEACHER_MASKED]) == masked
    assert sums.blocked.tolist() == [masked, False, False]
    tokens = inputs(PI, MU, [0, 0, 0])
    other = [(1 - torch.tensor(p, dtype=torch.float64) - 0.01).log() for p in (PI, TEACHER)]
    log_pi = torch.stack([other[0], tokens.log_probs.detach()], 1)
    log_teacher = torch.stack([other[1], logs(*TEACHER)], 1)
    distance, slopes = DISTANCES[loss](log_pi, log_teacher, torch.ones(3, 2, dtype=torch.bool))
    counted = torch.tensor([not masked, True, True])
    assert float(sums.loss.detach()) == pytest.approx(float((3 * distance)[counted].sum()))
    assert gradient.tolist() == pytest.approx((3 * slopes[:, 1] * counted).tolist())


@pytest.mark.parametrize("loss", DISTANCES)
def test_rewards_and_distances_add_up(loss):
    advantages = [-1.0, 2.0, 1.0]
    gradient, _, effective = example(advantages, loss=loss)
    distance_alone, _, _ = example(advantages, loss=loss, rewards=False)
    tokens = inputs(PI, MU, advantages)
    (of_rewards,) = torch.autograd.grad(policy_loss(MASKED, tokens).loss, tokens.log_probs)
    assert gradient.tolist() == pytest.approx((of_rewards + distance_alone).tolist())
    assert effective.advantages.tolist() == advantages


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 0.5 ln(0.5 / 0.8) + 0.3 ln(0.3 / 0.1) + 0.2 ln(0.2 / 0.1) = 0.233211
        ({"loss": "reverse", "rewards": False}, 2 * 0.233211),
        ({"loss": "reverse"}, -1 + 2 * 0.233211),
        # 0.8 ln(0.8 / 0.5) + 0.1 ln(0.1 / 0.3) + 0.1 ln(0.1 / 0.2) = 0.196827
        ({"loss": "forward", "rewards": False}, 2 * 0.196827),
        # ln(0.8 / 0.5) = 0.470004
        ({"loss": "sampled", "rewards": False}, -2 * 0.470004),
        ({"loss": "sampled"}, -1 - 2 * 0.470004),
        ({"loss": "sampled", "masked": False}, -1 - 2 * 0.470004),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_loss_that_is_recorded_has_the_teachers_part(settings, expected, scale):
    """One token of advantage 1 on policy. Token factors are left out, as in the record of the algorithm's own loss."""
    tokens = inputs([0.5], [0.5], [1.0])
    log_pi = torch.stack([logs(0.3), tokens.log_probs], 1)
    valid = torch.ones(1, 2, dtype=torch.bool)
    scores = TeacherScores(logs(0.8), TeacherTopk(log_pi, logs(0.1, 0.8)[None], valid))
    token_scale = None if scale is None else torch.tensor([scale], dtype=torch.float64)
    _, sums = Distillation(MASKED, weight=2.0, **settings).sums(tokens, scores, token_scale)
    assert float(sums.metrics.sums[names.LOSS]) == pytest.approx(expected, abs=1e-5)
    assert float(sums.loss.detach()) == pytest.approx((scale or 1) * expected, abs=1e-5)


@pytest.mark.parametrize("loss", ["sampled", "reverse", "forward"])
def test_a_tokens_factor_multiplies_the_teachers_part(loss):
    build = partial(Distillation, MASKED, loss, rewards=False)
    gradients = []
    for scale in (None, torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64)):
        tokens = inputs(PI, MU, [0, 0, 0])
        teacher = logs(*TEACHER)
        columns_of_pi = tokens.log_probs[:, None]
        valid = torch.ones(3, 1, dtype=torch.bool)
        scores = TeacherScores(teacher, TeacherTopk(columns_of_pi, teacher[:, None], valid))
        _, sums = build().sums(tokens, scores, scale)
        gradients.append(torch.autograd.grad(sums.loss, tokens.log_probs)[0])
    assert gradients[1].tolist() == pytest.approx((2 * gradients[0]).tolist())
    assert gradients[0].abs().max() > 0.1


@pytest.mark.parametrize("loss", ["sampled", "reverse", "forward"])
@pytest.mark.parametrize("rewards", [False, True])
def test_a_policy_that_is_not_a_number_makes_the_loss_not_a_number(loss, rewards):
    tokens = inputs([0.5, math.nan, 0.5], MU, [1.0, 1.0, 1.0])
    teacher = logs(*TEACHER)
    valid = torch.ones(3, 1, dtype=torch.bool)
    scores = TeacherScores(teacher, TeacherTopk(tokens.log_probs[:, None], teacher[:, None], valid))
    _, sums = Distillation(MASKED, loss, rewards=rewards).sums(tokens, scores)
    assert math.isnan(float(sums.loss))


def test_tokens_outside_of_the_loss_have_no_part():
    for loss in ("sampled", "reverse", "forward"):
        tokens = inputs(PI, MU, [0, 0, 0], loss_mask=[True, False, True])
        teacher = torch.tensor([math.log(0.95), -math.inf, math.log(0.8)], dtype=torch.float64)
        valid = torch.tensor([[True], [False], [True]])
        scores = TeacherScores(
            teacher, TeacherTopk(tokens.log_probs[:, None], teacher[:, None], valid)
        )
        _, sums = Distillation(UNMASKED, loss, rewards=False).sums(tokens, scores)
        (gradient,) = torch.autograd.grad(sums.loss, tokens.log_probs)
        assert torch.isfinite(sums.loss)
        assert gradient[1] == 0
        assert gradient[0] != 0


def test_columns_of_ids():
    among = torch.tensor([[4, 2, 9], [7, -1, -1], [3, 1, 0]])
    ids = torch.tensor([[9, 4, 5], [-1, 7, 0], [0, 1, -1]])
    assert columns_of(ids, among).tolist() == [[2, 0, -1], [-1, 0, -1], [2, 1, -1]]
