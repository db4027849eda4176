"""Columns of several trajectories as one buffer of bytes on the ranks' device, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dppo.data.columns import Form, declared
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.rollouts.column_directory import Key
from megatron_dppo.trainer import platform

PIECE_BYTES = 256 * 2**20
"""Columns travel in pieces of at most this size, or of one array: a device has no room for more
beside the trainer's state."""


@dataclass(frozen=True)
class ColumnBytes:
    """Sender and receiver know the sizes of a batch's columns alike: lengths times ``forms``."""

    trajectories: Sequence[Trajectory]
    forms: Mapping[str, Form]

    def size(self, key: Key) -> int:
        """Bytes of one array."""
        position, name = key
        rows = declared(name).count(self.trajectories[position].loss_mask)
        return rows * self.forms[name].row_bytes

    def pieces(self, keys: Iterable[Key]) -> list[list[Key]]:
        """``keys`` in order, in runs of at most PIECE_BYTES, or of one."""
        pieces: list[list[Key]] = []
        filled = 0
        for key in keys:
            size = self.size(key)
            if not pieces or filled + size > PIECE_BYTES:
                pieces.append([])
                filled = 0
            pieces[-1].append(key)
            filled += size
        return pieces

    def joined(self, keys: Iterable[Key], arrays: Mapping[Key, np.ndarray]) -> torch.Tensor:
        """The arrays of ``keys``, end to end: uint8 [bytes]."""
        flat = np.concatenate([arrays[key].reshape(-1).view(np.uint8) for key in keys])
        return torch.from_numpy(flat).to(platform.current().device)

    def empty(self, keys: Iterable[Key]) -> torch.Tensor:
        """Room for them."""
        size = sum(self.size(key) for key in keys)
        return torch.empty(size, dtype=torch.uint8, device=platform.current().device)

    def split(self, keys: Iterable[Key], buffer: torch.Tensor) -> dict[Key, np.ndarray]:
        """The arrays in ``buffer``."""
        flat, arrays, start = buffer.cpu().numpy(), {}, 0
        for key in keys:
            form, end = self.forms[key[1]], start + self.size(key)
            array = flat[start:end].view(form.dtype).reshape(-1, *form.trailing)
            arrays[key] = np.require(array, requirements="A")
            start = end
        return arrays
