"""Balancing: the division of sequences among data-parallel ranks and micro-batches.

Memory bounds a micro-batch's tokens. Time is balanced by cost, which grows faster than the number of tokens
(``forward_flops`` in ``model/shape.py``). Every function depends on its arguments alone, so ranks that know the same
lengths agree without communication.
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
    # A partial partition has `ranks` pairs (sum, indices), the heaviest first. Merge the two partitions with the widest
    # spread, heaviest group onto lightest, until one partition remains. The smallest index breaks ties.
    heap: list[tuple[float, int, list[_Part]]] = []
    for index, cost in enumerate(costs):
        partition: list[_Part] = [(cost, [index]), *[(0, [])] * (ranks - 1)]
        heap.append((-cost, index, partition))
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
        spread = merged[-1][0] - merged[0][0]
        heapq.heappush(heap, (spread, min(first_index, second_index), merged))
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
        share_lengths = [lengths[i] for i in share]
        share_costs = [costs[i] for i in share]
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
    rank_costs: list[list[float]] = []
    for groups in plan:
        rank_costs.append([_total(costs, group) for group in groups])
    duration = sum(map(max, zip(*rank_costs, strict=True)))
    if not duration:
        return 0.0
    return 1 - sum(map(sum, rank_costs)) / (len(plan) * duration)


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
    for group in spread or []:
        if len(group) > 1 and _total(lengths, group) > token_budget:
            spread = _cheapest_with_room(lengths, costs, token_budget, count)
            break
    if spread is None:
        spread = _split(costs, groups, count)
    # Sort, because the k-th micro-batches of all ranks run together: the heaviest ones should meet.
    parts = [(_total(costs, group), group) for group in spread]
    return [group for _, group in sorted(parts, key=_heaviest_first)]


def _cheapest_with_room(
    lengths: Sequence[int],
    costs: Sequence[float],
    token_budget: int,
    count: int,
) -> Groups | None:
    """Divide sequences into ``count`` groups: the costliest first, each joins the cheapest group with room for its
    tokens. None if a sequence finds no room."""
    groups: Groups = [[] for _ in range(count)]
    sums = np.zeros(count)
    tokens = np.zeros(count, dtype=np.int64)
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
        divisible_groups = [group for group in groups if len(group) > 1]
        heaviest = max(divisible_groups, key=partial(_total, costs))
        groups.remove(heaviest)
        for half in partition_by_cost([costs[i] for i in heaviest], 2):
            groups.append([heaviest[i] for i in half])
    return groups


def _total(values: Sequence[float], group: Sequence[int]) -> float:
    return sum(values[i] for i in group)
