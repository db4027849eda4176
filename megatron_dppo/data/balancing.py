"""Who trains on what: sequences spread over data-parallel ranks and over micro-batches, by their
number of tokens.

Every function is a pure function of its arguments, so that ranks which know the same lengths agree
without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Groups = list[list[int]]


def partition_by_length(lengths: Sequence[int], ranks: int) -> Groups:
    """Indices of ``lengths`` in ``ranks`` groups of nearly equal token sums (Karmarkar-Karp
    largest differencing).

    Deterministic; indices ascend within a group. Groups are empty where there are fewer sequences
    than ranks. Raises ValueError for ``ranks < 1`` or a length below 1.
    """
    _check_lengths(lengths)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    # A partial partition is `ranks` pairs (token sum, indices), the heaviest first. The two with
    # the widest spread are merged heaviest onto lightest until one is left; the first index breaks
    # ties.
    heap = [
        (-length, index, [(length, [index])] + [(0, [])] * (ranks - 1))
        for index, length in enumerate(lengths)
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
    _check_lengths(lengths)
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
    lengths: Sequence[int], dp_size: int, token_budget: int, count_multiple: int = 1
) -> list[Groups]:
    """``plan[dp rank][micro-batch]`` -> indices of ``lengths``: the work of one optimiser step.

    Every rank gets the same number of micro-batches, a multiple of ``count_multiple`` (the
    interleaved pipeline schedule wants a multiple of the pipeline's size), because expert
    parallelism makes the ranks take part in each other's layers. The k-th micro-batches of all
    ranks run together, so each rank's come heaviest first. None exceeds ``token_budget`` unless it
    is a single sequence. Micro-batches are empty only where a rank has too few sequences.
    """
    if count_multiple < 1:
        raise ValueError(f"count_multiple must be at least 1, got {count_multiple}")
    shares = partition_by_length(lengths, dp_size)
    share_lengths = [[lengths[i] for i in share] for share in shares]
    fewest = [plan_micro_batches(share, token_budget) for share in share_lengths]
    count = max(1, *(len(groups) for groups in fewest))
    count += -count % count_multiple
    plan = []
    for share, local_lengths, groups in zip(shares, share_lengths, fewest, strict=True):
        spread = _spread(local_lengths, groups, token_budget, count)
        plan.append([[share[i] for i in group] for group in spread])
    return plan


def _spread(lengths: Sequence[int], groups: Groups, token_budget: int, count: int) -> Groups:
    """Exactly ``count`` groups, heaviest first: evenly balanced if that keeps to the budget, else
    ``groups`` split.
    """
    even = partition_by_length(lengths, count)
    if any(len(g) > 1 and _tokens(lengths, g) > token_budget for g in even):
        even = _split(lengths, groups, count)
    return sorted(even, key=lambda g: (-_tokens(lengths, g), g))


def _split(lengths: Sequence[int], groups: Groups, count: int) -> Groups:
    """Halve the heaviest group that has two sequences until there are ``count``; then add empty
    ones.
    """
    groups = list(groups)
    while len(groups) < count:
        divisible = [g for g in groups if len(g) > 1]
        if not divisible:
            return groups + [[] for _ in range(count - len(groups))]
        heaviest = max(divisible, key=lambda g: _tokens(lengths, g))
        groups.remove(heaviest)
        halves = partition_by_length([lengths[i] for i in heaviest], 2)
        groups.extend([heaviest[i] for i in half] for half in halves)
    return groups


def _tokens(lengths: Sequence[int], group: Sequence[int]) -> int:
    return sum(lengths[i] for i in group)


def _check_lengths(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has a length of {length}, expected at least 1")
