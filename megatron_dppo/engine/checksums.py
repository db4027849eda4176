"""What the engine's checksums must be, from the very Hugging Face tensors that the trainer holds; bucket by bucket, in
any order, by as many ranks as send. First, SGLang's checksum of a tensor on a GPU, computed part by part.

``/weights_checker`` hashes CUDA tensors with this tiled 64-bit mix (16 hexadecimal digits); on a CPU our platform
plugin has it do the same in place of SHA-256, which takes ten times as long and can't be put together from parts. With
the tensor's bytes as little-endian 32-bit words ``v_i`` (zero-padded at the end) and ``n`` their number::

    h(tile, s) = fmix(4n ^ sum_{i in tile} fmix(v_i ^ (i P + s) ^ rotl(i, r)))       mod 2^32
    checksum   = splitmix(sum_tile  h(tile, s1) 2^32 + h(tile, s2))                  mod 2^64

where tiles are runs of 8192 words, ``fmix`` is MurmurHash3's 32-bit finaliser and ``splitmix`` SplitMix64's. It finds
accidents, not adversaries.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, dtype, zeros

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.model import mapping
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.compute import KernelBuildError, build_library

# --- sums over tiles: on a CPU a C++ loop, or torch where there is no compiler; on a GPU a Triton kernel

log = logging.getLogger(__name__)

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
WORD = 4
TILE = 8192
BLOCK_TILES = 2048
SEED_1 = 0x243F6A88
SEED_2 = ((SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & MASK32
LANES = ((0x27D4EB2D, SEED_1, 15), (0x165667B1, SEED_2, 13))
SOURCE = Path(__file__).parent / "kernels" / "tile_sums.cpp"

Edge: TypeAlias = tuple[int, int, int]
"""A tile that a part shares with others, and its two inner sums over that part."""
PartSums: TypeAlias = tuple[int, Sequence[Edge]]
"""What the tiles that a part covers add to the checksum, and its edges."""


@dataclass(frozen=True, slots=True)
class WordRun:
    """A part of a tensor as whole words.

    Attributes:
        data: ``uint8`` [rows, bytes], rows contiguous; rows follow one another in the tensor.
        first: the word of the tensor at which it begins.
        total: words of the whole tensor.
    """

    data: Tensor
    first: int
    total: int

    @property
    def words(self) -> int:
        return self.data.numel() // WORD

    @property
    def shape(self) -> tuple[int, ...]:
        """What the kernels read of it: address, words, words of a row, from one row to the next, first, total."""
        rows = self.data
        width, stride = rows.shape[1] // WORD, rows.stride(0) // WORD
        return rows.data_ptr(), self.words, width, stride, self.first, self.total

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Tiles that these words share with others; 0 beside the one where they begin, 2 beside a later."""
        end = self.first + self.words
        first, last = self.first // TILE, end // TILE
        edges = []
        if self.first % TILE or (end < self.total and last == first):
            edges.append((first, 0))
        if end % TILE and end < self.total and last != first:
            edges.append((last, 2))
        return edges


def run_of(part: Tensor, first: int, total: int) -> WordRun:
    """``part`` (not empty; any shape and dtype) from word ``first`` on of a tensor of ``total`` words.

    A view where it is a block of whole words; else a copy, padded with zeros to whole words.
    """
    rows = _rows(part.detach())
    if rows is None:
        flat = part.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() % WORD:
            flat = torch.cat([flat, flat.new_zeros(-flat.numel() % WORD)])
        elif flat.data_ptr() % WORD:
            # Kernels read whole words, at addresses that are multiples of them.
            flat = flat.clone()
        rows = flat.unsqueeze(0)
    return WordRun(rows, first, total)


def start_sums(runs: Sequence[WordRun]) -> Callable[[], list[PartSums]]:
    """Start one kernel over all ``runs``, which lie on one device; what is returned waits for it."""
    if runs and runs[0].data.is_cuda:
        from megatron_dppo.engine.kernels.tile_sums_triton import start

        return start(runs)
    sums = sums_on_cpu(runs)
    return lambda: sums


def sums_on_cpu(runs: Sequence[WordRun]) -> list[PartSums]:
    """By the C++ kernel, in one call; by torch where it can't be compiled."""
    kernel = _kernel() if runs else None
    if kernel is None:
        return [sums_by_torch(run) for run in runs]
    shapes = np.array([run.shape for run in runs], dtype=np.int64)
    closed, sums = np.zeros(len(runs), dtype=np.uint64), np.zeros((len(runs), 4), dtype=np.uint32)
    kernel(len(runs), *(array.ctypes.data for array in (shapes, closed, sums)))
    return collect([run.edges for run in runs], closed.tolist(), sums.tolist())


def collect(
    edges: Sequence[Sequence[tuple[int, int]]], closed: Sequence[int], sums: Sequence[Sequence[int]]
) -> list[PartSums]:
    """A kernel's results by part: ``sums`` [parts, 4], two words for the first tile and two for the last."""
    return [
        (whole, [(tile, inner[i], inner[i + 1]) for tile, i in shared])
        for shared, whole, inner in zip(edges, closed, sums, strict=True)
    ]


def sums_by_torch(run: WordRun) -> PartSums:
    """On any device, in blocks of BLOCK_TILES tiles (memory: a few times 64 MiB)."""
    rest = run.data.contiguous().reshape(-1).view(torch.int32)
    blocks, first = [], run.first
    while rest.numel():
        step = TILE - first % TILE
        if step == TILE and rest.numel() > TILE:
            step = min(rest.numel() // TILE, BLOCK_TILES) * TILE
        blocks.append(_mix(rest[:step], first))
        first += min(step, rest.numel())
        rest = rest[step:]
    sums = torch.cat(blocks, dim=1)
    begin = run.first // TILE
    shared = {tile - begin for tile, _ in run.edges}
    covered = [i for i in range(sums.shape[1]) if i not in shared]
    opened = [(tile, *sums[:, tile - begin].tolist()) for tile, _ in run.edges]
    return closed_sum(sums[:, covered], run.total), opened


def closed_sum(sums: Tensor, total: int) -> int:
    """What tiles of inner sums int64 [2, tiles] add to the checksum of ``total`` words."""
    high, low = _fmix((sums ^ (WORD * total & MASK32)).to(torch.int32)).to(torch.int64)
    return ((int((high & MASK32).sum()) << 32) + int((low & MASK32).sum())) & MASK64


def _rows(part: Tensor) -> Tensor | None:
    """``part`` as ``uint8`` rows of whole words without a copy; None where it does not lie so."""
    inner, dim = 1, part.dim()
    while dim and (part.shape[dim - 1] == 1 or part.stride(dim - 1) == inner):
        dim -= 1
        inner *= part.shape[dim]
    pairs = zip(part.shape[:dim], part.stride()[:dim], strict=True)
    outer = [(size, step) for size, step in pairs if size > 1]
    for (_, above), (size, below) in itertools.pairwise(outer):
        if above != size * below:
            return None
    step = outer[-1][1] if outer else inner
    rows = part.as_strided((part.numel() // inner, inner), (step, 1)).view(torch.uint8)
    measures = (rows.data_ptr(), rows.shape[1], rows.stride(0))
    return None if any(measure % WORD for measure in measures) else rows


def _mix(data: Tensor, first: int) -> Tensor:
    """Words of one tile, or of several whole ones. int32 overflows modulo 2^32."""
    count = data.numel()
    index = torch.arange(first, first + count, device=data.device).to(torch.int32)
    sums = []
    for multiplier, seed, turn in LANES:
        position = (index * _signed(multiplier) + _signed(seed)) ^ _rotate_left(index, turn)
        mixed = _fmix(data ^ position)
        tiles = mixed.view(-1, TILE) if count >= TILE else mixed.view(1, count)
        # In int64, whose sum of a tile's words can't overflow; modulo 2^32 afterwards.
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
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
    function.restype = None
    return function


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift of int32."""
    # torch has no unsigned shift: the sign's copies are cut off.
    return (x >> by) & ((1 << (32 - by)) - 1)


def _rotate_left(x: Tensor, by: int) -> Tensor:
    return (x << by) | _shift_right(x, 32 - by)


def _fmix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shift_right(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shift_right(x, 16)


Part = tuple["TiledHash", Tensor, int]
"""The hash of a tensor, a part of it, and the byte at which the part begins."""


def tiled_hash(tensor: Tensor) -> str:
    whole = TiledHash(tensor.numel() * tensor.element_size())
    whole.add(tensor, 0)
    return whole.hexdigest()


def add_parts(parts: Sequence[Part]) -> Callable[[], None]:
    """Start to hash all of ``parts``, by one kernel; what is returned waits for it and adds the sums.

    The parts may change then, and on a GPU once their stream has gone on. Raises ValueError as ``TiledHash.add``.
    """
    runs = [(whole, whole.run(part, start)) for whole, part, start in parts]
    filled = [(whole, run) for whole, run in runs if run is not None]
    sums = start_sums([run for _, run in filled])

    def finish() -> None:
        for (whole, _), part_sums in zip(filled, sums(), strict=True):
            whole.take(part_sums)

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

    def run(self, part: Tensor, start: int) -> WordRun | None:
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
        closed, edges = sums
        self._sum = (self._sum + closed) & MASK64
        for tile, high, low in edges:
            before = self._open.get(tile, (0, 0))
            self._open[tile] = ((before[0] + high) & MASK32, (before[1] + low) & MASK32)

    def state(self) -> list[Any]:
        """What was taken, as plain JSON values for ``merge``."""
        return [self._sum, [[tile, *sums] for tile, sums in self._open.items()]]

    def merge(self, state: list[Any]) -> None:
        self.take((state[0], state[1]))

    def hexdigest(self) -> str:
        """16 hexadecimal digits of all that was taken; 0 for an empty tensor."""
        total = self._sum
        if self._open:
            total += closed_sum(torch.tensor(list(self._open.values())).T, self._words)
        return f"{_splitmix(total & MASK64):016x}"


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


# --- what the engine's ranks hold of each Hugging Face tensor

EXPERT_MULTIPLE = {"cpu": 32, "cuda": 1}
"""A rank's share of an expert's intermediate dimension is padded with zeros to a multiple."""


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A part of ``tensor`` on engine ``rank``, from element ``start`` on: a block of a Hugging Face tensor.

    Zeros follow it up to ``width`` along the block's dimension.
    """

    rank: int
    tensor: str
    start: int
    block: mapping.Segment
    width: int

    def cut(self, hf_tensor: Tensor) -> Tensor:
        """The part, out of the whole Hugging Face tensor; a view where nothing is padded."""
        cut = self.block.of_hf(hf_tensor)
        missing = self.width - self.block.length
        if missing == 0:
            return cut
        return F.pad(cut, (*(0, 0) * (cut.dim() - 1 - self.block.dim), 0, missing))


class EngineTensors:
    """A served model on ``ranks`` tensor-parallel ranks of a "cpu" or "cuda" engine: the bytes that its checksums
    are taken over.

    ``parts``: the places of each Hugging Face tensor. ``sizes``: for each rank, the elements of each
    engine tensor; those that no part fills hold zeros, as the last rank's share of a small
    vocabulary. Raises LayoutError where the ranks don't divide the model.
    """

    def __init__(self, shape: ModelShape, ranks: int = 1, device: str = "cuda") -> None:
        self.shape, self.ranks, self.device = shape, ranks, device
        self.parts: dict[str, list[EnginePart]] = {name: [] for name in mapping.hf_tensors(shape)}
        self.sizes: list[dict[str, int]] = [{} for _ in range(ranks)]
        for rank in range(ranks):
            for parameter in mapping.engine_parameters(shape, mapping.EngineLayout(ranks), rank):
                self._add(rank, parameter)

    def _add(self, rank: int, parameter: mapping.LocalParameter) -> None:
        # Blocks lie in the engine's memory one after another, experts too, and end in zeros where the engine pads.
        tensor, is_expert, _ = parameter.name.partition("[")
        sizes = self.sizes[rank]
        if not parameter.segments:
            sizes[tensor] = sizes.get(tensor, 0) + math.prod(parameter.shape)
        multiple = EXPERT_MULTIPLE[self.device] if is_expert else 1
        for block, end in _with_ends(parameter):
            start = sizes.get(tensor, 0)
            width = -(-(end - block.local_start) // multiple) * multiple
            row = math.prod(parameter.shape) // parameter.shape[block.dim]
            sizes[tensor] = start + width * row
            self.parts[block.hf_name].append(EnginePart(rank, tensor, start, block, width))


def _with_ends(parameter: mapping.LocalParameter) -> list[tuple[mapping.Segment, int]]:
    """Blocks in the order of their places, each with the next one's: padding belongs to the block before it."""
    blocks = sorted(parameter.segments, key=lambda block: block.local_start)
    ends = [block.local_start for block in blocks[1:]]
    return list(zip(blocks, [*ends, *(parameter.shape[b.dim] for b in blocks[-1:])], strict=True))


class IncompleteWeightsError(EngineError, ValueError):
    """The streams of buckets left out, repeated or misshaped a tensor of the model."""

    attempts = 1


class ExpectedChecksums:
    """Checksums of the Hugging Face tensors that one rank sends, as the engine will compute them.

    An engine tensor that several ranks fill (experts of several expert-parallel ranks) is hashed in parts: ``partial``
    goes to the rank that compares, and ``digests`` puts all together. ``weights_dtype``: of every weight. Raises
    IncompleteWeightsError where a part of the model does not begin at a whole 32-bit word.
    """

    def __init__(self, tensors: EngineTensors, weights_dtype: dtype) -> None:
        self._tensors = tensors
        self._dtype = weights_dtype
        self._shapes = mapping.hf_tensors(tensors.shape)
        self._seen: set[str] = set()
        self._hashes: dict[tuple[int, str], TiledHash] = {}
        self._unfinished: list[Callable[[], None]] = []
        odd = [n for n, ps in tensors.parts.items() if any(self._byte(p) % WORD for p in ps)]
        if odd:
            raise IncompleteWeightsError(
                f"weight update: {odd[0]} lies at an odd place in the engine's memory; checksums "
                f"need parts that begin at multiples of {WORD} bytes"
            )

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Start to hash the next bucket, all its parts by one kernel; on a GPU nobody waits for it before ``partial``.

        Raises IncompleteWeightsError for an unknown, repeated or misshaped tensor.
        """
        parts: list[Part] = []
        for name, tensor in bucket:
            self._check(name, tensor)
            for part in self._tensors.parts[name]:
                whole = self._hash(part.rank, part.tensor)
                parts.append((whole, part.cut(tensor), self._byte(part)))
        self._unfinished.append(add_parts(parts))

    def partial(self) -> Any:
        for finish in self._unfinished:
            finish()
        self._unfinished.clear()
        sums = [[rank, name, h.state()] for (rank, name), h in self._hashes.items()]
        return [sorted(self._seen), sums]

    def digests(self, partials: Sequence[Any]) -> list[dict[str, str]]:
        """Checksum by engine tensor, for each engine rank, of what all ranks together took.

        Raises IncompleteWeightsError naming what never came, or came from two ranks.
        """
        self._check_complete([name for names, _ in partials for name in names])
        whole = {
            (rank, name): TiledHash(elements * self._dtype.itemsize)
            for rank, sizes in enumerate(self._tensors.sizes)
            for name, elements in sizes.items()
        }
        for _, sums in partials:
            for rank, name, state in sums:
                whole[rank, name].merge(state)
        for rank, name in whole.keys() - {(r, n) for _, sums in partials for r, n, _ in sums}:
            elements = self._tensors.sizes[rank][name]
            # What no tensor fills is padding, which the engine hashes all the same.
            whole[rank, name].add(zeros(elements, dtype=self._dtype), 0)
        return [
            {name: whole[rank, name].hexdigest() for name in sizes}
            for rank, sizes in enumerate(self._tensors.sizes)
        ]

    def _check_complete(self, names: list[str]) -> None:
        missing = sorted(self._shapes.keys() - set(names))
        if missing:
            raise IncompleteWeightsError(
                f"weight update: {len(missing)} tensors were never sent: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}"
            )
        if len(names) > len(self._shapes):
            twice = next(name for name in names if names.count(name) > 1)
            raise IncompleteWeightsError(f"weight update: {twice} came from two ranks")

    def _check(self, name: str, tensor: Tensor) -> None:
        shape = self._shapes.get(name)
        if shape is None or name in self._seen:
            raise IncompleteWeightsError(
                f"weight update: {name} came twice or is no tensor of this model"
            )
        self._seen.add(name)
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise IncompleteWeightsError(
                f"weight update: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(shape)} {self._dtype}"
            )

    def _hash(self, rank: int, tensor: str) -> TiledHash:
        key = (rank, tensor)
        if key not in self._hashes:
            size = self._tensors.sizes[rank][tensor] * self._dtype.itemsize
            self._hashes[key] = TiledHash(size)
        return self._hashes[key]

    def _byte(self, part: EnginePart) -> int:
        return part.start * self._dtype.itemsize
