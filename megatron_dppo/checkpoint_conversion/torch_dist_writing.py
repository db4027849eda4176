"""Hugging Face -> a Megatron distributed checkpoint that every layout loads, without Megatron, chunk by chunk."""

from __future__ import annotations

import gc
import io
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_dppo.checkpoint_conversion.layout import Layout
from megatron_dppo.checkpoint_conversion.mapping import LocalParameter, local_parameters
from megatron_dppo.checkpoint_conversion.model_shape import ModelShape
from megatron_dppo.checkpoint_conversion.safetensors_file import TensorSpec
from megatron_dppo.checkpoint_conversion.tensor_store import row_blocks
from megatron_dppo.checkpoint_conversion.torch_dist import GlobalPlace, global_places

ReadRows = Callable[[str, int, int], torch.Tensor]
"""(Hugging Face name, first row, rows) -> rows, called once for every row of every tensor, in order."""

RECLAIM_BYTES = 128 << 20
"""Written bytes after which memory is reclaimed."""

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class _Chunk:
    """Rows ``start .. start + count`` of a single-rank parameter: one chunk of its stacked tensor."""

    parameter: LocalParameter
    place: GlobalPlace
    start: int
    count: int


def write_torch_dist(folder: Path, shape: ModelShape, dtype: torch.dtype, read: ReadRows) -> None:
    """Fill ``folder`` (which exists, empty). Memory: a few chunks; a chunk is a layer's matrix or a block of rows.

    Beside the weights it holds the empty extra states that Transformer Engine's modules look for when they load.
    """
    chunks = list(_chunks(shape, dtype))
    states = list(_extra_states(shape))
    empty = io.BytesIO()
    torch.save([None], empty)  # Megatron stores the list of a key's objects

    unreclaimed = 0

    def resolve(number: int) -> torch.Tensor | io.BytesIO:
        nonlocal unreclaimed
        if number >= len(chunks):
            return io.BytesIO(empty.getvalue())
        # torch.save leaves each tensor in a reference cycle until the collector runs.
        if unreclaimed > RECLAIM_BYTES:
            gc.collect()
            unreclaimed = 0
        rows = _assemble(chunks[number], dtype, read)
        unreclaimed += rows.numel() * rows.dtype.itemsize
        return rows

    items = [_tensor_item(chunk, shape, dtype) for chunk in chunks]
    items += [
        WriteItem(
            MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(len(empty.getvalue()))
        )
        for key in states
    ]
    # No copies ahead: chunks are asked for in the plan's order, one at a time.
    writer = FileSystemWriter(str(folder), thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({}, storage_writer=writer, planner=_StreamingPlanner(items, resolve), no_dist=True)
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKEND))


def _chunks(shape: ModelShape, dtype: torch.dtype) -> Iterator[_Chunk]:
    """In model order; gates and ups apart, the vocabulary in blocks, queries with their keys and values."""
    for p in local_parameters(shape, Layout(), 0):
        place = global_places(p.name)[0]
        sources = {s.hf_name for s in p.segments}
        if len(sources) == 1:
            for start, count in row_blocks(TensorSpec(torch.Size(p.shape), dtype)):
                yield _Chunk(p, place, start, count)
        elif len(sources) == len(p.segments):
            for s in p.segments:
                yield _Chunk(p, place, s.local_start, s.length)
        else:
            yield _Chunk(p, place, 0, p.shape[0])


def _assemble(chunk: _Chunk, dtype: torch.dtype, read: ReadRows) -> torch.Tensor:
    """The chunk's rows with an axis of 1 for each leading index. Every source is read from its start to its end."""
    segments = chunk.parameter.segments
    lead = (1,) * len(chunk.place.index)
    if len(segments) == 1:
        rows = read(segments[0].hf_name, chunk.start, chunk.count)
        return rows.to(dtype).reshape(*lead, *rows.shape)
    inside = [s for s in segments if chunk.start <= s.local_start < chunk.start + chunk.count]
    lengths: dict[str, int] = {}
    for s in inside:
        lengths[s.hf_name] = lengths.get(s.hf_name, 0) + s.length
    whole = {name: read(name, 0, length) for name, length in lengths.items()}
    rows = torch.cat([s.of_hf(whole[s.hf_name]) for s in inside])
    return rows.to(dtype).reshape(*lead, *rows.shape)


def _tensor_item(chunk: _Chunk, shape: ModelShape, dtype: torch.dtype) -> WriteItem:
    index, dims = chunk.place.index, chunk.parameter.shape
    stacked = (shape.num_layers, shape.num_experts)[: len(index)]
    offsets = torch.Size((*index, chunk.start, *(0 for _ in dims[1:])))
    sizes = torch.Size((*(1 for _ in index), chunk.count, *dims[1:]))
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, sizes),
        properties=TensorProperties(dtype=dtype),
        size=torch.Size((*stacked, *dims)),
    )
    return WriteItem(MetadataIndex(chunk.place.key, offsets), WriteItemType.SHARD, tensor_data=data)


def _extra_states(shape: ModelShape) -> Iterator[str]:
    """Keys of the modules' extra states: one object a layer, or a layer and expert."""
    seen = set()
    for p in local_parameters(shape, Layout(), 0):
        place = global_places(p.name)[0]
        module = place.key.rpartition(".")[0]
        if "router" in module or module in ("embedding.word_embeddings", "output_layer"):
            continue
        modules = [module]
        if module.endswith("linear_qkv"):
            modules.append(module.replace("linear_qkv", "core_attention"))
        size = (shape.num_layers, shape.num_experts)[: len(place.index)] or (1,)
        where = ".".join(map(str, place.index or (0,)))
        for name in modules:
            key = f"{name}._extra_state/shard_{where}_{'.'.join(map(str, size))}"
            if key not in seen:
                seen.add(key)
                yield key


class _StreamingPlanner(SavePlanner):
    """Hands torch.distributed.checkpoint one item at a time, made when it is written."""

    def __init__(
        self, items: list[WriteItem], resolve: Callable[[int], torch.Tensor | io.BytesIO]
    ) -> None:
        self._items = items
        self._resolve = resolve
        self._numbers = {(i.index.fqn, i.index.offset): n for n, i in enumerate(items)}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to set up: the plan is known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._resolve(self._numbers[(write_item.index.fqn, write_item.index.offset)])
