"""Counts of the tokens that the mask blocks, by token id and by response: summed on the device, read once a step.

A line of ``masked_tokens.jsonl`` is ``{"step": n, "tokens": [{"id", "raised", "lowered", "text"}, ...]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from megatron_dppo.metrics.file_names import MASKED_TOKENS_FILE
from megatron_dppo.metrics.step_lines import read_step_lines

SHOWN = 20
"""Largest number of ids in a record."""


class MaskedToken(TypedDict):
    """How often the mask blocked a token id in one step, by the sign of the advantage."""

    id: int
    raised: int
    """Times with A > 0: the update would have raised its probability."""
    lowered: int
    """Times with A < 0."""


class NamedMaskedToken(MaskedToken):
    """A ``MaskedToken`` with the token's text."""

    text: str


@dataclass
class MaskedTokenCounts:
    """Counts of one step: int32 ``[2, V]``, rows A > 0 and A < 0, V the unpadded vocabulary.

    Allocated by the first ``add``, on its device (8 V bytes: 1.2 MB for V = 151,936). No device
    sync.
    """

    vocab_size: int
    counts: Tensor | None = None

    def add(self, token_ids: Tensor, advantages: Tensor, blocked: Tensor) -> None:
        """Count the blocked tokens of a micro-batch. Tokens with A = 0 have no gradient, not counted.

        Args:
            token_ids: int64 ``[T]``.
            advantages: float ``[T]``.
            blocked: bool ``[T]``.
        """
        if self.counts is None:
            self.counts = torch.zeros(
                (2, self.vocab_size), dtype=torch.int32, device=token_ids.device
            )
        for row, signed in enumerate((advantages > 0, advantages < 0)):
            self.counts[row].scatter_add_(0, token_ids, (blocked & signed).int())

    def clear(self) -> None:
        """Set all counts to 0, for the next step."""
        if self.counts is not None:
            self.counts.zero_()


@dataclass
class MaskedResponses:
    """How many tokens of each response the mask blocked in one step; no device sync before ``counts``."""

    _parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self, positions: Tensor, cu_seqlens: Tensor, advantages: Tensor, blocked: Tensor
    ) -> None:
        """Count the blocked tokens of a micro-batch by sequence. Tokens with A = 0 have no gradient, not counted.

        Args:
            positions: int64 ``[S]``, of the responses in their batch; -1: none, padding.
            cu_seqlens: int32 ``[S + 1]``, where the sequences begin and the last one ends.
            advantages: float ``[T]``.
            blocked: bool ``[T]``.
        """
        summed = torch.nn.functional.pad((blocked & (advantages != 0)).long().cumsum(0), (1, 0))
        ends = summed[cu_seqlens.to(summed.device, torch.int64)]
        self._parts.append((positions, ends.diff()[: len(positions)]))

    def counts(self) -> dict[int, int]:
        """Blocked tokens by position in the batch, of the responses that have any. Device sync."""
        return {
            position: count
            for positions, counts in self._parts
            for position, count in zip(positions.tolist(), counts.tolist(), strict=True)
            if position >= 0 and count
        }


def most_masked(counts: Tensor, shown: int = SHOWN) -> list[MaskedToken]:
    """The at most ``shown`` ids with the largest counts, descending; ties in the order of ids.

    ``counts``: int ``[2, V]``, as in ``MaskedTokenCounts``. Device sync.
    """
    total = counts.sum(0)
    found = int(total.count_nonzero())
    ids = torch.argsort(total, descending=True, stable=True)[: min(found, shown)]
    raised, lowered = counts[:, ids].tolist()
    return [
        MaskedToken(id=token, raised=up, lowered=down)
        for token, up, down in zip(ids.tolist(), raised, lowered, strict=True)
    ]


def with_text(
    tokens: Sequence[MaskedToken], text_of: Callable[[int], str]
) -> list[NamedMaskedToken]:
    """``tokens`` with the text of each id."""
    return [NamedMaskedToken(**token, text=text_of(token["id"])) for token in tokens]


def read_masked_tokens(directory: str | Path, step: int) -> list[MaskedToken] | None:
    """The tokens that the step's mask blocked most often; None where nothing is recorded of it.

    Raises RecordsError.
    """
    for line in read_step_lines(Path(directory) / MASKED_TOKENS_FILE):
        if line["step"] == step:
            return [
                MaskedToken(id=t["id"], raised=t["raised"], lowered=t["lowered"])
                for t in line["tokens"]
            ]
    return None
