"""Balancing: the division of sequences among data-parallel ranks and micro-batches.

Memory bounds a micro-batch's tokens. Time is balanced by cost, which grows faster than the number of tokens
(``forward_flops`` in ``model/shape.py``). Every function depends on its arguments alone, so ranks that know the same
lengths agree without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Groups = list[list[int]]


def partition_by_cost(costs: Sequence[float], ranks: int) -> Groups:
    """Divide the indices of ``costs`` into ``ranks`` groups of nearly equal sums (Karmarkar-Karp largest differencing).

    The result is deterministic, and indices ascend within a group. Some groups are empty if there are fewer sequences
    than ranks.
    """
    # A partial partition has `ranks` pairs (sum, indices), the heaviest first. Merge the two partitions with the widest
    # spread, heaviest group onto lightest, until one partition remains. The smallest index breaks ties.
    heap = [
        (-cost, index, [(cost, [index])] + [(0, [])] * (ranks - 1))
        for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first_index, partition = heapq.heappop(heap)
        _, second_index, second_partition = heapq.heappop(heap)
        merged = []
        for (cost, indices), (added_cost, added_indices) in zip(
            partition, reversed(second_partition), strict=True
        ):
            merged.append((cost + added_cost, indices + added_indices))
        merged.sort(key=lambda part: (-part[0], part[1]))
        spread = merged[-1][0] - merged[0][0]
        heapq.heappush(heap, (spread, min(first_index, second_index), merged))
    if not heap:
        return [[] for _ in range(ranks)]
    return [sorted(indices) for _, indices in heap[0][2]]


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> Groups:
    """Divide the indices of ``lengths`` into groups of at most ``token_budget`` tokens by first-fit-decreasing.

    A sequence longer than the budget gets a group of its own. The result is deterministic: equal lengths keep their
    order.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    # Free tokens of each group, in the order in which the groups were created.
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
    # With expert parallelism every rank takes part in the others' layers, so all ranks need the same number.
    count = max(1, *(len(groups) for groups in minimal_groups))
    count += -count % count_multiple
    plan = []
    for share, groups in zip(shares, minimal_groups, strict=True):
        share_lengths, share_costs = [lengths[i] for i in share], [costs[i] for i in share]
        micro_batches: Groups = []
        for group in _spread(share_lengths, share_costs, groups, token_budget, count):
            micro_batches.append([share[i] for i in group])
        plan.append(micro_batches)
    return plan


def idle_share(plan: Sequence[Groups], costs: Sequence[float]) -> float:
    """Compute the share of all ranks' time that is spent waiting.

    The k-th micro-batches of all ranks run together, and each takes as long as the costliest of them. So the share is
    1 - sum of all costs / (ranks * sum over k of the largest cost); 0 without work.
    """
    rank_costs = [[_total(costs, group) for group in rank] for rank in plan]
    duration = sum(max(column) for column in zip(*rank_costs, strict=True))
    return 1 - sum(map(sum, rank_costs)) / (len(plan) * duration) if duration else 0.0


def _spread(
    lengths: Sequence[int],
    costs: Sequence[float],
    groups: Groups,
    token_budget: int,
    count: int,
) -> Groups:
    """Divide sequences into exactly ``count`` groups, the heaviest first.

    The groups are balanced evenly if they then keep to the budget. Else each sequence joins the cheapest group with
    room; if one finds no room, ``groups`` are split.
    """
    spread: Groups | None = partition_by_cost(costs, count)
    if any(len(g) > 1 and _total(lengths, g) > token_budget for g in spread or []):
        spread = _cheapest_with_room(lengths, costs, token_budget, count)
    if spread is None:
        spread = _split(costs, groups, count)
    # Sort, because the k-th micro-batches of all ranks run together: the heaviest ones should meet.
    return sorted(spread, key=lambda g: (-_total(costs, g), g))


def _cheapest_with_room(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> Groups | None:
    """Divide sequences into ``count`` groups: the costliest first, each joins the cheapest group with room for its
    tokens. None if a sequence finds no room."""
    groups: Groups = [[] for _ in range(count)]
    sums, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
    for index in np.argsort(-np.asarray(costs), kind="stable").tolist():
        room = (tokens + lengths[index] <= token_budget) | (tokens == 0)
        if not room.any():
            return None
        group = int(np.argmin(np.where(room, sums, np.inf)))
        groups[group].append(index)
        sums[group] += costs[index]
        tokens[group] += lengths[index]
    return [sorted(group) for group in groups]


def _split(costs: Sequence[float], groups: Groups, count: int) -> Groups:
    """Halve the heaviest group that has at least two sequences until there are ``count`` groups.

    ``count`` is below the number of sequences: with a group for each sequence, all groups would be within the budget.
    """
    groups = list(groups)
    while len(groups) < count:
        heaviest = max((g for g in groups if len(g) > 1), key=lambda g: _total(costs, g))
        groups.remove(heaviest)
        halves = partition_by_cost([costs[i] for i in heaviest], 2)
        groups.extend([heaviest[i] for i in half] for half in halves)
    return groups


def _total(values: Sequence[float], group: Sequence[int]) -> float:
    return sum(values[i] for i in group)
