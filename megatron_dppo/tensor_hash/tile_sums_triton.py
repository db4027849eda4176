"""A Triton kernel that computes the tile sums of many parts, on a GPU or in Triton's interpreter.

It follows SGLang's own kernel of the same sums, and has run on an H100 (docs/evidence/gpu_first_day.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_dppo.tensor_hash import SEED_1, SEED_2, TILE, PartSums, WordRun, collect

BLOCK = 1024


def start(runs: Sequence[WordRun]) -> Callable[[], list[PartSums]]:
    """Launch the kernel over all tiles of ``runs``. Returns a function that waits for it and reads the results.

    All parts together need two copies to the device and one back.
    """
    device = runs[0].data.device
    counts = [-(-(run.first % TILE + run.words) // TILE) for run in runs]
    shapes = torch.tensor([run.shape for run in runs], dtype=torch.int64).to(device)
    ends = np.cumsum(counts)
    parts = np.repeat(np.arange(len(runs)), counts)
    programs = np.stack([parts, np.arange(ends[-1]) - np.repeat(ends - counts, counts)])
    where = torch.from_numpy(programs.astype(np.int32)).to(device)
    out = torch.zeros(len(runs), 5, dtype=torch.int64, device=device)
    tile_sums_kernel[(int(ends[-1]),)](
        shapes,
        where,
        where[1],
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
        closed = np.ascontiguousarray(sums[:, 0]).view(np.uint64)
        return collect(edges, closed.tolist(), sums[:, 1:].tolist())

    return finish


@triton.jit
def fmix(x):
    """MurmurHash3's 32-bit finaliser."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def tile_sums_kernel(
    shapes,
    parts,
    tiles,
    out,
    SEED_1: tl.constexpr,  # noqa: N803
    SEED_2: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Sum one tile of one part: add it to the part's sum if the part covers it whole, else store it as an edge."""
    program = tl.program_id(0)
    part = tl.load(parts + program).to(tl.int64)
    tile = tl.load(tiles + program).to(tl.int64)
    shape = shapes + part * 6
    data = tl.load(shape).to(tl.pointer_type(tl.uint32))
    extent = tl.load(shape + 1)
    row = tl.load(shape + 2)
    stride = tl.load(shape + 3)
    first = tl.load(shape + 4)
    total = tl.load(shape + 5)
    begin = (first // TILE + tile) * TILE
    low = tl.maximum(begin, first)
    high = tl.minimum(begin + TILE, first + extent)
    # One 64-bit division for each tile. Words after the end of its first row are counted in 32 bits.
    above = (low - first) // row
    column = (low - first) - above * row
    data += above * stride + column
    to_end = tl.minimum(row - column, TILE).to(tl.int32)
    length = tl.minimum(row, TILE).to(tl.int32)
    to_next = stride - column
    shift = (low - begin).to(tl.int32)
    count = (high - low).to(tl.int32)
    sum_1 = tl.zeros((), tl.uint32)
    sum_2 = tl.zeros((), tl.uint32)
    for block in range(0, TILE, BLOCK):
        lane = block + tl.arange(0, BLOCK)
        step = lane - shift
        inside = (step >= 0) & (step < count)
        beyond = step - to_end
        below = to_next + (beyond // length) * stride + beyond % length
        word = tl.load(data + tl.where(beyond < 0, step, below), mask=inside, other=0)
        index = (begin + lane).to(tl.uint32)
        turned_1 = (index << 15) | (index >> 17)
        turned_2 = (index << 13) | (index >> 19)
        mixed_1 = fmix(word ^ (index * 0x27D4EB2D + SEED_1) ^ turned_1)
        mixed_2 = fmix(word ^ (index * 0x165667B1 + SEED_2) ^ turned_2)
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
