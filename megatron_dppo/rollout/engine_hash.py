"""SGLang's per-tensor checksums, computed part by part as a tensor's bytes arrive in order.

``/weights_checker`` hashes CPU tensors with SHA-256 and CUDA tensors with a tiled 64-bit mix; both
are 16 hexadecimal digits. Cost on one core with SHA extensions: about 0.55 s per GB for SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


class TensorHash(Protocol):
    """A checksum in the making."""

    def update(self, part: Tensor) -> None:
        """Take the next bytes of the tensor, any shape and dtype; row-major order."""

    def hexdigest(self) -> str:
        """The checksum of all that was taken, as the engine prints it."""


class Sha256Hash:
    """The engine's checksum of a CPU tensor: the first 8 bytes of SHA-256 over its bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, part: Tensor) -> None:
        """Hash the next part; the interpreter lock is released meanwhile."""
        self._hash.update(_bytes(part).cpu().numpy().data)

    def hexdigest(self) -> str:
        """16 hexadecimal digits."""
        return self._hash.hexdigest()[:16]


class TiledHash:
    """The engine's checksum of a CUDA tensor, on whatever device the parts are.

    With the tensor's bytes as little-endian 32-bit words ``v_i`` (zero-padded at the end) and ``n``
    their number::

        h(tile, s) = fmix(4n ^ sum_{i in tile} fmix(v_i ^ (i P + s) ^ rotl(i, r)))       mod 2^32
        checksum   = splitmix(sum_tile  h(tile, s1) 2^32 + h(tile, s2))                  mod 2^64

    where tiles are runs of 8192 words, ``fmix`` is MurmurHash3's 32-bit finaliser and ``splitmix``
    SplitMix64's. Words are mixed as int32, whose overflow is modular, in blocks of at most
    BLOCK_TILES tiles (memory: a few times 64 MiB).
    """

    TILE = 8192
    BLOCK_TILES = 2048
    SEED_1 = 0x243F6A88
    SEED_2 = ((SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & MASK32
    LANES = ((0x27D4EB2D, SEED_1, 15), (0x165667B1, SEED_2, 13))

    def __init__(self) -> None:
        self._words = 0
        self._sums: list[Tensor] = []
        self._open: list[int] = [0, 0]
        self._closed = False

    def update(self, part: Tensor) -> None:
        """Mix the next part's words into their tiles. Only the last part may end within a word."""
        if self._closed:
            raise ValueError(
                "tiled hash: a part whose bytes are no multiple of 4 must be the last one"
            )
        data = _bytes(part)
        ragged = -data.numel() % 4
        if ragged:
            self._closed = True
            data = torch.cat([data, data.new_zeros(ragged)])
        elif data.storage_offset() % 4:
            data = data.clone()
        words = data.view(torch.int32)
        while words.numel():
            step = self.TILE - self._words % self.TILE
            if step == self.TILE and words.numel() > self.TILE:
                step = min(words.numel() // self.TILE, self.BLOCK_TILES) * self.TILE
            self._mix(words[:step])
            words = words[step:]

    def _mix(self, words: Tensor) -> None:
        """Words of one unfinished tile, or of several whole ones."""
        count = words.numel()
        index = torch.arange(self._words, self._words + count, device=words.device).to(torch.int32)
        sums = []
        for multiplier, seed, turn in self.LANES:
            position = (index * _signed(multiplier) + _signed(seed)) ^ _rotate_left(index, turn)
            mixed = _fmix(words ^ position)
            tiles = mixed.view(-1, self.TILE) if count >= self.TILE else mixed.view(1, count)
            sums.append(tiles.sum(dim=1, dtype=torch.int64).cpu() & MASK32)
        self._words += count
        if count >= self.TILE:
            self._sums.append(torch.stack(sums))
            return
        self._open = [(a + int(b)) & MASK32 for a, b in zip(self._open, sums, strict=True)]
        if self._words % self.TILE == 0:
            self._close_tile()

    def _close_tile(self) -> None:
        self._sums.append(torch.tensor(self._open, dtype=torch.int64).view(2, 1))
        self._open = [0, 0]

    def hexdigest(self) -> str:
        """16 hexadecimal digits; 0 for an empty tensor."""
        if self._words == 0:
            return f"{0:016x}"
        tail = torch.tensor(self._open, dtype=torch.int64).view(2, 1)
        sums = torch.cat([*self._sums, *([tail] if self._words % self.TILE else [])], dim=1)
        high, low = (_fmix((sums ^ (4 * self._words & MASK32)).to(torch.int32))).to(torch.int64)
        total = (int((high & MASK32).sum()) << 32) + int((low & MASK32).sum())
        return f"{_splitmix(total & MASK64):016x}"


HASHES: dict[str, Callable[[], TensorHash]] = {"cpu": Sha256Hash, "cuda": TiledHash}
"""Checksum by the engine's device."""


def _bytes(part: Tensor) -> Tensor:
    return part.detach().contiguous().reshape(-1).view(torch.uint8)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift of int32."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _rotate_left(x: Tensor, by: int) -> Tensor:
    return (x << by) | _shift_right(x, 32 - by)


def _fmix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shift_right(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shift_right(x, 16)


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
