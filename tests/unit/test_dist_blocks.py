"""Blocks of a ``torch_dist`` checkpoint: the boxes of a flat slice, and reading any box from any blocks."""

from __future__ import annotations

import errno
import itertools
import random
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_dppo.checkpoint_conversion.dist_reading import (
    Box,
    StoredBlocks,
    TensorBlock,
    flat_boxes,
)
from megatron_dppo.checkpoint_conversion.dist_writing import BlockFile, HashedFile, write_headers
from megatron_dppo.model.errors import CheckpointError
from tests.messages import mentioning


def test_flat_slice_by_hand():
    # elements 5 .. 14 of a 4 x 4 tensor: 5 6 7 | 8 9 10 11 | 12 13
    assert list(flat_boxes((4, 4), 5, 14)) == [
        Box((1, 1), (1, 3)),
        Box((2, 0), (1, 4)),
        Box((3, 0), (1, 2)),
    ]
    assert list(flat_boxes((4, 4), 5, 7)) == [Box((1, 1), (1, 2))]
    assert list(flat_boxes((4, 4), 4, 12)) == [Box((1, 0), (2, 4))]
    assert list(flat_boxes((7,), 2, 5)) == [Box((2,), (3,))]
    assert list(flat_boxes((4, 4), 6, 6)) == []


@pytest.mark.parametrize("dims", [(5,), (3, 4), (1, 1, 3, 4), (2, 3, 4)])
def test_boxes_hold_the_slice_in_order(dims):
    tensor = torch.arange(torch.Size(dims).numel()).view(dims)
    for start, stop in itertools.combinations(range(tensor.numel() + 1), 2):
        boxes = list(flat_boxes(dims, start, stop))
        parts = [box.of(tensor, (0,) * len(dims)) for box in boxes]
        assert all(part.is_contiguous() for part in parts)
        assert torch.cat([part.flatten() for part in parts]).tolist() == list(range(start, stop))
        assert len(boxes) <= 2 * len(dims)


def write_blocks(folder: Path, tensor: torch.Tensor, cuts: list[list[int]]) -> None:
    """Write ``tensor`` as "w", one file for each rank. ``cuts``: for each file, the bounds of its blocks."""
    items = []
    for rank, bounds in enumerate(cuts):
        with HashedFile(folder / f"__{rank}_0.distcp") as hashed_file:
            file = BlockFile(hashed_file)
            file.add_object(f"extra/{rank}", {"rank": rank})
            for start, stop in itertools.pairwise(bounds):
                position = start
                for box in flat_boxes(tuple(tensor.shape), start, stop):
                    values = tensor.flatten()[position : position + box.elements]
                    file.add(TensorBlock("w", tuple(tensor.shape), box, tensor.dtype), values)
                    position += box.elements
        items += file.items
    write_headers(folder, items, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_box_reads_back_from_any_cuts(tmp_path, dtype):
    generator = random.Random(1)
    tensor = torch.randn(2, 3, 7, 5).to(dtype)
    write_blocks(tmp_path, tensor, [[0, 11, 60], [60, 61, 200], [200, 210]])
    with StoredBlocks(tmp_path) as blocks:
        for _ in range(200):
            low = [generator.randrange(n) for n in tensor.shape]
            sizes = [generator.randint(1, n - o) for n, o in zip(tensor.shape, low, strict=True)]
            box = Box(tuple(low), tuple(sizes))
            out = torch.full((*sizes, 2), 9.0, dtype=dtype)[..., 0]  # a strided view
            blocks.fill(TensorBlock("w", tuple(tensor.shape), box, dtype), out)
            assert torch.equal(out, box.of(tensor, (0, 0, 0, 0)))


def test_torchs_own_reader_takes_the_files(tmp_path):
    tensor = torch.arange(30.0).view(6, 5)
    write_blocks(tmp_path, tensor, [[0, 7, 13], [13, 30]])
    state = {"w": torch.zeros(6, 5)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(state["w"], tensor)


def test_a_file_reads_as_torch_wrote_it(tmp_path):
    tensor = torch.arange(30.0).view(6, 5)
    dcp.save({"w": tensor}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    out = torch.zeros(2, 3)
    with StoredBlocks(tmp_path) as blocks:
        blocks.fill(TensorBlock("w", (6, 5), Box((3, 1), (2, 3)), torch.float32), out)
    assert torch.equal(out, tensor[3:5, 1:4])


def test_a_padded_tensor_may_grow_and_shrink(tmp_path):
    tensor = torch.arange(15.0).view(5, 3)
    write_blocks(tmp_path, tensor, [[0, 15]])
    with StoredBlocks(tmp_path) as blocks:
        out = torch.full((4, 3), 9.0)
        blocks.fill(
            TensorBlock("w", (8, 3), Box((4, 0), (4, 3)), torch.float32, resizable=True), out
        )
        assert out.tolist() == [[12, 13, 14], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
        padding = torch.full((2, 3), 9.0)
        blocks.fill(
            TensorBlock("w", (8, 3), Box((6, 0), (2, 3)), torch.float32, resizable=True), padding
        )
        assert not padding.any()
        with pytest.raises(
            CheckpointError, match=mentioning("w", torch.float32, "(5, 3)", "(8, 3)")
        ):
            blocks.fill(TensorBlock("w", (8, 3), Box((4, 0), (4, 3)), torch.float32), out)


def test_what_is_missing_is_named(tmp_path):
    write_blocks(tmp_path, torch.arange(15.0).view(5, 3), [[0, 6], [9, 15]])
    out = torch.zeros(5, 3)
    with StoredBlocks(tmp_path) as blocks:
        with pytest.raises(CheckpointError, match=mentioning("w[0, 0]", 12, 15)):
            blocks.fill(TensorBlock("w", (5, 3), Box((0, 0), (5, 3)), torch.float32), out)
        with pytest.raises(CheckpointError, match=mentioning("tensor v")):
            blocks.fill(TensorBlock("v", (5, 3), Box((0, 0), (5, 3)), torch.float32), out)


def test_a_full_disk_is_the_disks_error(tmp_path):
    zeros = torch.zeros(1 << 20)
    block = TensorBlock("w", (1 << 20,), Box((0,), (1 << 20,)), zeros.dtype)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError) as failure, HashedFile(tmp_path / "a") as hashed_file:
            BlockFile(hashed_file).add(block, zeros)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert failure.value.errno == errno.EFBIG
