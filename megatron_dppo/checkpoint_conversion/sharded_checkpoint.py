"""The trainer's layout on disk: a safetensors file for each rank, with the shards it is the primary holder of.

Names are those of ``GPTModel.named_parameters()`` (``model<chunk>.`` in front where a stage has several model chunks).
Read back, the folder behaves like a Hugging Face folder: any tensor, by rows, whatever the layout it was written in; so
every layout loads from every other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch

from megatron_dppo.checkpoint_conversion.certificate import TORCH_DTYPES, load_certificate
from megatron_dppo.checkpoint_conversion.safetensors_file import (
    SafetensorsFile,
    SafetensorsFileWriter,
    TensorSpec,
)
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.gather_plan import Piece, TensorSources, gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, primary_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing


def file_name(rank: int) -> str:
    """File of a rank's shards."""
    return f"rank-{rank:05d}.safetensors"


def stored_name(layout: Layout, chunk: int, name: str) -> str:
    """A parameter's name in its rank's file."""
    return name if layout.chunks == 1 else f"model{chunk}.{name}"


def rank_specs(
    shape: ModelShape, layout: Layout, rank: int, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """What ``rank``'s file holds; empty where it is the primary holder of nothing."""
    return {
        stored_name(layout, p.chunk, p.name): TensorSpec(p.shape, dtype)
        for p in primary_parameters(shape, layout, rank)
    }


class ShardedCheckpointWriter:
    """Fills a folder's rank files from rows of Hugging Face tensors."""

    def __init__(self, folder: Path, shape: ModelShape, layout: Layout, dtype: torch.dtype) -> None:
        self._folder, self._shape, self._layout, self._dtype = folder, shape, layout, dtype
        self._files: dict[int, SafetensorsFileWriter] = {}

    def __enter__(self) -> ShardedCheckpointWriter:
        with contextlib.ExitStack() as stack:
            for rank in range(self._layout.world_size):
                specs = rank_specs(self._shape, self._layout, rank, self._dtype)
                if specs:
                    file = SafetensorsFileWriter(self._folder / file_name(rank), specs)
                    self._files[rank] = stack.enter_context(file)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def write_rows(self, tensor: TensorSources, start: int, rows: torch.Tensor) -> None:
        """Put rows ``start ..`` of a Hugging Face tensor where they belong, on every rank that holds some."""
        for piece in tensor.pieces:
            name = stored_name(self._layout, piece.chunk, piece.name)
            overlap = rows_of_piece(piece, start, len(rows))
            if overlap is not None:
                at, block = overlap[0], block_of(rows, piece, start, overlap[1:])
                self._files[piece.rank].write_rows(name, at, block)


class ShardedCheckpoint(Closing):
    """A converted folder, open for reading as Hugging Face tensors.

    Raises CheckpointError where a rank's file is missing, truncated, or holds other tensors than its layout has.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.certificate = load_certificate(self.folder)
        if self.certificate.form != "sharded" or self.certificate.layout is None:
            raise CheckpointError(
                f"{self.folder}: is of form {self.certificate.form}, expected one in a Megatron layout"
            )
        self.layout: Layout = self.certificate.layout
        self.shape = self.certificate.shape
        self.dtype = TORCH_DTYPES[self.certificate.dtype]
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(dims, self.dtype) for name, dims in hf_tensors(self.shape).items()
        }
        self._files: dict[int, SafetensorsFile] = {}
        try:
            self._open()
        except CheckpointError:
            self.close()
            raise

    def _open(self) -> None:
        for rank in range(self.layout.world_size):
            expected = rank_specs(self.shape, self.layout, rank, self.dtype)
            if not expected:
                continue
            file = self._files[rank] = SafetensorsFile(self.folder / file_name(rank))
            found = {name: TensorSpec(e.shape, e.dtype) for name, e in file.entries.items()}
            if found != expected:
                wrong = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
                raise CheckpointError(
                    f"{file.path}: {wrong[0]} is {found.get(wrong[0])}, its layout expects {expected.get(wrong[0])}"
                )

    @cached_property
    def plan(self) -> list[TensorSources]:
        """Which rank holds which part of every tensor, in model order."""
        return gather_plan(self.shape, self.layout)

    @cached_property
    def _sources(self) -> dict[str, TensorSources]:
        return {tensor.name: tensor for tensor in self.plan}

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a Hugging Face tensor, out of all ranks' files."""

        def read(piece: Piece, first: int, rows: int) -> torch.Tensor:
            stored = stored_name(self.layout, piece.chunk, piece.name)
            return self._files[piece.rank].read_rows(stored, first, rows)

        return assemble_rows(self._sources[name], start, count, self.dtype, read)

    def locate(self, name: str, index: Sequence[int]) -> str:
        """In words, the rank, file and byte where an element of a Hugging Face tensor is stored."""
        at = list(index)
        for piece in self._sources[name].pieces:
            s = piece.segment
            if s.hf_start <= at[s.dim] < s.hf_start + s.length:
                local = list(at)
                local[s.dim] += s.local_start - s.hf_start
                file = self._files[piece.rank]
                entry = file.entries[stored_name(self.layout, piece.chunk, piece.name)]
                flat = 0
                for size, i in zip(entry.shape, local, strict=True):
                    flat = flat * size + i
                byte = entry.offset + flat * entry.dtype.itemsize
                return f"rank {piece.rank}'s {file.path} at byte {byte}"
        raise ValueError(f"{name} has no element {tuple(at)}")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}


def assemble_rows(
    tensor: TensorSources,
    start: int,
    count: int,
    dtype: torch.dtype,
    read: Callable[[Piece, int, int], torch.Tensor],
) -> torch.Tensor:
    """Rows ``start .. start + count`` of a Hugging Face tensor; ``read(piece, row, rows)``: a parameter's rows."""
    out = torch.empty((count, *tensor.shape[1:]), dtype=dtype)
    for piece in tensor.pieces:
        overlap = rows_of_piece(piece, start, count)
        if overlap is not None:
            at, first, length = overlap
            block_of(out, piece, start, (first, length)).copy_(read(piece, at, length))
    return out


def rows_of_piece(piece: Piece, start: int, count: int) -> tuple[int, int, int] | None:
    """``(local row, Hugging Face row, rows)`` of the part of a piece in rows ``start .. start + count``, or None.

    A piece along dim 1 is as wide as its local parameter, so its rows too are contiguous there.
    """
    s = piece.segment
    if s.dim == 1:
        assert s.length == piece.local_shape[1], (
            f"{piece.name}: a column block narrower than its shard"
        )
        return start, start, count
    first, last = max(start, s.hf_start), min(start + count, s.hf_start + s.length)
    return (s.local_start + first - s.hf_start, first, last - first) if first < last else None


def block_of(
    rows: torch.Tensor, piece: Piece, start: int, overlap: tuple[int, int]
) -> torch.Tensor:
    """The view of ``rows`` (which begin at row ``start``) that the piece's ``overlap`` fills."""
    first, length = overlap
    block = rows.narrow(0, first - start, length)
    s = piece.segment
    return block if s.dim == 0 else block.narrow(1, s.hf_start, s.length)
