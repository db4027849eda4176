"""The groups of a batch when groups without spread are replaced: rounds, surplus, filling up."""

import pytest

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.loop.group_quota import GroupQuota, Selection

FLAT, GOOD = True, False


def make_quota(wanted: int, oversampling: float = 1.0, rounds: int = 3) -> GroupQuota:
    return GroupQuota(wanted, True, oversampling, rounds)


def test_without_a_filter_one_round_asks_for_all_and_all_are_kept():
    quota = GroupQuota(3)
    assert quota.next_count((), 0) == 3
    assert quota.next_count((FLAT, FLAT, GOOD), 1) == 0
    assert quota.choose((FLAT, FLAT, GOOD)) == Selection((0, 1, 2))


@pytest.mark.parametrize(
    ("flat", "rounds", "oversampling", "expected"),
    [
        ((), 0, 1.0, 10),
        ((), 0, 1.1, 11),
        ((), 0, 1.25, 13),
        ([GOOD] * 7 + [FLAT] * 3, 1, 1.0, 3),
        ([GOOD] * 7 + [FLAT] * 3, 1, 1.5, 5),
        ([GOOD] * 7 + [FLAT] * 3, 3, 1.5, 0),
        ([GOOD] * 10, 1, 2.0, 0),
        ([GOOD] * 12, 1, 2.0, 0),
        ([FLAT] * 10, 2, 1.0, 10),
    ],
)
def test_a_round_asks_for_what_is_missing_times_the_oversampling(
    flat, rounds, oversampling, expected
):
    assert make_quota(10, oversampling).next_count(flat, rounds) == expected


def test_groups_with_spread_are_kept_in_the_order_of_their_problems():
    selection = make_quota(3).choose([FLAT, GOOD, GOOD, FLAT, GOOD, GOOD])
    assert selection == Selection(positions=(1, 2, 4), dropped=2, surplus=1)


def test_used_up_rounds_fill_up_with_the_first_groups_without_spread():
    selection = make_quota(4).choose([FLAT, GOOD, FLAT, FLAT, GOOD, FLAT])
    assert selection == Selection(positions=(0, 1, 2, 4), filled=2, dropped=2)


def test_every_generated_group_is_kept_dropped_or_surplus():
    for pattern in range(2**8):
        flat = [bool(pattern >> i & 1) for i in range(8)]
        selection = make_quota(5).choose(flat)
        assert len(selection.positions) == 5
        assert len(selection.positions) + selection.dropped + selection.surplus == 8
        assert sum(flat[i] for i in selection.positions) == selection.filled
        assert selection.filled == 0 or selection.surplus == 0


def test_the_configuration_sets_the_quota():
    config = RolloutConfig(
        prompts_per_step=6,
        group_size=2,
        max_response_tokens=4,
        drop_zero_variance_groups=True,
        oversampling=1.5,
        max_generation_rounds=2,
    )
    assert GroupQuota.of(config) == GroupQuota(6, True, 1.5, 2)
