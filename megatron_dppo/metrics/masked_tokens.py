"""Which tokens the mask blocks, by id: counted on the device, read once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

SHOWN = 20
"""Ids that a record names, the most often blocked first."""


class MaskedToken(TypedDict):
    """How often a step's mask blocked a token id, by the sign of its advantage."""

    id: int
    raised: int
    """Times with A > 0: its probability would have been raised."""
    lowered: int


class NamedMaskedToken(MaskedToken):
    """The same with its text."""

    text: str


@dataclass
class MaskedTokenCounts:
    """Counts of a step: int32 ``[2, V]``, A > 0 and A < 0, on the device of the first ``add``.

    V: the true vocabulary. 8 bytes an id, 1.2 MB for 151,936; nothing here waits for the device.
    """

    vocab_size: int
    counts: Tensor | None = None

    def add(self, token_ids: Tensor, advantages: Tensor, blocked: Tensor) -> None:
        """Count a micro-batch's ``blocked`` tokens: int64 ids, advantages and bool, all ``[T]``.

        Blocked tokens with A = 0 train nothing anyway and are not counted.
        """
        if self.counts is None:
            self.counts = torch.zeros(
                (2, self.vocab_size), dtype=torch.int32, device=token_ids.device
            )
        for row, signed in enumerate((advantages > 0, advantages < 0)):
            self.counts[row].scatter_add_(0, token_ids, (blocked & signed).int())

    def clear(self) -> None:
        """Begin the next step."""
        if self.counts is not None:
            self.counts.zero_()


def most_masked(counts: Tensor, shown: int = SHOWN) -> list[MaskedToken]:
    """The ids blocked most often of ``counts`` [2, V], at most ``shown``; equals by rising id.

    Waits for the device.
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
    """``tokens`` with what each id reads as."""
    return [NamedMaskedToken(**token, text=text_of(token["id"])) for token in tokens]
