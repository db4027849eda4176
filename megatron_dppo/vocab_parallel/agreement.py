"""Comparison of shapes between tensor-parallel ranks before they communicate on CPU groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

FACTS = (
    "tokens",
    "shard columns",
    "Top-K ids",
    "entropy",
    "sum of squares",
    "vocabulary",
    "checksum of ids",
)
"""The numbers that must be equal on all ranks (``StatsQuery.facts``)."""


class Agreement:
    """A comparison of shapes and ids between the ranks of a CPU group, by one all-reduce.

    The all-reduce has eight numbers per rank: the ``FACTS``, and whether the rank's input is invalid. The all-reduce
    runs while the rank reads its logits.
    """

    def __init__(self, group: dist.ProcessGroup, facts: list[int] | None):
        """Start the all-reduce. ``facts`` are in the order of FACTS. With None, this rank's input is invalid, and the
        caller must raise an error afterwards.
        """
        # Each rank fills only its own row, so that the sum of all tables has the rows of all ranks.
        self._table = torch.zeros(dist.get_world_size(group), len(FACTS) + 1, dtype=torch.int64)
        self._table[dist.get_rank(group)] = torch.tensor(_facts_row(facts))
        self._work = dist.all_reduce(self._table, group=group, async_op=True)
        # The caller raises an error next. Complete the all-reduce first, because the other ranks wait in it.
        if facts is None:
            self._work.wait()

    def check(self) -> None:
        """Raise ValueError on every rank if any rank's input is invalid or the facts differ."""
        self._work.wait()
        fault = disagreement(self._table.tolist())
        if fault is not None:
            raise ValueError(f"policy_stats: tensor-parallel {fault}")


def _facts_row(facts: list[int] | None) -> list[int]:
    """Return a rank's row of the table: its facts, then 1 if its input is invalid."""
    if facts is None:
        return [0] * len(FACTS) + [1]
    return [*facts, 0]


def disagreement(table: Sequence[Sequence[int]]) -> str | None:
    """Describe the fault in the rows of all ranks; None if the rows have no fault."""
    failed = [rank for rank, row in enumerate(table) if row[-1]]
    if failed:
        return f"rank(s) {failed} were given bad input; their own error says what"
    # ``zip`` leaves out the last column, which is no fact.
    for name, values in zip(FACTS, zip(*table, strict=True), strict=False):
        if len(set(values)) > 1:
            return f"ranks disagree on {name}: {list(values)} by rank, expected equal"
    return None


def checksum(target_ids: Tensor, topk_ids: Tensor | None) -> int:
    """Return a sum of the ids, so that ranks can compare their ids. Each target id is multiplied by its position,
    because the sum must depend on the order.
    """
    order = torch.arange(1, len(target_ids) + 1)
    total = int(torch.dot(target_ids, order))
    if topk_ids is None:
        return total
    return total + int(topk_ids.sum())
