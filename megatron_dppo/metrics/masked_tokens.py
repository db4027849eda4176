"""Counts of the tokens that the mask blocks, by token id and by response.

A line of ``masked_tokens.jsonl`` is ``{"step": n, "tokens": [{"id", "raised", "lowered", "text"}, ...]}``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from megatron_dppo.metrics.records import MASKED_TOKENS_FILE, read_step_lines

MAX_MASKED_TOKENS = 50
"""Token ids of each sign of A in a line of ``masked_tokens.jsonl``, at most; the number of Appendix D of the paper."""


class MaskedToken(TypedDict):
    """The number of times that the mask blocked a token id in one step, by the sign of the advantage."""

    id: int
    raised: int
    """Times with A > 0: the update would have raised the token's probability."""
    lowered: int
    """Times with A < 0: the update would have lowered the token's probability."""


@dataclass
class MaskedTokenCounts:
    """Counts of blocked tokens of one step: int32 ``[2, V]``. Row 0: A > 0, row 1: A < 0; V: the unpadded vocabulary.

    The first ``add`` allocates the counts on the device of its tokens (8 V bytes: 1.2 MB for V = 151,936). No device
    sync.
    """

    vocab_size: int
    counts: Tensor | None = None

    def add(self, token_ids: Tensor, advantages: Tensor, blocked: Tensor) -> None:
        """Count the blocked tokens of a micro-batch. Tokens with A = 0 do not count: they have no gradient anyway.

        Args:
            token_ids: int64 ``[T]``.
            advantages: float ``[T]``.
            blocked: bool ``[T]``.
        """
        if self.counts is None:
            self.counts = torch.zeros(
                (2, self.vocab_size), dtype=torch.int32, device=token_ids.device
            )
        for row, has_sign in enumerate((advantages > 0, advantages < 0)):
            self.counts[row].scatter_add_(0, token_ids, (blocked & has_sign).int())

    def clear(self) -> None:
        """Set all counts to 0, for the next step."""
        if self.counts is not None:
            self.counts.zero_()


@dataclass
class MaskedResponses:
    """Number of blocked tokens of each response in one step. There is no device sync before ``counts``."""

    _parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self, positions: Tensor, cu_seqlens: Tensor, advantages: Tensor, blocked: Tensor
    ) -> None:
        """Count each sequence's blocked tokens of a micro-batch. Tokens with A = 0 do not count: they have no gradient
        anyway.

        Args:
            positions: int64 ``[S]``, position of each sequence's response in the batch; -1 for padding.
            cu_seqlens: int32 ``[S + 1]``, boundaries of the sequences.
            advantages: float ``[T]``.
            blocked: bool ``[T]``.
        """
        # Take differences of a running sum: a loop over sequences would synchronise with the device for each.
        is_counted = (blocked & (advantages != 0)).long()
        running_sum = torch.nn.functional.pad(is_counted.cumsum(0), (1, 0))
        sums_at_bounds = running_sum[cu_seqlens.to(running_sum.device, torch.int64)]
        self._parts.append((positions, sums_at_bounds.diff()))

    def counts(self) -> dict[int, int]:
        """Return the number of blocked tokens by position in the batch, for responses that have some. Device sync."""
        total = Counter[int]()
        for positions, counts in self._parts:
            # A response with several branches has several sequences.
            for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
                if position >= 0 and count > 0:
                    total[position] += count
        return dict(total)


def most_masked(counts: Tensor, limit: int = MAX_MASKED_TOKENS) -> list[MaskedToken]:
    """Return the ids with the largest counts at A > 0 and those at A < 0, up to ``limit`` each.

    The ids are in descending order of both counts together; ties in the order of ids. ``counts``: int ``[2, V]``, as
    in ``MaskedTokenCounts``. Device sync.
    """
    most_ids: list[Tensor] = []
    for sign_counts in counts:
        blocked_id_count = int(sign_counts.count_nonzero())
        # Sort stably, unlike topk: the order of equal counts is then the same on every device.
        order = torch.argsort(sign_counts, descending=True, stable=True)
        most_ids.append(order[: min(blocked_id_count, limit)])
    # ``unique`` sorts the ids, so that ties of the stable sort are in the order of ids.
    ids = torch.cat(most_ids).unique()
    ids = ids[torch.argsort(counts[:, ids].sum(0), descending=True, stable=True)]
    raised, lowered = counts[:, ids].tolist()
    tokens: list[MaskedToken] = []
    for token_id, raised_count, lowered_count in zip(ids.tolist(), raised, lowered, strict=True):
        tokens.append(MaskedToken(id=token_id, raised=raised_count, lowered=lowered_count))
    return tokens


def read_masked_tokens(directory: str | Path, step: int) -> list[MaskedToken] | None:
    """Return the tokens that the step's mask blocked most often; None for a step without a line in the file.

    Raises RecordsError.
    """
    for line in read_step_lines(Path(directory) / MASKED_TOKENS_FILE):
        if line["step"] == step:
            tokens: list[MaskedToken] = []
            for token in line["tokens"]:
                # The line also has the token's text. Leave the text out.
                tokens.append(
                    MaskedToken(id=token["id"], raised=token["raised"], lowered=token["lowered"])
                )
            return tokens
    return None
