"""Each sequence goes to one micro-batch of one rank, and micro-batches keep to the token budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.balancing import idle_share, partition_by_cost, plan_micro_batches
from megatron_dppo.data.balancing import plan_mini_batch as plan_by_cost

LENGTHS = st.lists(st.integers(1, 200), max_size=60)


def plan_mini_batch(lengths, *arguments, **options):
    """Plan a mini-batch in which every token costs the same."""
    return plan_by_cost(lengths, lengths, *arguments, **options)


def sums(lengths, groups):
    return [sum(lengths[i] for i in group) for group in groups]


def sorted_members(groups):
    return sorted(i for group in groups for i in group)


def test_largest_differencing_worked_by_hand():
    # Two ranks, lengths 8 7 6 5 4. Differences: {8,7} -> 1, {6,5} -> 1, {4} -> 4. {4}, with the widest
    # difference, meets {8,7}: 4 joins 7, which gives 11 and 8, a difference of 3. Then {6,5} is added
    # with its smaller part to the larger one: 11+5, 8+6. (A greedy division, which gives the next longest
    # sequence to the rank with the least work, ends at 17 and 13.)
    groups = partition_by_cost([8, 7, 6, 5, 4], 2)
    assert groups == [[1, 3, 4], [0, 2]]
    assert sums([8, 7, 6, 5, 4], groups) == [16, 14]


def test_more_ranks_than_sequences_leaves_ranks_empty():
    assert sorted(partition_by_cost([5, 6], 4)) == [[], [], [0], [1]]
    assert partition_by_cost([], 2) == [[], []]


def test_first_fit_decreasing_worked_by_hand():
    # Budget 10; in order of size 9, 6, 4, 4, 3, 1: 9 opens A, 6 opens B, 4 joins B, 4 opens C,
    # 3 joins C, 1 joins A. The 12 is over the budget and stays alone.
    assert plan_micro_batches([4, 3, 9, 4, 12, 6, 1], 10) == [[4], [2, 6], [5, 0], [3, 1]]


def test_exactly_the_budget_fits():
    assert plan_micro_batches([5, 5], 10) == [[0, 1]]
    assert plan_micro_batches([5, 6], 10) == [[1], [0]]
    assert plan_micro_batches([], 10) == []


def test_a_rank_with_less_work_splits_it_instead_of_idling():
    # Rank 0 has 100 tokens and rank 1 has 4 x 25: one micro-batch on each rank is enough.
    assert plan_mini_batch([100, 25, 25, 25, 25], 2, 100) == [[[0]], [[1, 2, 3, 4]]]
    # If there must be an even number, rank 1 splits its work, and rank 0 can only add an empty one.
    assert plan_mini_batch([100, 25, 25, 25, 25], 2, 100, count_multiple=2) == [
        [[0], []],
        [[1, 4], [2, 3]],
    ]


def test_no_sequences_still_plan_one_micro_batch_for_each_rank():
    assert plan_mini_batch([], 2, 100) == [[[]], [[]]]
    assert plan_mini_batch([], 1, 100, count_multiple=3) == [[[], [], []]]


def test_the_budget_outweighs_balance():
    # First fit needs two groups of 10 tokens, [6 4] [6 4]. Three groups of even cost are [6] [6] [4 4].
    plan = plan_mini_batch([6, 6, 4, 4], 1, 10, count_multiple=3)
    assert sorted(sums([6, 6, 4, 4], plan[0])) == [6, 6, 8]


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_partition_loses_nothing_and_is_close_to_even(lengths, ranks):
    groups = partition_by_cost(lengths, ranks)
    assert len(groups) == ranks
    assert sorted_members(groups) == list(range(len(lengths)))
    totals = sums(lengths, groups)
    assert max(totals) - min(totals) <= max(lengths, default=0)
    assert groups == partition_by_cost(lengths, ranks)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 300))
def test_micro_batches_keep_to_the_budget(lengths, budget):
    groups = plan_micro_batches(lengths, budget)
    assert sorted_members(groups) == list(range(len(lengths)))
    assert all(
        len(g) == 1 or total <= budget
        for g, total in zip(groups, sums(lengths, groups), strict=True)
    )
    # First fit leaves at most one group that is no more than half full.
    assert sum(2 * total <= budget for total in sums(lengths, groups)) <= 1


def test_ranks_share_cost_and_the_budget_bounds_tokens():
    # Costs are squares: one sequence of 16 costs as much as four of 8, so both ranks have 256. Ranks of
    # 24 tokens each would cost 320 and 192.
    lengths = [16, 8, 8, 8, 8]
    costs = [length**2 for length in lengths]
    assert plan_by_cost(lengths, costs, 2, 32) == [[[0]], [[1, 2, 3, 4]]]
    # At 16 tokens the second rank needs two micro-batches, so the first rank adds an empty one.
    assert plan_by_cost(lengths, costs, 2, 16) == [[[0], []], [[1, 4], [2, 3]]]


def test_where_even_costs_break_the_budget_the_cheapest_group_with_room_is_taken():
    # One rank, costs are squares, budget 10: sizes 8 4 4 4 cost 64 16 16 16. First fit needs three
    # groups, [8] [4 4] [4]. Three groups of even cost are the same.
    lengths = [8, 4, 4, 4]
    costs = [length**2 for length in lengths]
    assert plan_by_cost(lengths, costs, 1, 10) == [[[0], [2, 3], [1]]]
    # 6 6 3 3 1 1, budget 8, cost 36 36 9 9 1 1. First fit: [6 1] [6 1] [3 3]. Three groups of even
    # cost are [6] [6] [3 3 1 1]. The last has 8 tokens: it fits, and is kept.
    assert plan_by_cost([6, 6, 3, 3, 1, 1], [36, 36, 9, 9, 1, 1], 1, 8) == [
        [[0], [1], [2, 3, 4, 5]]
    ]
    # With a budget of 7 it does not fit, so each 1 joins the cheapest group with room: the first joins
    # [3 3], which costs 18 and then has 7 tokens; the second joins a 6.
    assert plan_by_cost([6, 6, 3, 3, 1, 1], [36, 36, 9, 9, 1, 1], 1, 7) == [
        [[0, 5], [1], [2, 3, 4]]
    ]


def test_a_budget_that_only_first_fit_keeps_to_splits_its_heaviest_groups():
    # One rank, budget 3, three groups; lists hold the sequences' indices. First fit: [0] [1 2 3]. Three
    # groups of even cost are [1] [2] [3 0], but the last has 4 tokens, and no other group has room for
    # the 3 tokens of sequence 0. So [1 2 3], with costs 3 3 2, is halved.
    assert plan_by_cost([3, 1, 1, 1], [1, 3, 3, 2], 1, 3, 3) == [[[2, 3], [1], [0]]]
    # Six groups from [0] [6] [5] [3 1] [4 2]: of the two that can be split, [4 2] costs more.
    lengths, costs = [5, 2, 2, 3, 3, 4, 5], [5, 2, 10, 1, 2, 5, 1]
    assert plan_by_cost(lengths, costs, 1, 5, 3) == [[[2], [0], [5], [3, 1], [4], [6]]]
    # Four groups from [3] [0 1 2] [4]: the last costs most, but it is a single sequence.
    assert plan_by_cost([1, 1, 1, 3, 1], [1, 2, 3, 1, 10], 1, 3, 2) == [[[4], [0, 1], [2], [3]]]


def test_one_sequence_may_exceed_the_budget_and_two_may_not():
    # The groups are even by cost. The sequence of 3 exceeds the budget of 2 in any group, so it is
    # no reason for another division.
    assert plan_mini_batch([1, 1, 1, 3], 1, 2, 3) == [[[3], [1, 2], [0]]]
    # Groups of even cost would be [0] [1 2], the second with 7 tokens. 2 has room only beside 0.
    assert plan_by_cost([1, 5, 2], [5, 1, 1], 1, 6) == [[[0, 2], [1]]]
    # A sequence that exceeds the budget is put into an empty group, and not beside other sequences.
    assert plan_by_cost([1, 4, 3], [1, 1, 4], 1, 4) == [[[2, 0], [1]]]
    assert plan_by_cost([5, 5, 1, 2], [4, 3, 5, 3], 1, 4) == [[[2, 3], [0], [1]]]


def test_idle_share_worked_by_hand():
    # Two ranks. The first micro-batches cost 6 and 4, the second ones 1 and 3, so they last 6 and 3:
    # 14 of 18 rank-seconds are work.
    plan = [[[0], [1]], [[2], [3]]]
    assert idle_share(plan, [6, 1, 4, 3]) == pytest.approx(4 / 18)
    assert idle_share([[[0]], [[1]]], [2, 2]) == 0
    assert idle_share([[[]], [[]]], []) == 0


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 300), st.floats(0, 1))
def test_by_whatever_cost_the_plan_holds_everything_within_the_budget(
    lengths, dp_size, budget, quadratic
):
    costs = [(1 + quadratic * length) * length for length in lengths]
    plan = plan_by_cost(lengths, costs, dp_size, budget)
    assert sorted_members(group for rank in plan for group in rank) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        totals = sums(costs, rank)
        assert totals == sorted(totals, reverse=True)
        tokens = sums(lengths, rank)
        assert all(len(g) <= 1 or t <= budget for g, t in zip(rank, tokens, strict=True))
    assert 0 <= idle_share(plan, costs) < 1


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 300), st.integers(1, 4))
def test_mini_batch_plan(lengths, dp_size, budget, multiple):
    plan = plan_mini_batch(lengths, dp_size, budget, multiple)
    assert len(plan) == dp_size
    assert sorted_members(group for rank in plan for group in rank) == list(range(len(lengths)))
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0
    for rank in plan:
        totals = sums(lengths, rank)
        assert totals == sorted(totals, reverse=True)
        assert all(len(g) <= 1 or t <= budget for g, t in zip(rank, totals, strict=True))
        if any(not g for g in rank):  # the last resort: no group of this rank could be split
            assert all(len(g) <= 1 for g in rank)


def test_a_rank_without_a_sequence_comes_last():
    assert partition_by_cost([1, 1], 3) == [[0], [1], []]


def test_groups_of_equal_cost_stand_in_the_order_of_their_indices():
    assert partition_by_cost([3, 3, 6], 2) == [[0, 1], [2]]
