"""Masks: which tokens they block, for both signs of the advantage, and exactly at the threshold."""

from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import rules, sequence_rules
from megatron_dppo.algorithms.inputs import TokenInputs, recomputed, rollout, trained_tokens
from tests.unit.token_inputs import inputs


def trains(mask) -> list[bool]:
    assert mask.dtype == torch.bool
    assert not mask.requires_grad
    return mask.tolist()


def test_ratio_clip_blocks_only_outward_updates_beyond_the_bound():
    # r = 1.5, 1.5, 0.5, 0.5, 1.1 with A = +, -, +, -, +
    x = inputs([0.75, 0.75, 0.25, 0.25, 0.55], [0.5] * 5, [1.0, -1.0, 1.0, -1.0, 1.0])
    mask = rules.ratio_clip(x, rollout, clip_low=0.2, clip_high=0.28)
    assert trains(mask) == [False, True, True, False, True]


def test_ratio_exactly_at_the_bound_trains():
    # r = 1.25 and 0.75 exactly, in binary floating point
    x = inputs([0.625, 0.375], [0.5, 0.5], [1.0, -1.0])
    exact = {"clip_low": 0.25 + 1e-12, "clip_high": 0.25 + 1e-12}
    assert trains(rules.ratio_clip(x, rollout, **exact)) == [True, True]
    tighter = {"clip_low": 0.25 - 1e-9, "clip_high": 0.25 - 1e-9}
    assert trains(rules.ratio_clip(x, rollout, **tighter)) == [False, False]


def test_every_clip_trains_a_ratio_exactly_at_its_bound():
    # pi = pi' = mu: every ratio is exp(0) = 1 exactly, and the bounds allow no other ratio.
    x = inputs([0.5, 0.5], [0.5, 0.5], [1.0, -1.0], recomputed=[0.5, 0.5],
               sequence_ids=torch.tensor([0, 1]))  # fmt: skip
    no_room: dict[str, Any] = {"clip_low": 0.0, "clip_high": 0.0}
    not_relaxed: dict[str, Any] = {"rare_below": 0.1, "relax_low": False, "relax_high": False}
    for mask in (
        rules.ratio_clip(x, rollout, **no_room),
        rules.relaxed_clip(x, rollout, **no_room, **not_relaxed),
        rules.icepop(x, recomputed, mismatch_low=1.0, mismatch_high=1.0, **no_room),
        sequence_rules.sequence_clip(x, rollout, **no_room),
    ):
        assert trains(mask) == [True, True]


def test_binary_tv_blocks_outward_updates_beyond_the_threshold():
    # |pi - mu| = 0.25, 0.25, 0.25, 0.25, 0.10
    x = inputs([0.75, 0.75, 0.25, 0.25, 0.6], [0.5] * 5, [1.0, -1.0, 1.0, -1.0, 1.0])
    mask = rules.binary_tv(x, rollout, tv_threshold=0.2)
    assert trains(mask) == [False, True, True, False, True]


def test_divergence_exactly_at_the_threshold_trains():
    x = TokenInputs(
        log_probs=torch.zeros(1),  # pi = 1
        rollout_log_probs=torch.full((1,), -torch.inf),  # mu = 0, so TV is exactly 1
        advantages=torch.ones(1),
        loss_mask=torch.ones(1, dtype=torch.bool),
    )
    assert trains(rules.binary_tv(x, rollout, tv_threshold=1.0)) == [True]
    assert trains(rules.binary_tv(x, rollout, tv_threshold=0.999)) == [False]


@pytest.mark.parametrize(
    ("mask", "distance"),
    [("binary_tv", 0.25), ("binary_kl", 0.1438), ("topk_tv", 0.25), ("topk_kl", 0.1438)],
)
def test_every_divergence_has_a_threshold_for_each_sign(mask, distance):
    # The sampled token rises from mu = 1/2 to 3/4, or falls to 1/4. TopK(mu) is the other token, so nothing is left for
    # "other".
    other_pi = torch.tensor([0.25, 0.75], dtype=torch.float64)
    x = inputs([0.75, 0.25], [0.5, 0.5], [1.0, -1.0],
               topk_log_probs=torch.stack([other_pi, 1 - other_pi], 1).log(),
               rollout_topk_log_probs=torch.full((2, 2), 0.5, dtype=torch.float64).log(),
               topk_valid=torch.ones(2, 2, dtype=torch.bool))  # fmt: skip
    kind = mask.split("_")[1]
    for factors, expected in (((1.1, 0.9), [True, False]), ((0.9, 1.1), [False, True])):
        bounds = {
            f"{kind}_threshold": factors[0] * distance,
            f"{kind}_threshold_negative": factors[1] * distance,
        }
        assert trains(getattr(rules, mask)(x, rollout, **bounds)) == expected


def test_each_sign_of_the_advantage_has_its_own_threshold():
    # A token rises and a token falls, both outward by |pi - mu| = 0.25. The advantages are not 1 in size.
    x = inputs([0.75, 0.25], [0.5, 0.5], [0.5, -0.5])
    train_at = lambda tv, negative: trains(  # noqa: E731
        rules.binary_tv(x, rollout, tv_threshold=tv, tv_threshold_negative=negative)
    )
    assert train_at(0.3, 0.2) == [True, False]
    assert train_at(0.2, 0.3) == [False, True]
    # mu = 1, pi = 0: TV is exactly 1.
    one = torch.ones(1)
    x = TokenInputs(torch.tensor([-torch.inf]), torch.zeros(1), -one, one.bool())
    mask = rules.binary_tv(x, rollout, tv_threshold=0.1, tv_threshold_negative=1.0)
    assert trains(mask) == [True]


def test_without_advantage_the_threshold_of_negative_ones_does_not_count():
    # With pi = 0 and A = 0 the direction A log r is NaN, so only the distance decides.
    x = TokenInputs(
        torch.tensor([-torch.inf]), torch.tensor([0.5]).log(), torch.zeros(1), torch.tensor([True])
    )
    for tv, negative, expected in ((0.6, 0.4, True), (0.4, 0.6, False)):
        mask = rules.binary_tv(x, rollout, tv_threshold=tv, tv_threshold_negative=negative)
        assert trains(mask) == [expected]


def test_rare_tokens_ppo_blocks_and_dppo_does_not_and_the_reverse():
    # From 0.001 to 0.002, r is 2 and TV is 0.001. From 0.9 to 0.99, r is 1.1 and TV is 0.09.
    x = inputs([0.002, 0.99], [0.001, 0.9], [1.0, 1.0])
    assert trains(rules.ratio_clip(x, rollout, clip_low=0.2, clip_high=0.28)) == [False, True]
    assert trains(rules.binary_tv(x, rollout, tv_threshold=0.05)) == [True, False]


def test_binary_kl_uses_the_kl():
    # KL(0.5 || 0.75) = 0.5 log(2/3) + 0.5 log 2 = 0.1438
    x = inputs([0.75, 0.75], [0.5, 0.5], [1.0, 1.0])
    assert trains(rules.binary_kl(x, rollout, kl_threshold=0.143)) == [False, False]
    assert trains(rules.binary_kl(x, rollout, kl_threshold=0.144)) == [True, True]


def test_zero_advantage_is_never_blocked():
    x = inputs([0.99, 0.01], [0.01, 0.99], [0.0, 0.0])
    assert trains(rules.binary_tv(x, rollout, tv_threshold=0.1)) == [True, True]
    assert trains(rules.ratio_clip(x, rollout, clip_low=0.1, clip_high=0.1)) == [True, True]


def test_decoupled_masks_compare_with_the_recomputed_policy_in_distance_and_direction():
    # Against mu the token rose by 0.3; against pi' it fell by 0.1.
    x = inputs([0.6, 0.6], [0.3, 0.3], [1.0, -1.0], recomputed=[0.7, 0.7])
    assert trains(rules.binary_tv(x, rollout, tv_threshold=0.05)) == [False, True]
    assert trains(rules.binary_tv(x, recomputed, tv_threshold=0.05)) == [True, False]


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (rules.ratio_clip, CLIP),
        (rules.binary_tv, {"tv_threshold": 0.2}),
        (rules.binary_kl, {"kl_threshold": 0.1}),
        (rules.large_drop, {"max_drop": 0.2}),
        (rules.relaxed_clip, {**CLIP, "rare_below": 0.3, "relax_low": True, "relax_high": True}),
        (sequence_rules.sequence_clip, CLIP),
    ],
)
def test_a_mask_reads_its_anchor_alone(mask, options):
    """If mu and pi' are swapped, and the anchor too, the mask decides the same."""
    pi, mu, old = torch.rand(3, 400, generator=torch.Generator().manual_seed(1)).tolist()
    advantages, ids = [1.0, -1.0] * 200, torch.arange(400)
    x = inputs(pi, mu, advantages, recomputed=old, sequence_ids=ids)
    swapped = inputs(pi, old, advantages, recomputed=mu, sequence_ids=ids)
    decisions = mask(x, recomputed, **options)
    assert torch.equal(decisions, mask(swapped, rollout, **options))
    differ = decisions != mask(x, rollout, **options)
    assert differ[::2].any() or mask is rules.large_drop
    assert differ[1::2].any()


def test_topk_masks_see_what_the_sampled_token_does_not():
    # The sampled token has moved little and TopK(mu) far: the binary TV is 0.05, the Top-K TV 0.3.
    x = inputs([0.15], [0.1], [1.0],
               topk_log_probs=torch.tensor([[0.3, 0.15]]).log(),
               rollout_topk_log_probs=torch.tensor([[0.6, 0.1]]).log(),
               topk_valid=torch.ones(1, 2, dtype=torch.bool))  # fmt: skip
    assert trains(rules.binary_tv(x, rollout, tv_threshold=0.2)) == [True]
    # 1/2 (|.3| + |.05| + other |.3 - .55|) = 0.3
    assert trains(rules.topk_tv(x, rollout, tv_threshold=0.29)) == [False]
    assert trains(rules.topk_tv(x, rollout, tv_threshold=0.31)) == [True]
    assert trains(rules.topk_kl(x, rollout, kl_threshold=0.01)) == [False]
    with pytest.raises(ValueError, match="needs Top-K"):
        rules.topk_tv(inputs([0.5], [0.5], [1.0]), rollout, tv_threshold=0.2)


def test_minimal_mask_blocks_large_drops_of_bad_tokens_from_the_threshold_on():
    # 0.75 - 0.25 = 0.5 exactly
    x = inputs([0.25, 0.25, 0.3, 0.95], [0.75, 0.75, 0.75, 0.2], [-1.0, 1.0, -1.0, -1.0])
    x = TokenInputs(x.log_probs, x.rollout_log_probs, x.advantages, x.loss_mask)
    mask = rules.large_drop(x, rollout, max_drop=0.5 - 1e-12)
    assert trains(mask) == [False, True, True, True]
    x = TokenInputs(torch.tensor([-torch.inf]), torch.zeros(1), -torch.ones(1), x.loss_mask[:1])
    # Unlike the other masks, this one blocks exactly at its threshold.
    assert trains(rules.large_drop(x, rollout, max_drop=1.0)) == [False]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (False, False, [False, False, False, False]),
        (False, True, [True, False, False, False]),
        (True, False, [False, True, False, False]),
        (True, True, [True, True, False, False]),
    ],
)
def test_relaxed_clip_frees_rare_tokens_on_the_chosen_side(low, high, expected):
    # Rare (mu .05) and common (mu .5) tokens, r = 2 with A > 0 and r = 0.2 with A < 0.
    x = inputs([0.1, 0.01, 1.0, 0.1], [0.05, 0.05, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    mask = rules.relaxed_clip(
        x, rollout, clip_low=0.2, clip_high=0.28, rare_below=0.1, relax_low=low, relax_high=high
    )
    assert trains(mask) == expected


def test_a_token_is_rare_below_the_bound_not_at_it():
    x = inputs([0.5], [1.0], [-1.0])  # r = 0.5
    options: dict[str, Any] = {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "relax_low": True,
        "relax_high": True,
    }
    assert trains(rules.relaxed_clip(x, rollout, rare_below=1.0, **options)) == [False]


def test_relaxed_clip_keeps_common_tokens_within_its_bounds():
    # r = 1.2 and 0.9, at mu = 1/2
    x = inputs([0.6, 0.45], [0.5, 0.5], [1.0, -1.0])
    options: dict[str, Any] = {"rare_below": 0.1, "relax_low": True, "relax_high": True}
    for bounds, expected in (((0.2, 0.28), True), ((0.05, 0.15), False)):
        mask = rules.relaxed_clip(x, rollout, clip_low=bounds[0], clip_high=bounds[1], **options)
        assert trains(mask) == [expected] * 2


def test_icepop_drops_mismatched_tokens_whatever_the_advantage_and_clips_the_rest():
    # k = pi'/mu = 6, 0.4, 1, 1; r' = pi/pi' = 1, 1, 1.5, 1.5; A = -, +, +, -
    x = inputs([0.6, 0.2, 0.75, 0.75], [0.1, 0.5, 0.5, 0.5], [-1.0, 1.0, 1.0, -1.0],
               recomputed=[0.6, 0.2, 0.5, 0.5])  # fmt: skip
    mask = rules.icepop(
        x, recomputed, mismatch_low=0.5, mismatch_high=5.0, clip_low=0.2, clip_high=0.2
    )
    assert trains(mask) == [False, False, False, True]


def test_sequence_ratio_is_the_geometric_mean_over_the_trained_tokens():
    # Sequence 0: r = 2 and 0.5, and a prompt token that does not count; sequence 1: r = 4.
    x = inputs([0.9, 0.8, 0.2, 0.8], [0.1, 0.4, 0.4, 0.2], [1.0, 1.0, 1.0, 1.0],
               loss_mask=[False, True, True, True], sequence_ids=torch.tensor([0, 0, 0, 3]))  # fmt: skip
    ratio = sequence_rules.sequence_ratio(x, rollout)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.0, 1.0, 4.0], dtype=torch.float64))
    mask = sequence_rules.sequence_clip(x, rollout, clip_low=3e-4, clip_high=4e-4)
    assert trains(mask) == [True, True, True, False]
    with pytest.raises(ValueError, match="no sequence_ids"):
        sequence_rules.sequence_ratio(inputs([0.5], [0.5], [1.0]), rollout)


def test_a_sequence_is_clipped_on_either_side():
    # s = 0.5 and 0.8, 1.1 and 1.5, with A < 0 and A > 0
    x = inputs([0.2, 0.32, 0.44, 0.6], [0.4] * 4, [-1.0, -1.0, 1.0, 1.0],
               sequence_ids=torch.arange(4))  # fmt: skip
    mask = sequence_rules.sequence_clip(x, rollout, clip_low=0.3, clip_high=0.4)
    assert trains(mask) == [False, True, True, False]


def test_a_response_without_a_trained_token_has_the_ratio_and_the_length_1():
    x = inputs([0.8, 0.8], [0.4, 0.4], [1.0, 1.0],
               loss_mask=[False, True], sequence_ids=torch.tensor([0, 1]))  # fmt: skip
    torch.testing.assert_close(
        sequence_rules.sequence_ratio(x, rollout), torch.tensor([1.0, 2.0], dtype=torch.float64)
    )
    assert trained_tokens(x).tolist() == [1.0, 1.0]


def test_missing_recomputed_log_probs_are_named():
    with pytest.raises(ValueError, match="recomputed_log_probs"):
        rules.binary_tv(inputs([0.5], [0.5], [1.0]), recomputed, tv_threshold=0.1)


def test_icepop_s_clip_has_two_bounds():
    # pi' = mu; r' = 1.25 with A > 0 and 0.75 with A < 0: inside +0.3, outside -0.2.
    x = inputs([0.625, 0.375], [0.5, 0.5], [1.0, -1.0], recomputed=[0.5, 0.5])
    mask = rules.icepop(
        x, recomputed, mismatch_low=0.5, mismatch_high=5.0, clip_low=0.2, clip_high=0.3
    )
    assert trains(mask) == [True, False]
