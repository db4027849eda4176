"""Group-relative advantages."""

import pytest
import torch

from megatron_dppo.algorithms.advantages import group_relative, turn_relative
from tests.messages import mentioning


def test_reward_minus_the_mean_of_the_group_itself_included():
    advantages = group_relative([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], 3)
    # Means 1/3 and 2/3; no division by the deviation.
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3])
    torch.testing.assert_close(advantages, expected)
    assert advantages.dtype == torch.float32


def test_a_group_of_equal_rewards_has_exactly_no_advantage():
    assert group_relative([0.1] * 7, 7).eq(0).all()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=mentioning("group_size", 4)):
        group_relative([1.0] * 6, 4)
    with pytest.raises(ValueError, match=mentioning("[1]")):
        group_relative([1.0, float("nan")], 2)
    with pytest.raises(ValueError, match=mentioning("group_size", True)):
        group_relative([1.0], True)
    with pytest.raises(ValueError, match=mentioning("group_size", 0, 1)):
        group_relative([1.0], 0)


def test_a_group_of_one_is_its_own_mean():
    assert group_relative([3.0, -2.0], 1).tolist() == [0.0, 0.0]


def test_a_turn_is_compared_with_the_others_turns_of_its_number():
    """The turns' means are .3, .7 / 3 and .5 / 3. A response that has ended counts with its last turn."""
    advantages = turn_relative([[0.6, 0.5, 0.3], [0.3, 0.2], [0.0]], 3)
    expected = [[0.3, 0.8 / 3, 0.4 / 3], [0.0, -0.1 / 3], [-0.3]]
    assert [pytest.approx(turns, abs=1e-6) for turns in expected] == advantages
    # Groups are independent, whatever the lengths of their responses.
    both = turn_relative([[1.0, 0.5], [0.0], [0.6, 0.5, 0.3], [0.2]], 2)
    assert both[0] == [0.5, 0.25]
    assert both[2] == pytest.approx([0.2, 0.15, 0.05])


def test_where_the_last_turn_alone_earns_a_turn_has_the_whole_responses_advantage():
    whole = group_relative([1.0, 0.0, 1.0], 3).tolist()
    advantages = turn_relative([[1.0] * 4, [0.0] * 2, [1.0]], 3)
    assert advantages == [[whole[0]] * 4, [whole[1]] * 2, [whole[2]]]
    assert turn_relative([[0.1, 0.3], [0.1]], 1) == [[0.0, 0.0], [0.0]]


def test_leave_one_out_compares_with_the_others_alone():
    # As in RLOO: the means of the other rewards are 0, 1/2 and 1/2.
    rewards = [1.0, 0.0, 0.0]
    advantages = group_relative(rewards, 3, "leave-one-out").tolist()
    assert advantages == pytest.approx([1.0, -0.5, -0.5])
    assert group_relative([0.1] * 7, 7, "leave-one-out").eq(0).all()
    assert group_relative([3.0], 1, "leave-one-out").tolist() == [0.0]


def test_standardized_advantages_are_in_the_groups_deviations():
    # The sample deviation (n - 1 = 2) of the first group is sqrt(2/3 / 2), that of the second ten times as large.
    unit = (2 / 3 / 2) ** 0.5
    advantages = group_relative([1.0, 0.0, 0.0, 10.0, 0.0, 0.0], 3, "group-standardized").tolist()
    expected = [2 / 3 / (unit + 1e-6), -1 / 3 / (unit + 1e-6), -1 / 3 / (unit + 1e-6)]
    assert advantages[:3] == pytest.approx(expected, rel=1e-6)
    assert advantages[3:] == pytest.approx(expected, rel=1e-5)
    assert torch.tensor([1.0, 0.0, 0.0]).std().item() == pytest.approx(unit)
    assert group_relative([0.1] * 7, 7, "group-standardized").eq(0).all()
    assert group_relative([3.0], 1, "group-standardized").tolist() == [0.0]


def test_turns_are_compared_as_whole_responses_are():
    returns = [[1.0, 0.5], [0.0], [0.6, 0.6], [0.2]]
    for kind in ("leave-one-out", "group-standardized"):
        advantages = turn_relative(returns, 2, kind)
        assert [g[0] for g in advantages] == group_relative([1.0, 0.0, 0.6, 0.2], 2, kind).tolist()
        assert advantages[0][1] == group_relative([0.5, 0.0], 2, kind)[0]
