"""SGLang's checksum of a tensor on a GPU, computed part by part, in any order and by several ranks.

``/weights_checker`` hashes CUDA tensors with this tiled 64-bit mix (16 hexadecimal digits); on a CPU
our platform plugin has it do the same in place of SHA-256, which takes ten times as long and can't
be put together from parts. With the tensor's bytes as little-endian 32-bit words ``v_i`` (zero-padded
at the end) and ``n`` their number::

    h(tile, s) = fmix(4n ^ sum_{i in tile} fmix(v_i ^ (i P + s) ^ rotl(i, r)))       mod 2^32
    checksum   = splitmix(sum_tile  h(tile, s1) 2^32 + h(tile, s2))                  mod 2^64

where tiles are runs of 8192 words, ``fmix`` is MurmurHash3's 32-bit finaliser and ``splitmix``
SplitMix64's. It finds accidents, not adversaries.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.system.cpp_build import KernelBuildError, build_library

log = logging.getLogger(__name__)

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
WORD = 4
TILE = 8192
BLOCK_TILES = 2048
SEED_1 = 0x243F6A88
SEED_2 = ((SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & MASK32
LANES = ((0x27D4EB2D, SEED_1, 15), (0x165667B1, SEED_2, 13))
SOURCE = Path(__file__).parent / "kernels" / "tile_sums.cpp"


def tiled_hash(tensor: Tensor) -> str:
    """The checksum of a whole tensor, as the engine prints it."""
    whole = TiledHash(tensor.numel() * tensor.element_size())
    whole.add(tensor, 0)
    return whole.hexdigest()


class TiledHash:
    """The checksum of a tensor of ``size`` bytes in the making: a sum over the parts that came by.

    A tile is closed when one part covers it, and kept open where parts share it.
    """

    def __init__(self, size: int) -> None:
        self._words = -(-size // WORD)
        self._sum = 0
        self._open: dict[int, tuple[int, int]] = {}

    def add(self, part: Tensor, start: int) -> None:
        """Take the bytes from ``start`` on (any shape and dtype; row-major order), each once.

        Raises ValueError where they begin within a word, or end within one before the tensor ends.
        """
        data = part.detach().contiguous().reshape(-1).view(torch.uint8)
        first, end = start // WORD, -(-(start + data.numel()) // WORD)
        ragged = -data.numel() % WORD
        if start % WORD or (ragged and end != self._words):
            raise ValueError(
                f"tiled hash: {data.numel()} bytes at byte {start} of {WORD * self._words}; parts "
                f"must begin and end at multiples of {WORD}"
            )
        if ragged:
            data = torch.cat([data, data.new_zeros(ragged)])
        if data.numel() == 0:
            return
        closed, edges = tile_sums(data, first, self._words)
        self._sum = (self._sum + closed) & MASK64
        for tile, high, low in edges:
            self._add_open(tile, high, low)

    def state(self) -> list[Any]:
        """What was taken, as plain JSON values for ``merge``."""
        return [self._sum, [[tile, *sums] for tile, sums in self._open.items()]]

    def merge(self, state: list[Any]) -> None:
        """Add what another hash of the same tensor took."""
        total, tiles = state
        self._sum = (self._sum + total) & MASK64
        for tile, high, low in tiles:
            self._add_open(tile, high, low)

    def hexdigest(self) -> str:
        """16 hexadecimal digits of all that was taken; 0 for an empty tensor."""
        if self._words == 0:
            return f"{0:016x}"
        total = self._sum
        if self._open:
            total += _closed(torch.tensor(list(self._open.values())).T, self._words)
        return f"{_splitmix(total & MASK64):016x}"

    def _add_open(self, tile: int, high: int, low: int) -> None:
        before = self._open.get(tile, (0, 0))
        self._open[tile] = ((before[0] + high) & MASK32, (before[1] + low) & MASK32)


Edge = tuple[int, int, int]
"""A tile that a part shares with others, and its two inner sums over that part."""


def tile_sums(data: Tensor, first: int, total: int) -> tuple[int, list[Edge]]:
    """What the tiles that ``data`` covers add to the checksum of ``total`` words, and its edges.

    ``data``: whole words as ``uint8``, contiguous, at least one; it begins at word ``first``.
    """
    kernel = _kernel() if data.device.type == "cpu" else None
    if kernel is None:
        return tile_sums_by_torch(data, first, total)
    words = data.numel() // WORD
    sums = (ctypes.c_uint32 * 4)()
    closed = kernel(data.data_ptr(), words, first, total, sums)
    return closed, [(tile, sums[at], sums[at + 1]) for tile, at in _edges(first, words, total)]


def tile_sums_by_torch(data: Tensor, first: int, total: int) -> tuple[int, list[Edge]]:
    """``tile_sums`` on any device, in blocks of BLOCK_TILES tiles (memory: a few times 64 MiB)."""
    words = (data.clone() if data.storage_offset() % WORD else data).view(torch.int32)
    edges = _edges(first, words.numel(), total)
    blocks, at = [], first
    while words.numel():
        step = TILE - at % TILE
        if step == TILE and words.numel() > TILE:
            step = min(words.numel() // TILE, BLOCK_TILES) * TILE
        blocks.append(_mix(words[:step], at))
        at += min(step, words.numel())
        words = words[step:]
    sums = torch.cat(blocks, dim=1)
    shared = {tile - first // TILE for tile, _ in edges}
    covered = [i for i in range(sums.shape[1]) if i not in shared]
    opened = [(tile, *sums[:, tile - first // TILE].tolist()) for tile, _ in edges]
    return _closed(sums[:, covered], total), opened


def _edges(first: int, words: int, total: int) -> list[tuple[int, int]]:
    """Tiles that these words share with others; 0 beside the one where they begin, 2 beside a later."""
    end = first + words
    edges = []
    if first % TILE or (end < total and end // TILE == first // TILE):
        edges.append((first // TILE, 0))
    if end % TILE and end < total and end // TILE != first // TILE:
        edges.append((end // TILE, 2))
    return edges


def _closed(sums: Tensor, total: int) -> int:
    """What tiles of inner sums int64 [2, tiles] add to the checksum of ``total`` words."""
    high, low = _fmix((sums ^ (WORD * total & MASK32)).to(torch.int32)).to(torch.int64)
    return ((int((high & MASK32).sum()) << 32) + int((low & MASK32).sum())) & MASK64


def _mix(words: Tensor, first: int) -> Tensor:
    """Words of one tile, or of several whole ones. int32 overflows modulo 2^32."""
    count = words.numel()
    index = torch.arange(first, first + count, device=words.device).to(torch.int32)
    sums = []
    for multiplier, seed, turn in LANES:
        position = (index * _signed(multiplier) + _signed(seed)) ^ _rotate_left(index, turn)
        mixed = _fmix(words ^ position)
        tiles = mixed.view(-1, TILE) if count >= TILE else mixed.view(1, count)
        sums.append(tiles.sum(dim=1, dtype=torch.int64).cpu() & MASK32)
    return torch.stack(sums)


@functools.cache
def _kernel() -> Any | None:
    """The compiled loop; None, told once, where there is no compiler."""
    try:
        function = build_library(SOURCE).tile_sums
    except KernelBuildError as error:
        log.warning("weight checksums run in torch, which is slower: %s", error)
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, integer, integer, integer, pointer]
    function.restype = ctypes.c_uint64
    return function


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
