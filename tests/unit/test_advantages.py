"""Group-relative advantages."""

import pytest
import torch

from megatron_dppo.algorithms.inputs import group_relative


def test_reward_minus_the_mean_of_the_group_itself_included():
    advantages = group_relative([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], 3)
    # Means 1/3 and 2/3; no division by the deviation.
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3])
    torch.testing.assert_close(advantages, expected)
    assert advantages.dtype == torch.float32


def test_a_group_of_equal_rewards_has_exactly_no_advantage():
    assert group_relative([0.1] * 7, 7).eq(0).all()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="multiple of group_size 4"):
        group_relative([1.0] * 6, 4)
    with pytest.raises(ValueError, match=r"positions \[1\] are not finite"):
        group_relative([1.0, float("nan")], 2)
    with pytest.raises(ValueError, match="group_size is True"):
        group_relative([1.0], True)
    with pytest.raises(ValueError, match="group_size is 0, expected a whole number of at least 1"):
        group_relative([1.0], 0)


def test_a_group_of_one_is_its_own_mean():
    assert group_relative([3.0, -2.0], 1).tolist() == [0.0, 0.0]
