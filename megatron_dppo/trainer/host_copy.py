"""A copy in host memory of what a save writes, so that training may go on meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion.dist_blocks import Block
from megatron_dppo.system.scratch import aligned
from megatron_dppo.trainer import platform


class HostCopy:
    """One flat buffer that holds a rank's blocks; kept between saves, which all take the same.

    Fresh memory costs several times what the copy into it does, and more where it is pinned for a GPU.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, blocks: list[tuple[Block, Tensor]]) -> list[tuple[Block, Tensor]]:
        """``blocks`` with their elements copied into the buffer. What an earlier call returned is overwritten."""
        starts, end = aligned([block.bytes for block, _ in blocks])
        if self._buffer.numel() < end:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never two
            self._buffer = platform.host_buffer(end)
        copies = []
        for start, (block, values) in zip(starts, blocks, strict=True):
            place = self._buffer[start : start + block.bytes].view(block.dtype)
            copy = place.view(block.box.sizes)
            copy.copy_(values, non_blocking=True)
            copies.append((block, copy))
        platform.wait_for_copies()
        return copies
