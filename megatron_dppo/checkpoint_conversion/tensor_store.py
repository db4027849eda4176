"""Hugging Face tensors by name and row, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from megatron_dppo.checkpoint_conversion.safetensors_file import TensorSpec
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ModelShape

BLOCK_BYTES = 1 << 20
"""Bytes that are read or written at a time: what streaming holds in memory, a few times over.

Small enough that a block is still in a core's cache when it is hashed and written, and that the allocator hands the
same pages out again; large enough that Python's work on a block costs little. Of 256 KiB to 32 MiB the fastest where
this was tried, and the least disturbed by a busy kernel.
"""

SHOWN = 5
"""Differences of a checkpoint from its config.json that an error lists."""


class TensorStore(Protocol):
    """Hugging Face tensors by name, wherever they lie."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of every tensor."""

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of dim 0."""


def read_slice(
    store: TensorStore, name: str, dim: int = 0, start: int = 0, length: int | None = None
) -> torch.Tensor:
    """``tensor.narrow(dim, start, length)`` of a stored tensor, contiguous; holds one block beside the result."""
    dims = store.specs[name].shape
    length = dims[dim] - start if length is None else length
    if dim == 0:
        return store.read_rows(name, start, length)
    wanted = list(dims)
    wanted[dim] = length
    out = torch.empty(wanted, dtype=store.specs[name].dtype)
    for first, count in row_blocks(store.specs[name]):
        out[first : first + count] = store.read_rows(name, first, count).narrow(dim, start, length)
    return out


def row_blocks(spec: TensorSpec, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """``(start, count)`` of the row blocks that a tensor is streamed in; a block is at least a row."""
    rows = max(1, block_bytes // spec.row_bytes)
    for start in range(0, spec.shape[0], rows):
        yield start, min(rows, spec.shape[0] - start)


def check_tensors(specs: Mapping[str, TensorSpec], shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where names or shapes of ``specs`` are not those of ``shape``; it names all that differ.

    A tied model may store its output layer too; the table leaves it out, and ``check_tied_copy`` compares it.
    """
    expected = hf_tensors(shape)
    _, output = family_of(shape).vocabulary_tensors
    present = set(specs) - ({output} if shape.tied_embeddings else set())
    wrong = {
        "missing": [n for n in expected if n not in present],
        "unknown": sorted(present - set(expected)),
    }
    listed = [f"{len(names)} {what}, first {names[0]}" for what, names in wrong.items() if names]
    listed += [
        f"{name} has shape {tuple(specs[name].shape)}, config.json says {dims}"
        for name, dims in expected.items()
        if name in present and tuple(specs[name].shape) != dims
    ]
    if listed:
        shown = "; ".join(listed[:SHOWN]) + (
            f"; {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
        )
        raise CheckpointError(f"{where}: its tensors are not those of its config.json ({shown})")


def check_store(store: TensorStore, shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where a store's names or shapes are not what ``shape`` describes, or dtypes several."""
    check_tensors(store.specs, shape, where)
    kinds = {store.specs[name].dtype for name in hf_tensors(shape)}
    if len(kinds) != 1:
        raise CheckpointError(
            f"{where}: tensors of several dtypes, {sorted(map(str, kinds))}; expected one"
        )


def check_tied_copy(store: TensorStore, shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where a tied model stores an output layer that is not its embedding."""
    names = family_of(shape).vocabulary_tensors
    if not shape.tied_embeddings or names[1] not in store.specs:
        return
    for start, count in row_blocks(store.specs[names[0]]):
        first, second = (store.read_rows(name, start, count) for name in names)
        if not torch.equal(first, second):
            raise CheckpointError(
                f"{where}: tie_word_embeddings is true, but {names[1]} differs from {names[0]}"
            )
