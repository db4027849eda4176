"""Hugging Face tensors by name and row, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from megatron_dppo.checkpoint_conversion.safetensors_file import TensorSpec
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ModelShape

BLOCK_BYTES = 1 << 20
"""Bytes that are read or written at a time: what streaming holds in memory, a few times over.

Small enough that a block is still in a core's cache when it is hashed and written, and that the allocator hands the
same pages out again; large enough that Python's work on a block costs little. Of 256 KiB to 32 MiB the fastest where
this was tried, and the least disturbed by a busy kernel.
"""


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


def check_store(store: TensorStore, shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where a store's names, shapes or dtypes are not what ``shape`` describes.

    A tied model may store its output layer too; the map leaves it out, and ``check_tied_copy`` compares it.
    """
    expected = hf_tensors(shape)
    present = set(store.specs) - ({"lm_head.weight"} if shape.tied_embeddings else set())
    missing, unknown = [n for n in expected if n not in present], sorted(present - set(expected))
    if missing or unknown:
        listed = "; ".join(
            f"{len(names)} {what}, first {names[0]}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        )
        raise CheckpointError(f"{where}: its tensors are not those of its config.json ({listed})")
    for name, dims in expected.items():
        spec = store.specs[name]
        if spec.shape != dims:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(spec.shape)}, config.json says {tuple(dims)}"
            )
    kinds = {store.specs[name].dtype for name in expected}
    if len(kinds) != 1:
        raise CheckpointError(
            f"{where}: tensors of several dtypes, {sorted(map(str, kinds))}; expected one"
        )


def check_tied_copy(store: TensorStore, shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where a tied model stores an output layer that is not its embedding."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    if not shape.tied_embeddings or names[1] not in store.specs:
        return
    for start, count in row_blocks(store.specs[names[0]]):
        first, second = (store.read_rows(name, start, count) for name in names)
        if not torch.equal(first, second):
            raise CheckpointError(
                f"{where}: tie_word_embeddings is true, but lm_head.weight differs from {names[0]}"
            )
