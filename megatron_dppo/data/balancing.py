"""Balancing: the division of sequences among data-parallel ranks and micro-batches.

Memory limits the tokens of a micro-batch, and the cost of its sequences determines its time. The cost of a sequence
grows faster than its number of tokens (``forward_flops`` in ``model/shape.py``). Every function depends on its
arguments alone, so ranks that know the same lengths agree without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial

import numpy as np

Groups = list[list[int]]
_Part = tuple[float, list[int]]
"""A group of a partial partition: its sum, and its indices."""


def partition_by_cost(costs: Sequence[float], ranks: int) -> Groups:
    """Divide the indices of ``costs`` into ``ranks`` groups of nearly equal sums (Karmarkar-Karp largest differencing).

    The result is deterministic, and indices ascend within a group. Some groups are empty if there are fewer sequences
    than ranks.
    """
    # Each index is one partial partition at first: `ranks` pairs (sum, indices), the heaviest first. The spread of a
    # partition is its largest sum minus its smallest sum. Merge the two partitions with the widest spread, each heavy
    # group with a light group, until one partition remains. The heap has (-spread, smallest index, partition), so the
    # smallest index breaks ties.
    heap: list[tuple[float, int, list[_Part]]] = []
    for index, cost in enumerate(costs):
        empty_parts: list[_Part] = [(0, [])] * (ranks - 1)
        heap.append((-cost, index, [(cost, [index]), *empty_parts]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first_index, partition = heapq.heappop(heap)
        _, second_index, second_partition = heapq.heappop(heap)
        merged = []
        for (cost, indices), (added_cost, added_indices) in zip(
            partition, reversed(second_partition), strict=True
        ):
            merged.append((cost + added_cost, indices + added_indices))
        merged.sort(key=_heaviest_first)
        minus_spread = merged[-1][0] - merged[0][0]
        heapq.heappush(heap, (minus_spread, min(first_index, second_index), merged))
    if not heap:
        return [[] for _ in range(ranks)]
    _, _, final_partition = heap[0]
    return [sorted(indices) for _, indices in final_partition]


def _heaviest_first(part: _Part) -> tuple[float, list[int]]:
    """Return the sorting key of a part: the largest sum first, then the smallest index."""
    cost, indices = part
    return -cost, indices


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> Groups:
    """Divide the indices of ``lengths`` into groups of at most ``token_budget`` tokens by first-fit-decreasing.

    A sequence longer than the budget is alone in its group. The result is deterministic: equal lengths keep their
    order.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    # Free tokens of each group, in the order of ``groups``.
    free = np.zeros(len(sizes), dtype=np.int64)
    groups: Groups = []
    for index in np.argsort(-sizes, kind="stable").tolist():
        fits = np.flatnonzero(free[: len(groups)] >= sizes[index])
        if len(fits):
            group = int(fits[0])
            groups[group].append(index)
            free[group] -= sizes[index]
        else:
            # A sequence above the budget makes this negative, so that no other sequence joins its group.
            free[len(groups)] = token_budget - sizes[index]
            groups.append([index])
    return groups


def plan_mini_batch(
    lengths: Sequence[int],
    costs: Sequence[float],
    dp_size: int,
    token_budget: int,
    count_multiple: int = 1,
) -> list[Groups]:
    """Plan one optimiser step: ``plan[dp rank][micro-batch]`` -> indices of ``lengths``.

    The cost is divided evenly among ranks, and within a rank among its micro-batches. Every rank gets the same number
    of micro-batches, a multiple of ``count_multiple`` (the interleaved pipeline schedule needs a multiple of the
    pipeline's size). A rank's heaviest micro-batch comes first. A micro-batch exceeds ``token_budget`` only if it is a
    single sequence, and is empty only if its rank has too few sequences.
    """
    shares = partition_by_cost(costs, dp_size)
    minimal_groups = []
    for share in shares:
        minimal_groups.append(plan_micro_batches([lengths[i] for i in share], token_budget))
    # With expert parallelism, ranks exchange tokens in every micro-batch, so all ranks need the same number.
    count = max(1, *(len(groups) for groups in minimal_groups))
    # Round up to the multiple.
    count += -count % count_multiple
    plan = []
    for share, groups in zip(shares, minimal_groups, strict=True):
        share_lengths = [lengths[i] for i in share]
        share_costs = [costs[i] for i in share]
        micro_batches: Groups = []
        for group in _spread(share_lengths, share_costs, groups, token_budget, count):
            micro_batches.append([share[i] for i in group])
        plan.append(micro_batches)
    return plan


def idle_share(plan: Sequence[Groups], costs: Sequence[float]) -> float:
    """Compute the share of all ranks' time that is spent waiting.

    The k-th micro-batches of all ranks run together, and the ranks wait for the costliest of them. So the share is
    1 - sum of all costs / (ranks * sum over k of the largest cost). The share is 0 without work.
    """
    rank_costs: list[list[float]] = []
    for groups in plan:
        rank_costs.append([_total(costs, group) for group in groups])
    duration = sum(map(max, zip(*rank_costs, strict=True)))
    if not duration:
        return 0.0
    return 1 - sum(map(sum, rank_costs)) / (len(plan) * duration)


def _spread(
    lengths: Sequence[int], costs: Sequence[float], groups: Groups, token_budget: int, count: int
) -> Groups:
    """Divide sequences into exactly ``count`` groups, the heaviest first.

    The function tries three divisions. First: groups of nearly equal cost, if no group exceeds the budget. Second: each
    sequence in the cheapest group with room. Third: ``groups``, the fewest groups within the budget, with some of them
    split.
    """
    even_groups = partition_by_cost(costs, count)
    divided_groups: Groups | None = even_groups
    for group in even_groups:
        if len(group) > 1 and _total(lengths, group) > token_budget:
            divided_groups = _cheapest_with_room(lengths, costs, token_budget, count)
            break
    if divided_groups is None:
        divided_groups = _split(costs, groups, count)
    # Put the heaviest first on every rank: the k-th micro-batches of all ranks run together, so their costs should be
    # close.
    parts = [(_total(costs, group), group) for group in divided_groups]
    return [group for _, group in sorted(parts, key=_heaviest_first)]


def _cheapest_with_room(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> Groups | None:
    """Divide sequences into ``count`` groups; return None if a sequence finds no room.

    The costliest sequence comes first. Each sequence joins the cheapest group that has room for its tokens; an empty
    group has room for every sequence.
    """
    groups: Groups = [[] for _ in range(count)]
    group_costs = np.zeros(count)
    group_tokens = np.zeros(count, dtype=np.int64)
    for index in np.argsort(-np.asarray(costs), kind="stable").tolist():
        has_room = (group_tokens + lengths[index] <= token_budget) | (group_tokens == 0)
        if not has_room.any():
            return None
        group = int(np.argmin(np.where(has_room, group_costs, np.inf)))
        groups[group].append(index)
        group_costs[group] += costs[index]
        group_tokens[group] += lengths[index]
    return [sorted(group) for group in groups]


def _split(costs: Sequence[float], groups: Groups, count: int) -> Groups:
    """Halve the heaviest group that has at least two sequences until there are ``count`` groups.

    ``count`` is below the number of sequences, because ``_spread`` needs no split for a larger ``count``: its first
    division then has at most one sequence in a group. So some group has two sequences while groups are missing.
    """
    groups = list(groups)
    while len(groups) < count:
        divisible_groups = [group for group in groups if len(group) > 1]
        heaviest = max(divisible_groups, key=partial(_total, costs))
        groups.remove(heaviest)
        for half in partition_by_cost([costs[i] for i in heaviest], 2):
            groups.append([heaviest[i] for i in half])
    return groups


def _total(values: Sequence[float], group: Sequence[int]) -> float:
    return sum(values[i] for i in group)
