"""The bytes that a trainer rank sent last. The next update compares its bytes with them, and sends only the changes."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.weights.changes import Changes, find_changes


class SentWeights:
    """The flat bytes of this rank's messages in the last update, in host memory, pinned for a GPU.

    The memory is as large as the weights that this rank sends. Each update overwrites the memory while it sends. So
    after a failed update the kept bytes belong to no version, and the next update must send all weights.
    """

    def __init__(self) -> None:
        self._messages: list[Tensor] = []
        self._next_message = 0
        self._is_base = False

    def begin(self, *, is_base: bool) -> None:
        """Start an update.

        ``is_base``: whether changes can be sent: the engines hold the bytes that are kept here, and the last update had
        the same plan.
        """
        self._next_message = 0
        self._is_base = is_base

    def changes(self, data: Tensor, item_bytes: int) -> Changes | None:
        """Keep the flat bytes of the next message; return their changes, or None if the message must be sent whole."""
        position = self._next_message
        self._next_message += 1
        if position == len(self._messages):
            new_message = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=data.is_cuda)
            self._messages.append(new_message.copy_(data))
            return None
        last_sent = self._messages[position]
        changes = None
        if self._is_base:
            changes = find_changes(data, last_sent.to(data.device), item_bytes)
        last_sent.copy_(data)
        return changes
