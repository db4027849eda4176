"""The loss: its gradient is Eq. 23's, token by token, and its sums do not depend on packing."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.metrics.sums import FREQUENCY_SUMS, MetricSums, means
from megatron_dppo.metrics.table import GAP_STALE, METRICS
from tests.messages import mentioning
from tests.unit.token_inputs import inputs


def gradient(name, x, **options):
    algorithm = build_algorithm(name, options)
    (grad,) = torch.autograd.grad(policy_loss(algorithm, x).loss, x.log_probs)
    return grad


def close(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=value.dtype))


def test_gradient_is_mask_times_capped_ratio_times_advantage():
    # r = 1.5, 0.5, 4, 1.5; A = 1, -2, 0.5, -1
    x = inputs([0.75, 0.25, 0.4, 0.75], [0.5, 0.5, 0.1, 0.5], [1.0, -2.0, 0.5, -1.0])
    close(gradient("pg-is", x), [-1.5, 1.0, -2.0, 1.5])
    close(gradient("pg-tis", x), [-1.5, 1.0, -1.5, 1.5])
    close(gradient("cispo", x, ratio_cap=1.2), [-1.2, 1.0, -0.6, 1.2])
    close(gradient("grpo", x), [0.0, 0.0, 0.0, 1.5])
    close(gradient("dppo-binary-tv", x, tv_threshold=0.26), [-1.5, 1.0, 0.0, 1.5])
    close(gradient("dppo-binary-tv", x, tv_threshold=0.26, ratio_cap=1.25), [-1.25, 1.0, 0.0, 1.25])


def test_unmasked_gradient_equals_that_of_the_differentiated_ratio():
    x = inputs([0.6, 0.3], [0.5, 0.4], [1.0, -1.0])
    surrogate = -((x.log_probs - x.rollout_log_probs).exp() * x.advantages).sum()
    (expected,) = torch.autograd.grad(surrogate, x.log_probs)
    torch.testing.assert_close(gradient("pg-is", x), expected)


def test_value_is_the_surrogate():
    x = inputs([0.75, 0.25], [0.5, 0.5], [1.0, -2.0])
    loss = policy_loss(build_algorithm("pg-is"), x).loss
    assert loss.item() == pytest.approx(-(1.5 * 1.0 + 0.5 * -2.0))


def test_drpo_gradient_is_that_of_its_published_loss():
    # -A r + |A| mu (r - 1)^2 / (2 delta), differentiated by autograd.
    x = inputs([0.75, 0.25, 0.75, 0.25], [0.5] * 4, [1.0, 1.0, -2.0, -2.0])
    delta = 0.2
    ratio = (x.log_probs - x.rollout_log_probs).exp()
    mu = x.rollout_log_probs.exp()
    a = x.advantages
    published_loss = (-a * ratio + a.abs() * mu * (ratio - 1) ** 2 / (2 * delta)).sum()
    (expected,) = torch.autograd.grad(published_loss, x.log_probs)
    torch.testing.assert_close(gradient("drpo", x, penalty_threshold=delta), expected)
    # |pi - mu| = .25 is beyond delta = .2: outward updates are reversed, inward ones amplified.
    assert (expected * a > 0).tolist() == [True, False, False, True]


def test_gspo_weighs_and_clips_whole_sequences():
    ids = torch.tensor([0, 0, 1, 1])
    # The sequences' geometric mean ratios: s = sqrt(1.5 * 1/1.5) = 1 and s = sqrt(2 * 2) = 2.
    x = inputs(
        [0.75, 0.4, 0.2, 0.2], [0.5, 0.6, 0.1, 0.1], [1.0, 1.0, -1.0, -1.0], sequence_ids=ids
    )
    close(gradient("gspo", x), [-1.0, -1.0, 2.0, 2.0])
    x = inputs([0.75, 0.4, 0.2, 0.2], [0.5, 0.6, 0.1, 0.1], [1.0, 1.0, 1.0, 1.0], sequence_ids=ids)
    close(gradient("gspo", x), [-1.0, -1.0, 0.0, 0.0])


def test_icepop_weighs_kept_tokens_by_pi_over_mu():
    x = inputs([0.55, 0.6], [0.4, 0.1], [1.0, 1.0], recomputed=[0.5, 0.55])
    close(gradient("icepop", x), [-0.55 / 0.4, 0.0])


def test_tokens_outside_the_loss_mask_give_exactly_nothing_even_where_they_are_not_numbers():
    x = inputs([0.5, 0.75], [0.5, 0.5], [1.0, 1.0], loss_mask=[False, True])
    log_probs = torch.tensor([math.nan, math.log(0.75)], dtype=torch.float64, requires_grad=True)
    bad = TokenInputs(log_probs, x.rollout_log_probs, x.advantages, x.loss_mask)
    sums = policy_loss(build_algorithm("pg-is"), bad)
    sums.loss.backward()
    close(log_probs.grad, [0.0, -1.5])
    assert all(v.isfinite() for v in sums.metrics.sums.values())


def test_a_token_that_became_impossible_has_no_gradient_and_a_nan_reaches_the_loss():
    log_probs = torch.tensor([-math.inf, -1.0], requires_grad=True)
    x = TokenInputs(
        log_probs, torch.tensor([-1.0, -1.0]), torch.ones(2), torch.ones(2, dtype=torch.bool)
    )
    policy_loss(build_algorithm("pg-is"), x).loss.backward()
    close(log_probs.grad, [0.0, -1.0])
    x = TokenInputs(log_probs * math.nan, x.rollout_log_probs, x.advantages, x.loss_mask)
    assert not policy_loss(build_algorithm("pg-is"), x).loss.isfinite()


def test_all_rows_blocked_still_has_a_gradient_path():
    x = inputs([0.9, 0.9], [0.1, 0.1], [1.0, 1.0])
    close(gradient("dppo-binary-tv", x), [0.0, 0.0])


def complete_inputs(tokens=24, k=5, seed=0):
    """Return random tokens of four sequences, with every input that a preset may need."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    mu = uniform(tokens, 12).log_softmax(-1)
    pi = (mu + 2 * uniform(tokens, 12)).log_softmax(-1)
    a = torch.randint(0, 12, (tokens,), generator=g)
    ids = mu.topk(k).indices
    valid = torch.ones(tokens, k + 1, dtype=torch.bool)
    valid[:, -1] = ~(ids == a[:, None]).any(1)
    ids = torch.cat([ids, a[:, None]], 1)
    return TokenInputs(
        log_probs=pi.gather(1, a[:, None])[:, 0].requires_grad_(),
        rollout_log_probs=mu.gather(1, a[:, None])[:, 0],
        advantages=uniform(tokens) - 0.5,
        loss_mask=uniform(tokens) > 0.2,
        recomputed_log_probs=mu.gather(1, a[:, None])[:, 0] + 0.05 * uniform(tokens),
        topk_log_probs=pi.gather(1, ids),
        rollout_topk_log_probs=mu.gather(1, ids),
        topk_valid=valid,
        entropy=-(pi.exp() * pi).sum(-1),
        sequence_ids=torch.arange(tokens) // (tokens // 4),
        tail_ids=12 - valid.sum(-1),
        sum_squares=(2 * pi).exp().sum(-1),
        step_bound=torch.full((tokens,), 0.3, dtype=torch.float64),
    )


def select_rows(x, rows):
    """Return the inputs of some rows. Their sequence ids begin at 0."""
    values = {}
    for name in x.__dataclass_fields__:
        value = getattr(x, name)
        values[name] = None if value is None else value[rows]
    if values["sequence_ids"] is not None:
        values["sequence_ids"] = values["sequence_ids"] - values["sequence_ids"].min()
    return TokenInputs(**values)


WIDER_MASKS = {
    "trm-mean": {"mean_k3": 0.1},
    "geometric-mask": {"sequence_low": 0.9, "sequence_high": 1.1},
}
"""Options of presets whose masks block all of the random tokens by default. With these options they do not."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_sums_that_do_not_depend_on_micro_batching(name):
    x, algorithm = complete_inputs(), build_algorithm(name, WIDER_MASKS.get(name))
    whole = policy_loss(algorithm, x)
    (expected,) = torch.autograd.grad(whole.loss, x.log_probs)
    pieces = [policy_loss(algorithm, select_rows(x, rows)) for rows in (slice(0, 6), slice(6, 24))]
    (grad,) = torch.autograd.grad(pieces[0].loss + pieces[1].loss, x.log_probs)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-14)
    merged = (pieces[0].metrics + pieces[1].metrics).values()
    assert merged == pytest.approx(whole.metrics.values(), rel=1e-12)
    assert set(merged) <= {*METRICS, *FREQUENCY_SUMS}
    assert expected.abs().sum() > 0
    assert (expected[~x.loss_mask] == 0).all()


def test_metrics_worked_by_hand():
    # r = 2, 0.2, 1; gaps .25, -.6, 0. Both DPPO and PPO's clip block the first two tokens.
    x = inputs([0.5, 0.15, 0.4, 0.9], [0.25, 0.75, 0.4, 0.1], [1.0, -1.0, 1.0, 5.0],
               loss_mask=[True, True, True, False],
               entropy=torch.tensor([1.0, 2.0, 3.0, 9.0], dtype=torch.float64))  # fmt: skip
    metrics = policy_loss(build_algorithm("dppo-binary-tv", {"ratio_cap": 1.5}), x).metrics.values()
    recorded = means(metrics)
    expected = {
        "policy/tokens": 3, "policy/abs_prob_gap": 0.85 / 3, "policy/prob_gap": -0.35 / 3,
        "policy/prob_gap_max": 0.25, "policy/prob_gap_min": -0.6, "policy/ratio_max": 2.0,
        "policy/bad_update": 1 / 3, "mask/tokens_positive": 2, "mask/tokens_negative": 1,
        "mask/masked": 2, "mask/masked_positive": 0.5, "mask/masked_negative": 1.0,
        "mask/cap_hit": 1 / 3, "mask/rollout_prob_of_masked": 0.5, "mask/entropy_of_masked": 1.5,
        "policy/entropy": 2.0, "mask/ppo_only": 0.0, "mask/dppo_only": 0.0, "loss/mean": -1 / 3,
        "policy/kl": (1 - math.log(2) - 0.8 - math.log(0.2)) / 3, "mask/nonfinite": 0,
    }  # fmt: skip
    assert recorded == pytest.approx(expected)
    prefixes = ("policy/", "mask/", "loss/", "reference/")
    loss_metrics = {row.recorded_as or n for n, row in METRICS.items() if n.startswith(prefixes)}
    loss_metrics -= {GAP_STALE}
    optional = {"policy/topk_mass", "loss/penalty", "reference/kl", "reference/clamped"}
    assert set(recorded) | optional == loss_metrics


def test_counts_at_their_boundaries():
    # A = 0 is neither sign. mu = 1 -> pi = .5 with A < 0 is a bad update: a drop of exactly .5.
    x = inputs([0.5, 0.5, 0.4, 0.1, 0.6], [0.5, 1.0, 0.5, 0.9, 0.6], [0.0, -0.5, -0.5, 0.5, 0.5])
    algorithm = build_algorithm("pg-tis", {"ratio_cap": 1.0})
    metrics = policy_loss(algorithm, x).metrics.values()
    assert (metrics["mask/tokens_positive"], metrics["mask/tokens_negative"]) == (2, 2)
    # Neither the drop of .1 nor the drop with A > 0 is a bad update.
    assert metrics["policy/bad_update"] == 1
    assert metrics["mask/cap_hit"] == 0  # r = 1 is the cap, not above it


def test_no_tokens_at_all_leave_the_extremes_of_others():
    empty = torch.empty(0, dtype=torch.float64, requires_grad=True)
    no_tokens = TokenInputs(empty, empty.detach(), empty.detach(), empty.bool())
    metrics = policy_loss(build_algorithm("pg-is"), no_tokens).metrics.values()
    assert metrics["policy/prob_gap_max"] == metrics["policy/ratio_max"] == -math.inf
    assert metrics["policy/prob_gap_min"] == math.inf
    assert metrics["policy/tokens"] == 0


def test_ppo_and_dppo_disagreements_are_counted_apart():
    x = inputs([0.002, 0.99], [0.001, 0.8], [1.0, 1.0])
    metrics = policy_loss(build_algorithm("dppo-binary-tv"), x).metrics.values()
    assert metrics["mask/ppo_only"] == 1
    assert metrics["mask/dppo_only"] == 1


def test_the_clip_that_every_mask_is_compared_with_is_clip_higher():
    # r = 0.75 and 0.85 with A < 0; 1.25 and 1.3 with A > 0, which DPPO does not block.
    x = inputs([0.15, 0.17, 0.25, 0.26], [0.2] * 4, [-1.0, -1.0, 1.0, 1.0])
    for rows, blocked in ((slice(0, 1), 1), (slice(1, 2), 0), (slice(2, 3), 0), (slice(3, 4), 1)):
        metrics = policy_loss(
            build_algorithm("dppo-binary-tv"), select_rows(x, rows)
        ).metrics.values()
        assert metrics["mask/ppo_only"] == blocked


def test_topk_mass_leaves_out_the_sampled_token_and_what_is_not_valid():
    x = inputs([0.15], [0.1], [1.0],
               topk_log_probs=torch.tensor([[0.3, 0.2, 0.5, 0.15]]).log(),
               rollout_topk_log_probs=torch.tensor([[0.5, 0.25, 0.5, 0.1]]).log(),
               topk_valid=torch.tensor([[True, True, False, True]]))  # fmt: skip
    metrics = policy_loss(build_algorithm("dppo-topk-tv"), x).metrics.values()
    assert metrics["policy/topk_mass"] == pytest.approx(0.75)


def test_no_trained_token_has_no_mean():
    x = inputs([0.5], [0.5], [1.0], loss_mask=[False])
    metrics = policy_loss(build_algorithm("pg-is"), x).metrics
    assert metrics.values()["policy/prob_gap_max"] == -math.inf
    assert math.isnan(means(metrics.values())["policy/abs_prob_gap"])


def test_one_vector_carries_sums_and_extremes_of_all_ranks():
    ranks = [
        MetricSums({"s": torch.tensor(float(r + 1))}, {"hi": torch.tensor(-3.0 - r)}, {"lo": torch.tensor(2.0 + r)})
        for r in range(3)
    ]  # fmt: skip
    # A rank without tokens.
    smallest, largest = torch.tensor(-math.inf), torch.tensor(math.inf)
    ranks.append(MetricSums({"s": torch.tensor(0.0)}, {"hi": smallest}, {"lo": largest}))
    total = torch.stack([m.to_vector(r, 4) for r, m in enumerate(ranks)]).sum(0)
    reduced = MetricSums.from_vector(ranks[0].names, total, 4)
    assert reduced.values() == {"s": 6.0, "hi": -3.0, "lo": 2.0}
    with pytest.raises(ValueError, match=r"expected \(9,\)"):
        MetricSums.from_vector(ranks[0].names, total[:5], 4)


@pytest.mark.parametrize("field", ["advantages", "rollout_log_probs", "recomputed_log_probs"])
def test_shapes_that_differ_are_named(field):
    values = {"log_probs": torch.zeros(3), "rollout_log_probs": torch.zeros(3),
              "advantages": torch.zeros(3), "loss_mask": torch.ones(3, dtype=torch.bool)}  # fmt: skip
    with pytest.raises(ValueError, match=mentioning(field, "(2,)")):
        TokenInputs(**{**values, field: torch.zeros(2)})


@pytest.mark.parametrize("k", [(4, 5, 5), (5, 4, 5), (5, 5, 4)])
def test_topk_tensors_have_one_shape_with_the_tokens_first(k):
    x: Any = [torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.ones(3, dtype=torch.bool), None]
    with pytest.raises(ValueError, match=mentioning(str((3, k[0])), "(3,)")):
        TokenInputs(*x, *(torch.zeros(3, n) for n in k))
    with pytest.raises(ValueError, match=mentioning("(2, 4)")):
        TokenInputs(*x, *(torch.zeros(2, 4) for _ in k))
    with pytest.raises(ValueError, match=mentioning(None)):
        TokenInputs(*[*x, None, torch.zeros(3, 4), torch.zeros(3, 4)])


def test_sums_of_float32_losses_are_float64():
    x = inputs([0.6, 0.3], [0.5, 0.4], [1.0, -1.0], dtype=torch.float32)
    sums = policy_loss(build_algorithm("pg-is", {"kl_coefficient": 0.1}), x).metrics.sums
    assert {"loss/sum", "loss/penalty"} <= sums.keys()
    assert {value.dtype for value in sums.values()} == {torch.float64}


def test_the_mass_of_float32_entries_is_summed_in_float64():
    """Each token's Top-K has the probability 1 once and 2^-26 four times, which a float32 sum would lose. The last of
    the six columns is the sampled token's, which the mass leaves out."""
    x = complete_inputs()
    entries = torch.full((24, 6), -26 * math.log(2))
    entries[:, 0] = 0.0
    float32_inputs = {
        n: getattr(x, n).float() for n in ("log_probs", "rollout_log_probs", "topk_log_probs")
    }
    x = replace(x, **float32_inputs, rollout_topk_log_probs=entries.float(), entropy=None)
    sums = policy_loss(build_algorithm("dppo-topk-tv"), x).metrics.sums
    assert {value.dtype for value in sums.values()} == {torch.float64}
    mean = float(sums["policy/topk_mass"]) / int(x.loss_mask.sum())
    assert mean == pytest.approx(1 + 4 * 2**-26, abs=2**-28)
