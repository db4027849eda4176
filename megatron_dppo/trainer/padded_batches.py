"""Sequences of a pack as padded batches of similar lengths, for operations of torch that know no packs.

T = tokens of a pack, S = sequences in it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_SHORT = 32
"""Tokens; shorter sequences share one batch in spite of the padding: a call costs more than padding."""


class PaddedBatch(NamedTuple):
    """Sequences of similar length, computed as one padded batch."""

    gather: Tensor
    """int64 [sequences * longest]; index of the packed token at each position; in padding, the index
    of the sequence's first token.
    """
    sequences: int
    longest: int


class PaddingPlan(NamedTuple):
    """Indices that turn a pack into padded batches and the outputs back into a pack."""

    batches: tuple[PaddedBatch, ...]
    scatter: Tensor
    """int64 [T]; for each packed token, its row in the concatenated padded outputs."""

    def to(self, device: torch.device) -> PaddingPlan:
        """The plan with its indices on ``device``."""
        batches = tuple(batch._replace(gather=batch.gather.to(device)) for batch in self.batches)
        return PaddingPlan(batches, self.scatter.to(device))


# The key is the tensor's identity: all layers of a pass get the same tensor, and a plan ends with its micro-batch.
_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


def padding_plan(cu_seqlens: Tensor) -> PaddingPlan:
    """Plan for the sequences with boundaries ``cu_seqlens`` [S + 1]; cached as long as that tensor.

    The sequences of a batch are at least half as long as its longest; one batch holds all short
    ones (up to ``_SHORT`` tokens).
    """
    plan = _plans.get(cu_seqlens)
    if plan is None:
        plan = _plans[cu_seqlens] = _plan(cu_seqlens.tolist()).to(cu_seqlens.device)
    return plan


def _plan(bounds: list[int]) -> PaddingPlan:
    lengths = [b - a for a, b in pairwise(bounds)]
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    order = [i for i in longest_first if lengths[i]]
    batches = []
    scatter = torch.empty(bounds[-1], dtype=torch.int64)
    rows = 0
    first_sequence = 0
    while first_sequence < len(order):
        longest_length = lengths[order[first_sequence]]
        floor = 1 if longest_length <= _SHORT else (longest_length + 1) // 2
        end = first_sequence
        while end < len(order) and lengths[order[end]] >= floor:
            end += 1
        members = order[first_sequence:end]
        starts = torch.tensor([bounds[i] for i in members])[:, None]
        sizes = torch.tensor([lengths[i] for i in members])[:, None]
        column = torch.arange(longest_length)[None]
        real = column < sizes
        gather = torch.where(real, starts + column, starts)
        row = rows + torch.arange(gather.numel()).view_as(gather)
        scatter[gather[real]] = row[real]
        batches.append(PaddedBatch(gather.reshape(-1), len(members), longest_length))
        rows = rows + gather.numel()
        first_sequence = end
    return PaddingPlan(tuple(batches), scatter)
