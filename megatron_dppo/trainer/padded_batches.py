"""Sequences of a pack as padded batches of similar lengths, for torch operations that cannot read packs.

T = tokens of a pack, S = sequences in it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_SHORT = 32
"""Sequences of at most this many tokens share one batch: their padding costs less than one more batch."""


class PaddedBatch(NamedTuple):
    """Sequences of similar length, computed as one padded batch."""

    token_of_row: Tensor
    """int64 [sequences * longest]: for each position of the padded batch, the index of its token in the pack. Positions
    of padding have the index of the sequence's first token.
    """
    sequences: int
    longest: int

    def pad(self, values: Tensor) -> Tensor:
        """Return the values of this batch's sequences, padded. ``values`` has the values of the whole pack.

        [T, ...] -> [sequences, longest, ...].
        """
        rows = values.index_select(0, self.token_of_row)
        return rows.view(self.sequences, self.longest, *values.shape[1:])


class PaddingPlan(NamedTuple):
    """Indices that turn a pack into padded batches and the outputs back into a pack."""

    batches: tuple[PaddedBatch, ...]
    row_of_token: Tensor
    """int64 [T]: for each packed token, its row in the concatenated outputs of the padded batches."""

    def to(self, device: torch.device) -> PaddingPlan:
        """Return the plan with its indices on ``device``."""
        batches = []
        for batch in self.batches:
            batches.append(batch._replace(token_of_row=batch.token_of_row.to(device)))
        return PaddingPlan(tuple(batches), self.row_of_token.to(device))


# The key is the identity of ``cu_seqlens``: all layers of a pass get the same tensor. A plan is freed with the tensor.
_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


def padding_plan(cu_seqlens: Tensor) -> PaddingPlan:
    """Return the plan for the sequences with boundaries ``cu_seqlens`` [S + 1]; cached as long as that tensor exists.

    The sequences of a batch are at least half as long as the batch's longest sequence, with one exception: if all
    remaining sequences have at most ``_SHORT`` tokens, one batch holds all of them.
    """
    plan = _plans.get(cu_seqlens)
    if plan is None:
        plan = _build_plan(cu_seqlens.tolist()).to(cu_seqlens.device)
        _plans[cu_seqlens] = plan
    return plan


def _build_plan(bounds: list[int]) -> PaddingPlan:
    """Return the plan for the sequences between ``bounds``: batches of similar lengths, the longest first."""
    lengths = [end - start for start, end in pairwise(bounds)]
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    order = [i for i in longest_first if lengths[i]]
    batches = []
    row_of_token = torch.empty(bounds[-1], dtype=torch.int64)
    first_row = 0
    first_sequence = 0
    while first_sequence < len(order):
        longest_length = lengths[order[first_sequence]]
        shortest_length = 1 if longest_length <= _SHORT else (longest_length + 1) // 2
        end = first_sequence
        while end < len(order) and lengths[order[end]] >= shortest_length:
            end += 1
        members = order[first_sequence:end]
        starts = torch.tensor([bounds[i] for i in members])[:, None]
        sizes = torch.tensor([lengths[i] for i in members])[:, None]
        column = torch.arange(longest_length)[None]
        is_token = column < sizes
        tokens = torch.where(is_token, starts + column, starts)
        rows = first_row + torch.arange(tokens.numel()).view_as(tokens)
        row_of_token[tokens[is_token]] = rows[is_token]
        batches.append(PaddedBatch(tokens.reshape(-1), len(members), longest_length))
        first_row += tokens.numel()
        first_sequence = end
    return PaddingPlan(tuple(batches), row_of_token)
