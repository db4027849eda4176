"""A Triton kernel that computes the tile sums of many parts, on a GPU or in Triton's interpreter.

The kernel follows SGLang's own kernel of these sums, and has run on an H100 (docs/evidence/gpu_first_day.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_dppo.tensor_hash import SEED_1, SEED_2, TILE, PartSums, WordRun, collect

BLOCK = 1024
"""Words that a program reads at a time."""


def start(runs: Sequence[WordRun]) -> Callable[[], list[PartSums]]:
    """Launch the kernel over all tiles of ``runs``. Returns a function that waits for the kernel and reads its results.

    All parts together need two copies to the device and one back.
    """
    device = runs[0].data.device
    part_arguments = [run.kernel_arguments for run in runs]
    arguments = torch.tensor(part_arguments, dtype=torch.int64).to(device)
    # One program sums a part's words in one tile. ``parts`` and ``tiles``: each program's part, and the number of its
    # tile, counted from the part's first tile.
    tile_counts = [-(-(run.first % TILE + run.words) // TILE) for run in runs]
    ends = np.cumsum(tile_counts)
    parts = np.repeat(np.arange(len(runs)), tile_counts)
    tiles = np.arange(ends[-1]) - np.repeat(ends - tile_counts, tile_counts)
    programs = torch.from_numpy(np.stack([parts, tiles]).astype(np.int32)).to(device)
    # A part has five sums: one sum over the tiles that it covers whole, and four sums of its edges.
    out = torch.zeros(len(runs), 5, dtype=torch.int64, device=device)
    tile_sums_kernel[(int(ends[-1]),)](
        arguments,
        programs[0],
        programs[1],
        out,
        SEED_1=SEED_1,
        SEED_2=SEED_2,
        TILE=TILE,
        BLOCK=BLOCK,
    )
    # Keep the edges, not the runs: the caller reuses the memory of the runs.
    edges = [run.edges for run in runs]

    def finish() -> list[PartSums]:
        sums = out.cpu().numpy()
        closed_sums = np.ascontiguousarray(sums[:, 0]).view(np.uint64)
        return collect(edges, closed_sums.tolist(), sums[:, 1:].tolist())

    return finish


@triton.jit
def fmix(x):
    """MurmurHash3's 32-bit finaliser."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def tile_sums_kernel(
    arguments,
    parts,
    tiles,
    out,
    SEED_1: tl.constexpr,  # noqa: N803
    SEED_2: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Sum the words of one part in one tile.

    If the part covers the tile whole, add the tile to the part's closed sum, else store the lanes' inner sums as an
    edge. ``arguments``: each part's ``kernel_arguments``. ``parts`` and ``tiles``: the part of each program, and the
    number of its tile, counted from the part's first tile.
    """
    program = tl.program_id(0)
    part = tl.load(parts + program).to(tl.int64)
    tile = tl.load(tiles + program).to(tl.int64)
    part_arguments = arguments + part * 6
    data = tl.load(part_arguments).to(tl.pointer_type(tl.uint32))
    words = tl.load(part_arguments + 1)
    width = tl.load(part_arguments + 2)
    stride = tl.load(part_arguments + 3)
    first = tl.load(part_arguments + 4)
    total = tl.load(part_arguments + 5)
    begin = (first // TILE + tile) * TILE
    low = tl.maximum(begin, first)
    high = tl.minimum(begin + TILE, first + words)
    # ``low`` is the part's first word in the tile. It is in row ``row`` of the part, at ``column``. This division is in
    # 64 bits; the divisions in the loop below are in 32 bits.
    row = (low - first) // width
    column = (low - first) - row * width
    data += row * stride + column
    # A program reads at most TILE words, so a longer row counts as TILE words long.
    to_end = tl.minimum(width - column, TILE).to(tl.int32)
    length = tl.minimum(width, TILE).to(tl.int32)
    to_next = stride - column
    shift = (low - begin).to(tl.int32)
    count = (high - low).to(tl.int32)
    sum_1 = tl.zeros((), tl.uint32)
    sum_2 = tl.zeros((), tl.uint32)
    for block in range(0, TILE, BLOCK):
        lane = block + tl.arange(0, BLOCK)
        step = lane - shift
        inside = (step >= 0) & (step < count)
        # ``beyond`` counts words from the start of the next row; it is negative in the first row.
        beyond = step - to_end
        offset_below = to_next + (beyond // length) * stride + beyond % length
        offset = tl.where(beyond < 0, step, offset_below)
        word = tl.load(data + offset, mask=inside, other=0)
        index = (begin + lane).to(tl.uint32)
        rotated_1 = (index << 15) | (index >> 17)
        rotated_2 = (index << 13) | (index >> 19)
        mixed_1 = fmix(word ^ (index * 0x27D4EB2D + SEED_1) ^ rotated_1)
        mixed_2 = fmix(word ^ (index * 0x165667B1 + SEED_2) ^ rotated_2)
        sum_1 += tl.sum(tl.where(inside, mixed_1, 0), axis=0).to(tl.uint32)
        sum_2 += tl.sum(tl.where(inside, mixed_2, 0), axis=0).to(tl.uint32)
    result = out + part * 5
    if (low == begin) & ((high == begin + TILE) | (high == total)):
        size = (total * 4).to(tl.uint32)
        closed = (fmix(size ^ sum_1).to(tl.uint64) << 32) + fmix(size ^ sum_2).to(tl.uint64)
        tl.atomic_add(result, closed.to(tl.int64, bitcast=True))
    else:
        edge = tl.where(tile == 0, 1, 3)
        tl.store(result + edge, sum_1.to(tl.int64))
        tl.store(result + edge + 1, sum_2.to(tl.int64))
