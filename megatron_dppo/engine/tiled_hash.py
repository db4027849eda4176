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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.engine.tile_sums import (
    MASK32,
    MASK64,
    WORD,
    PartSums,
    Run,
    closed_sum,
    run_of,
    start_sums,
)

Part = tuple["TiledHash", Tensor, int]
"""The hash of a tensor, a part of it, and the byte at which the part begins."""


def tiled_hash(tensor: Tensor) -> str:
    """The checksum of a whole tensor, as the engine prints it."""
    whole = TiledHash(tensor.numel() * tensor.element_size())
    whole.add(tensor, 0)
    return whole.hexdigest()


def add_parts(parts: Sequence[Part]) -> Callable[[], None]:
    """Start to hash all of ``parts``, by one kernel; what is returned waits for it and adds the sums.

    The parts may change then, and on a GPU once their stream has gone on. Raises ValueError as
    ``TiledHash.add``.
    """
    runs = [(whole, whole.run(part, start)) for whole, part, start in parts]
    filled = [(whole, run) for whole, run in runs if run is not None]
    sums = start_sums([run for _, run in filled])

    def finish() -> None:
        for (whole, _), found in zip(filled, sums(), strict=True):
            whole.take(found)

    return finish


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
        add_parts([(self, part, start)])()

    def run(self, part: Tensor, start: int) -> Run | None:
        """A part as whole words, or None for an empty one. Raises ValueError as ``add``."""
        size = part.numel() * part.element_size()
        first, end = start // WORD, -(-(start + size) // WORD)
        if start % WORD or (size % WORD and end != self._words):
            raise ValueError(
                f"tiled hash: {size} bytes at byte {start} of {WORD * self._words}; parts must begin and end "
                f"at multiples of {WORD}"
            )
        return run_of(part, first, self._words) if size else None

    def take(self, sums: PartSums) -> None:
        """Add the sums of a part."""
        closed, edges = sums
        self._sum = (self._sum + closed) & MASK64
        for tile, high, low in edges:
            self._add_open(tile, high, low)

    def state(self) -> list[Any]:
        """What was taken, as plain JSON values for ``merge``."""
        return [self._sum, [[tile, *sums] for tile, sums in self._open.items()]]

    def merge(self, state: list[Any]) -> None:
        """Add what another hash of the same tensor took."""
        total, tiles = state
        self.take((total, tiles))

    def hexdigest(self) -> str:
        """16 hexadecimal digits of all that was taken; 0 for an empty tensor."""
        total = self._sum
        if self._open:
            total += closed_sum(torch.tensor(list(self._open.values())).T, self._words)
        return f"{_splitmix(total & MASK64):016x}"

    def _add_open(self, tile: int, high: int, low: int) -> None:
        before = self._open.get(tile, (0, 0))
        self._open[tile] = ((before[0] + high) & MASK32, (before[1] + low) & MASK32)


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
