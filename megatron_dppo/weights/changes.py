"""The changed items of a message's flat bytes.

Flat bytes are read as items of the size of their smallest dtype. The base is the same bytes of the update before. The
changes are the positions (int32) of the items that differ from the base, and the new values of these items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.engine.errors import EngineError

_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an item -> the dtype of values."""
_POSITION_BYTES = 4
_MOST_ITEMS = 2**31 - 1
"""Number of items whose positions fit into int32."""


class PositionError(EngineError, ValueError):
    """A change lies outside of its message."""


@dataclass(frozen=True)
class Changes:
    """The items of a message that changed.

    Attributes:
        positions: int32 ``[n]``, counted in items from the start of the message's flat bytes; at least one.
        values: the new items ``[n]``, as integers of their size.
    """

    positions: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        return self.positions.numel()

    def pieces(self) -> list[Tensor]:
        """Return the flat bytes to send: the positions, then the values."""
        return [self.positions.view(torch.uint8), self.values.view(torch.uint8)]


def item_dtype(item_bytes: int) -> torch.dtype:
    """Return the dtype of values of this size."""
    return _ITEMS[item_bytes]


def changes_bytes(count: int, item_bytes: int) -> tuple[int, int]:
    """Return the bytes of the positions and the bytes of the values of ``count`` changes."""
    return count * _POSITION_BYTES, count * item_bytes


def find_changes(data: Tensor, base: Tensor, item_bytes: int) -> Changes | None:
    """Return the items of the flat bytes ``data`` that differ from ``base``; None: send the whole message.

    None is returned if the changes would take as many bytes as ``data`` or more, or if a position may not fit into
    int32. If nothing changed, the first item is returned, because a message cannot be empty.
    """
    items = data.view(_ITEMS[item_bytes])
    if items.numel() > _MOST_ITEMS:
        return None
    positions = _true_positions(items != base.view(items.dtype))
    if positions.numel() * (_POSITION_BYTES + item_bytes) >= data.numel():
        return None
    if not positions.numel():
        positions = positions.new_zeros(1)
    return Changes(positions.to(torch.int32), items[positions])


def _true_positions(mask: Tensor) -> Tensor:
    """Return the positions of the true elements of a vector."""
    if mask.is_cuda:
        return mask.nonzero().view(-1)
    # On a CPU torch's function visits every element. numpy's function skips whole words of false elements.
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def apply_changes(data: Tensor, changes: Changes) -> None:
    """Write the changed items into the flat bytes ``data``. The positions were checked by ``kept_changes``."""
    items = data.view(changes.values.dtype)
    positions = changes.positions.to(data.device).long()
    items.index_copy_(0, positions, changes.values.to(data.device))


def kept_changes(changes: Changes, size: int) -> Changes:
    """Return copies, in host memory, of the changes of a message of ``size`` bytes.

    Raises PositionError for a position outside of the message.
    """
    items = size // changes.values.itemsize
    lowest_position, highest_position = map(int, torch.aminmax(changes.positions))
    if lowest_position < 0 or highest_position >= items:
        raise PositionError(
            f"weight update: changes at the items {lowest_position} to {highest_position} were received for a message "
            f"of {items} items"
        )
    return Changes(changes.positions.to("cpu", copy=True), changes.values.to("cpu", copy=True))
