"""Who trains on what: sequences spread over data-parallel ranks and over micro-batches.

Memory bounds a micro-batch's tokens; time is balanced by cost, which grows faster than the tokens
(``model/flops.py``). Every function is a pure function of its arguments, so that ranks which know the
same lengths agree without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Groups = list[list[int]]


def partition_by_cost(costs: Sequence[float], ranks: int) -> Groups:
    """Indices of ``costs`` in ``ranks`` groups of nearly equal sums (Karmarkar-Karp largest
    differencing).

    Deterministic; indices ascend within a group. Groups are empty where there are fewer sequences
    than ranks. Raises ValueError for ``ranks < 1`` or a cost that is not above 0.
    """
    _check_positive(costs, "cost")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    # A partial partition is `ranks` pairs (sum, indices), the heaviest first. The two with the widest
    # spread are merged heaviest onto lightest until one is left; the first index breaks ties.
    heap = [
        (-cost, index, [(cost, [index])] + [(0, [])] * (ranks - 1))
        for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, wide), (_, second, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (a + b, left + right)
            for (a, left), (b, right) in zip(wide, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    if not heap:
        return [[] for _ in range(ranks)]
    return [sorted(indices) for _, indices in heap[0][2]]


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> Groups:
    """Indices of ``lengths`` in as few groups of at most ``token_budget`` tokens as
    first-fit-decreasing finds.

    A sequence longer than the budget has a group to itself. Deterministic: equal lengths keep
    their order. Raises ValueError for a budget or a length below 1.
    """
    _check_positive(lengths, "length")
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    sizes = np.asarray(lengths, dtype=np.int64)
    free = np.zeros(len(sizes), dtype=np.int64)  # of the groups that are open, in order of opening
    groups: Groups = []
    for index in np.argsort(-sizes, kind="stable").tolist():
        fits = np.flatnonzero(free[: len(groups)] >= sizes[index])
        if len(fits):
            group = int(fits[0])
            groups[group].append(index)
            free[group] -= sizes[index]
        else:
            free[len(groups)] = token_budget - sizes[index]  # below zero: nothing joins it
            groups.append([index])
    return groups


def plan_mini_batch(
    lengths: Sequence[int],
    costs: Sequence[float],
    dp_size: int,
    token_budget: int,
    count_multiple: int = 1,
) -> list[Groups]:
    """``plan[dp rank][micro-batch]`` -> indices of ``lengths``: the work of one optimiser step.

    Ranks share the cost evenly, and each rank's micro-batches do. Every rank gets the same number of
    micro-batches, a multiple of ``count_multiple`` (the interleaved pipeline schedule wants a
    multiple of the pipeline's size), because expert parallelism makes the ranks take part in each
    other's layers. The k-th micro-batches of all ranks run together, so each rank's come heaviest
    first. None exceeds ``token_budget`` unless it is a single sequence. Micro-batches are empty only
    where a rank has too few sequences.
    """
    if count_multiple < 1:
        raise ValueError(f"count_multiple must be at least 1, got {count_multiple}")
    _check_positive(lengths, "length")
    shares = partition_by_cost(costs, dp_size)
    share_lengths = [[lengths[i] for i in share] for share in shares]
    share_costs = [[costs[i] for i in share] for share in shares]
    fewest = [plan_micro_batches(share, token_budget) for share in share_lengths]
    count = max(1, *(len(groups) for groups in fewest))
    count += -count % count_multiple
    plan = []
    for share, own_lengths, own_costs, groups in zip(
        shares, share_lengths, share_costs, fewest, strict=True
    ):
        spread = _spread(own_lengths, own_costs, groups, token_budget, count)
        plan.append([[share[i] for i in group] for group in spread])
    return plan


def idle_share(plan: Sequence[Groups], costs: Sequence[float]) -> float:
    """The share of all ranks' time that is spent waiting, where the k-th micro-batches of all ranks
    run together and each takes as long as the costliest: 1 - sum of all costs / (ranks * sum over k
    of the largest cost). 0 for no work.
    """
    slots = [[_total(costs, group) for group in rank] for rank in plan]
    longest = sum(max(column) for column in zip(*slots, strict=True))
    return 1 - sum(map(sum, slots)) / (len(plan) * longest) if longest else 0.0


def _spread(
    lengths: Sequence[int],
    costs: Sequence[float],
    groups: Groups,
    token_budget: int,
    count: int,
) -> Groups:
    """Exactly ``count`` groups, heaviest first: evenly balanced if that keeps to the budget, else
    each sequence onto the cheapest group with room, else ``groups`` split.
    """
    even: Groups | None = partition_by_cost(costs, count)
    if any(len(g) > 1 and _total(lengths, g) > token_budget for g in even or []):
        even = _cheapest_with_room(lengths, costs, token_budget, count)
    if even is None:
        even = _split(costs, groups, count)
    return sorted(even, key=lambda g: (-_total(costs, g), g))


def _cheapest_with_room(
    lengths: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> Groups | None:
    """``count`` groups: costliest first, each sequence joins the cheapest group that has room for its
    tokens; None where one finds no room."""
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
    """Halve the heaviest group that has two sequences until there are ``count``, which is below the
    number of sequences: as many groups are within the budget, each sequence in its own.
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


def _check_positive(values: Sequence[float], what: str) -> None:
    for index, value in enumerate(values):
        if not value > 0:
            raise ValueError(f"sequence {index} has a {what} of {value}, expected more than 0")
