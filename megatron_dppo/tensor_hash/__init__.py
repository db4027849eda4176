"""SGLang's checksum of GPU tensors, computed from parts in any order. The computation runs on CPUs and GPUs.

SGLang's ``/weights_checker`` hashes CUDA tensors with this tiled 64-bit mix (16 hexadecimal digits). On a CPU our
platform plugin makes SGLang use this hash instead of SHA-256. SHA-256 takes ten times as long and cannot be combined
from parts. Let ``v_i`` be the tensor's bytes as little-endian 32-bit words, zero-padded at the end, and ``n`` the
number of words::

    inner(tile, lane) = sum_{i in tile} fmix(v_i ^ (i P + s) ^ rotl(i, r))              mod 2^32
    h(tile, lane)     = fmix(4n ^ inner(tile, lane))                                    mod 2^32
    checksum          = splitmix(sum_tile (h(tile, lane 1) 2^32 + h(tile, lane 2)))     mod 2^64

A tile is a run of 8192 words. Each of the two lanes has its own multiplier P, seed s and rotation r (``LANES``).
``fmix`` is MurmurHash3's 32-bit finaliser and ``splitmix`` SplitMix64's. The hash detects accidents, not adversaries.
``inner`` is called the inner sum. The sums are computed in C++ on a CPU (in torch if there is no compiler), and in
Triton on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.system.kernels import KernelBuildError, build_library

log = logging.getLogger(__name__)

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1
WORD = 4
"""Bytes of a word."""
TILE = 8192
"""Words of a tile."""
BLOCK_TILES = 2048
"""Tiles that torch hashes at a time."""
SCATTERED_WORDS = 1 << 20
"""Words that ``scattered_sums`` handles at a time."""
SEED_1 = 0x243F6A88
SEED_2 = ((SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & MASK32
LANES = ((0x27D4EB2D, SEED_1, 15), (0x165667B1, SEED_2, 13))
"""Multiplier P, seed s and rotation r of the two lanes."""
SOURCE = Path(__file__).parent / "tile_sums.cpp"

Edge: TypeAlias = tuple[int, int, int]
"""A tile that a part of the tensor covers only in part: (number of the tile, inner sum of lane 1, inner sum of lane 2).
The inner sums are over the part's words in the tile."""
PartSums: TypeAlias = tuple[int, Sequence[Edge]]
"""(sum, edges): the sum of h(lane 1) 2^32 + h(lane 2) over the tiles that a part covers whole (``closed_sum``), and the
edges of the part."""


@dataclass(frozen=True, slots=True)
class WordRun:
    """A part of a tensor as whole 32-bit words.

    Attributes:
        data: ``uint8`` [rows, bytes]. Each row is contiguous, and the rows are consecutive in the tensor.
        first: index of the part's first word in the tensor.
        total: number of words of the whole tensor.
    """

    data: Tensor
    first: int
    total: int

    @property
    def words(self) -> int:
        return self.data.numel() // WORD

    @property
    def kernel_arguments(self) -> tuple[int, ...]:
        """A kernel's numbers of this part: address, words, words of a row, stride of rows in words, first, total."""
        rows = self.data
        width = rows.shape[1] // WORD
        stride = rows.stride(0) // WORD
        return rows.data_ptr(), self.words, width, stride, self.first, self.total

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The tiles that these words do not cover whole: at most the first tile and the last tile.

        A kernel returns four edge sums: the inner sums of lane 1 and lane 2, for the first tile, then for the last
        tile. Each tile comes with the index of its lane 1 among them, 0 or 2.
        """
        end = self.first + self.words
        first_tile = self.first // TILE
        # The tile in which the words end. If they end between two tiles, it is the tile after them.
        end_tile = end // TILE
        begins_inside = self.first % TILE != 0
        # The tensor's last tile may be short. Words that reach the tensor's end do not end inside this tile.
        ends_inside = end % TILE != 0 and end < self.total
        edges = []
        # If the words begin and end in the same tile, this tile is only the first tile.
        if begins_inside or (ends_inside and end_tile == first_tile):
            edges.append((first_tile, 0))
        if ends_inside and end_tile != first_tile:
            edges.append((end_tile, 2))
        return edges


def run_of(part: Tensor, first: int, total: int) -> WordRun:
    """Make a WordRun of ``part``. The part begins at word ``first`` of a tensor of ``total`` words.

    ``part`` is not empty and has any shape and dtype. The run is a view if the part is a block of whole words;
    otherwise it is a copy, padded with zeros to whole words.
    """
    rows = _rows(part.detach())
    if rows is None:
        flat = part.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() % WORD:
            flat = torch.cat([flat, flat.new_zeros(-flat.numel() % WORD)])
        elif flat.data_ptr() % WORD:
            # Kernels read 32-bit words, whose addresses must be multiples of 4.
            flat = flat.clone()
        rows = flat.unsqueeze(0)
    return WordRun(rows, first, total)


def start_sums(runs: Sequence[WordRun]) -> Callable[[], list[PartSums]]:
    """Start one kernel over ``runs``, which are on one device. Returns a function that waits for the sums."""
    if runs and runs[0].data.is_cuda:
        from megatron_dppo.tensor_hash.tile_sums_triton import start

        return start(runs)
    sums = sums_on_cpu(runs)
    return lambda: sums


def sums_on_cpu(runs: Sequence[WordRun]) -> list[PartSums]:
    """Compute the sums by one call of the C++ kernel, or by torch if the kernel cannot be compiled."""
    kernel = _kernel() if runs else None
    if kernel is None:
        return [sums_by_torch(run) for run in runs]
    arguments = np.array([run.kernel_arguments for run in runs], dtype=np.int64)
    closed_sums = np.zeros(len(runs), dtype=np.uint64)
    edge_sums = np.zeros((len(runs), 4), dtype=np.uint32)
    kernel(len(runs), arguments.ctypes.data, closed_sums.ctypes.data, edge_sums.ctypes.data)
    return collect([run.edges for run in runs], closed_sums.tolist(), edge_sums.tolist())


def collect(
    edges: Sequence[Sequence[tuple[int, int]]],
    closed_sums: Sequence[int],
    edge_sums: Sequence[Sequence[int]],
) -> list[PartSums]:
    """Combine a kernel's results by part.

    Args:
        edges: ``WordRun.edges`` of each part.
        closed_sums: ``closed_sum`` of the tiles that each part covers whole.
        edge_sums: [parts, 4]: lane 1 and lane 2 of the first tile's inner sums, then of the last tile's.
    """
    parts: list[PartSums] = []
    for part_edges, closed, sums in zip(edges, closed_sums, edge_sums, strict=True):
        parts.append((closed, [(tile, sums[i], sums[i + 1]) for tile, i in part_edges]))
    return parts


def sums_by_torch(run: WordRun) -> PartSums:
    """Compute the sums in torch on any device, in blocks of BLOCK_TILES tiles (memory: a few times 64 MiB)."""
    remaining_words = run.data.contiguous().reshape(-1).view(torch.int32)
    # The inner sums of each block's tiles, [2, tiles].
    blocks = []
    first = run.first
    while remaining_words.numel():
        # ``_mix`` requires words of a single tile, or whole tiles only.
        # The block goes to the end of its tile (or to the last word), or has all whole tiles up to BLOCK_TILES.
        size = TILE - first % TILE
        whole_tiles = remaining_words.numel() // TILE
        if size == TILE and whole_tiles:
            size = min(whole_tiles, BLOCK_TILES) * TILE
        blocks.append(_mix(remaining_words[:size], first))
        first += min(size, remaining_words.numel())
        remaining_words = remaining_words[size:]
    sums = torch.cat(blocks, dim=1)
    first_tile = run.first // TILE
    edge_columns = {tile - first_tile for tile, _ in run.edges}
    closed_columns = [i for i in range(sums.shape[1]) if i not in edge_columns]
    edges = [(tile, *sums[:, tile - first_tile].tolist()) for tile, _ in run.edges]
    return closed_sum(sums[:, closed_columns], run.total), edges


def closed_sum(sums: Tensor, total: int) -> int:
    """Return the sum over tiles of h(lane 1) 2^32 + h(lane 2), for a tensor of ``total`` words.

    ``sums``: the lanes' inner sums over each whole tile, int64 [2, tiles].
    """
    size = WORD * total & MASK32
    hashes = _fmix((sums ^ size).to(torch.int32)).to(torch.int64) & MASK32
    high, low = hashes.sum(1).tolist()
    return ((high << 32) + low) & MASK64


def _rows(part: Tensor) -> Tensor | None:
    """View ``part`` as ``uint8`` rows of whole words; None if its memory layout needs a copy."""
    dim, width = _row(part)
    pairs = zip(part.shape[:dim], part.stride()[:dim], strict=True)
    outer_dims = [(size, stride) for size, stride in pairs if size > 1]
    # The rows must have a constant stride: each outer dimension's stride must be the next dimension's size x stride.
    for (_, stride), (next_size, next_stride) in itertools.pairwise(outer_dims):
        if stride != next_size * next_stride:
            return None
    row_stride = outer_dims[-1][1] if outer_dims else width
    rows = part.as_strided((part.numel() // width, width), (row_stride, 1)).view(torch.uint8)
    measures = (rows.data_ptr(), rows.shape[1], rows.stride(0))
    if any(measure % WORD for measure in measures):
        return None
    return rows


def _row(view: Tensor) -> tuple[int, int]:
    """Return the first of the last dimensions that are contiguous together, and the elements of such a row."""
    dim, width = view.dim(), 1
    while dim and (view.shape[dim - 1] == 1 or view.stride(dim - 1) == width):
        dim -= 1
        width *= view.shape[dim]
    return dim, width


def _mix(data: Tensor, first: int) -> Tensor:
    """Compute both lanes' inner sums of a tile, of a part of a tile, or of several whole tiles: int64 [2, tiles].

    int32 overflows modulo 2^32, as the formula requires.
    """
    count = data.numel()
    index = torch.arange(first, first + count, device=data.device).to(torch.int32)
    sums = []
    for mixed in _mixed(data, index):
        tiles = mixed.view(-1, TILE) if count >= TILE else mixed.view(1, count)
        # Sum in int64: a tile's sum cannot overflow. Reduce modulo 2^32 afterwards.
        sums.append(tiles.sum(dim=1, dtype=torch.int64).cpu() & MASK32)
    return torch.stack(sums)


def _mixed(data: Tensor, index: Tensor) -> Iterator[Tensor]:
    """Yield the terms of both lanes' inner sums for the words ``data`` with these indices, int32."""
    for multiplier, seed, rotation in LANES:
        position = (index * _signed(multiplier) + _signed(seed)) ^ _rotate_left(index, rotation)
        yield _fmix(data ^ position)


def scattered_sums(rows: Tensor, first_words: Tensor) -> list[Edge]:
    """Compute the inner sums of rows that do not follow each other in a tensor, for each tile, in torch.

    ``rows``: ``uint8`` [rows, bytes], of whole words. ``first_words``: int64 [rows], the index of each row's first word
    in the tensor.
    """
    data = rows.contiguous().view(torch.int32)
    first_words = first_words.to(data.device)
    sums: dict[int, tuple[int, int]] = {}
    step = max(1, SCATTERED_WORDS // data.shape[1])
    for first_row in range(0, len(data), step):
        words = data[first_row : first_row + step]
        index = first_words[first_row : first_row + step, None] + torch.arange(
            data.shape[1], device=data.device
        )
        tiles, places = torch.unique(index.flatten() // TILE, return_inverse=True)
        lanes = torch.zeros(2, len(tiles), dtype=torch.int64, device=data.device)
        for lane, mixed in zip(lanes, _mixed(words, index.to(torch.int32)), strict=True):
            lane.index_add_(0, places, mixed.flatten().to(torch.int64))
        for tile, sum_1, sum_2 in zip(tiles.tolist(), *(lanes & MASK32).tolist(), strict=True):
            _add_edge(sums, (tile, sum_1, sum_2))
    return [(tile, *tile_sums) for tile, tile_sums in sums.items()]


def _add_edge(sums: dict[int, tuple[int, int]], edge: Edge) -> None:
    tile, sum_1, sum_2 = edge
    tile_1, tile_2 = sums.get(tile, (0, 0))
    sums[tile] = ((tile_1 + sum_1) & MASK32, (tile_2 + sum_2) & MASK32)


@functools.cache
def _kernel() -> Any | None:
    """Return the compiled C++ loop, or None (with one warning) if there is no compiler."""
    try:
        function = build_library(SOURCE).tile_sums
    except KernelBuildError as error:
        log.warning("weight checksums run in torch, which is slower: %s", error)
        return None
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
    function.restype = None
    return function


def _signed(value: int) -> int:
    """Return the int32 with the bits of the uint32 ``value``."""
    return value - (1 << 32) if value >> 31 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int32 right logically."""
    # torch shifts arithmetically: mask off the copies of the sign bit.
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shift_right(x, 32 - bits)


def _fmix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shift_right(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shift_right(x, 16)


Part = tuple["TiledHash", Tensor, int]
"""The hash of a tensor, a part of the tensor, and the number of the part's first byte in the tensor."""


def tiled_hash(tensor: Tensor) -> str:
    """Return the checksum of ``tensor`` as 16 hexadecimal digits."""
    tensor_hash = TiledHash(tensor.numel() * tensor.element_size())
    tensor_hash.add(tensor, 0)
    return tensor_hash.hexdigest()


def add_parts(parts: Sequence[Part]) -> Callable[[], None]:
    """Start one kernel that hashes all of ``parts``. Returns a function that waits for the kernel and adds the sums.

    Change the parts only after the returned function has ended. On a GPU, there is an exception: operations that are
    queued in the kernel's stream may change the parts, because they run after the kernel. Raises ValueError as
    ``TiledHash.add`` does.
    """
    hashes: list[TiledHash] = []
    runs: list[WordRun] = []
    for tensor_hash, part, start in parts:
        run = tensor_hash.run(*tensor_hash.without_fragments(part, start))
        if run is not None:
            hashes.append(tensor_hash)
            runs.append(run)
    wait_for_sums = start_sums(runs)

    def finish() -> None:
        for tensor_hash, part_sums in zip(hashes, wait_for_sums(), strict=True):
            tensor_hash.add_sums(part_sums)

    return finish


Place: TypeAlias = "int | Tensor"
"""Where a part lies in a tensor: the number of its first byte, or a view with the part's shape of a vector, on the
device "meta", that stands for the whole tensor."""


def add_placed(parts: Sequence[tuple[TiledHash, Tensor, Place]]) -> Callable[[], None]:
    """Start to hash ``parts``, each with its place. Returns a function as ``add_parts`` does."""
    runs: list[Part] = []
    scattered: list[tuple[TiledHash, Sequence[Edge]]] = []
    for tensor_hash, part, place in parts:
        if isinstance(place, int):
            runs.append((tensor_hash, part, place))
            continue
        starts, rows = _rows_at(part, place)
        if rows.shape[1] % WORD or (starts % WORD).any():
            for start, row in zip(starts.tolist(), rows, strict=True):
                runs.append((tensor_hash, row, start))
        else:
            scattered.append((tensor_hash, scattered_sums(rows, starts // WORD)))
    finish_runs = add_parts(runs)

    def finish() -> None:
        finish_runs()
        for tensor_hash, edges in scattered:
            tensor_hash.add_sums((0, edges))

    return finish


def _rows_at(part: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first byte of each run of elements in ``view``, and the runs' bytes in ``part``, ``uint8``."""
    dim, _ = _row(view)
    starts = torch.tensor(int(view.storage_offset()))
    for length, stride in zip(view.shape[:dim], view.stride()[:dim], strict=True):
        starts = starts.unsqueeze(-1) + stride * torch.arange(length)
    starts = starts.flatten() * part.element_size()
    rows = part.detach().contiguous().view(torch.uint8).view(len(starts), -1)
    return starts, rows


class TiledHash:
    """The checksum of a tensor of ``size`` bytes, computed from its parts in any order.

    If one part covers a tile whole, the tile is added to the checksum at once. If several parts share a tile, the inner
    sums of the parts are added up, and ``hexdigest`` adds the tile. If several parts share a word, the word's bytes are
    kept, and ``hexdigest`` adds the word.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._words = -(-size // WORD)
        self._sum = 0
        self._shared_tiles: dict[int, tuple[int, int]] = {}
        self._fragments: dict[int, int] = {}
        """The bytes of shared words, by their number in the tensor."""

    def add(self, part: Tensor, start: int) -> None:
        """Add the bytes of ``part`` (any shape and dtype, row-major order). The part begins at byte ``start`` of the
        tensor.

        Every byte of the tensor must be added once. Raises ValueError if the part ends outside of the tensor.
        """
        add_parts([(self, part, start)])()

    def without_fragments(self, part: Tensor, start: int) -> tuple[Tensor, int]:
        """Keep the bytes of the words that the part has only partly. Return the rest of the part, and its start."""
        size = part.numel() * part.element_size()
        end = start + size
        head = min(-start % WORD, size)
        tail = 0 if end == self._size else min(end % WORD, size - head)
        if head == tail == 0:
            return part, start
        flat = part.detach().contiguous().reshape(-1).view(torch.uint8)
        for first, piece in ((start, flat[:head]), (end - tail, flat[size - tail :])):
            self._fragments.update(enumerate(piece.tolist(), first))
        return flat[head : size - tail], start + head

    def run(self, part: Tensor, start: int) -> WordRun | None:
        """Return the part as whole words, or None if it is empty. Raises ValueError as ``add`` does."""
        size = part.numel() * part.element_size()
        first = start // WORD
        if start + size > self._size:
            raise ValueError(
                f"tiled hash: {size} bytes at byte {start} of a tensor of {self._size} bytes"
            )
        if size:
            return run_of(part, first, self._words)
        return None

    def add_sums(self, sums: PartSums) -> None:
        """Add the sums of one part."""
        closed, edges = sums
        self._sum = (self._sum + closed) & MASK64
        for edge in edges:
            _add_edge(self._shared_tiles, edge)

    def state(self) -> list[Any]:
        """Return the sums so far as JSON values, the argument of ``merge``."""
        edges = [[tile, *sums] for tile, sums in self._shared_tiles.items()]
        return [self._sum, edges, list(self._fragments.items())]

    def merge(self, state: list[Any]) -> None:
        """Add the ``state`` of another hash of the same tensor."""
        self.add_sums((state[0], state[1]))
        self._fragments.update(map(tuple, state[2]))

    def hexdigest(self) -> str:
        """Return the checksum of all added parts as 16 hexadecimal digits; zeros for an empty tensor."""
        total = self._sum
        shared_tiles = dict(self._shared_tiles)
        words = sorted({position // WORD for position in self._fragments})
        if words:
            values = [
                [self._fragments.get(WORD * word + i, 0) for i in range(WORD)] for word in words
            ]
            rows = torch.tensor(values, dtype=torch.uint8)
            for edge in scattered_sums(rows, torch.tensor(words)):
                _add_edge(shared_tiles, edge)
        if shared_tiles:
            tile_sums = torch.tensor(list(shared_tiles.values()))
            total += closed_sum(tile_sums.T, self._words)
        return f"{_splitmix(total & MASK64):016x}"


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
