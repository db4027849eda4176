"""Staleness by token, its bound, and the figures of a batch, with numbers worked by hand."""

import pytest

from megatron_dppo.loop.rollouts.figures import (
    GroupRow,
    generated_figures,
    rows_of,
    selection_figures,
    speed_figures,
)
from megatron_dppo.loop.rollouts.staleness import (
    StalenessError,
    check_staleness,
    staleness_figures,
    with_gap_named,
)
from megatron_dppo.loop.rollouts.zero_variance import Selection
from megatron_dppo.metrics import names
from megatron_dppo.types import Rollout, VersionSpan


def rollout(*spans: tuple[int, int], reward: float = 0.0, reason: str = "stop") -> Rollout:
    """A response made of (version, tokens) pieces."""
    versions, start = [], 0
    for version, tokens in spans:
        versions.append(VersionSpan(version, start, start + tokens))
        start += tokens
    return Rollout(7, 2, [1], [2] * start, [-0.5] * start, reason, "", versions, reward=reward)  # type: ignore[arg-type]


def test_staleness_is_a_mean_over_tokens_not_over_responses():
    batch = [rollout((4, 1)), rollout((3, 6)), rollout((3, 2), (4, 1))]
    figures = staleness_figures(batch, step=5)  # trained from version 4: 6 + 2 tokens are 1 behind
    assert figures == {"rollout/staleness": 8 / 10, "rollout/staleness_max": 1}


def test_tokens_beyond_the_bound_are_refused_by_name():
    batch = [rollout((4, 3)), rollout((3, 2), (4, 1))]
    check_staleness(batch, step=5, max_staleness=1)
    with pytest.raises(StalenessError) as caught:
        check_staleness(batch, step=5, max_staleness=0)
    assert str(caught.value) == (
        "step 5 trains weight version 4, but response 2 to problem 7 has tokens 0 to 1 of version 3, "
        "expected 4 to 4 (rollout.max_staleness: 0)"
    )


def test_weights_that_the_trainer_never_had_are_refused():
    with pytest.raises(StalenessError, match="of version 5"):
        check_staleness([rollout((5, 1))], step=5, max_staleness=1)


def test_the_gap_of_a_stale_batch_is_not_called_one_at_equal_weights():
    learned = {names.GAP_ON_POLICY: 0.25, "loss/mean": 1.0}
    assert with_gap_named(learned, {"rollout/staleness_max": 0}) == learned
    assert with_gap_named(learned, {"rollout/staleness_max": 1}) == {
        names.GAP_STALE: 0.25,
        "loss/mean": 1.0,
    }


def test_figures_are_those_of_all_generated_groups():
    batch = [
        rollout((0, 2), reward=1.0),
        rollout((0, 4), reward=1.0),
        rollout((0, 3), reward=0.0, reason="length"),
        rollout((0, 3), reward=1.0),
    ]
    rows = rows_of(batch, group_size=2)
    assert rows == [GroupRow(2, 2.0, True, 6, 0), GroupRow(2, 1.0, False, 6, 1)]
    assert generated_figures(rows) == {
        "reward/mean": 0.75,
        "reward/groups_without_spread": 0.5,
        "rollout/response_length": 3.0,
        "rollout/truncated": 0.25,
        "rollout/tokens": 12,
    }
    figures = selection_figures(rows, Selection((1,), dropped=1), rounds=2)
    assert figures["reward/mean_trained"] == 0.5
    assert figures["rollout/groups_generated"] == 2
    assert figures["rollout/groups_dropped"] == 1
    assert figures["rollout/generation_rounds"] == 2


def test_the_overlap_is_the_share_that_nobody_waited_for():
    figures = speed_figures(tokens=100, seconds=4.0, waited=1.0)
    assert figures["rollout/generation_overlapped"] == 0.75
    assert figures["rollout/tokens_per_second"] == 25.0
    waited_more = speed_figures(tokens=100, seconds=4.0, waited=4.1)
    assert waited_more["rollout/generation_overlapped"] == 0.0
