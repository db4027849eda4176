"""Hugging Face -> a Megatron distributed checkpoint that every layout loads, without Megatron, chunk by chunk.

torch.distributed.checkpoint's own writer does the writing; the planner here reads each chunk when its turn comes.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_dppo.checkpoint_conversion.safetensors_file import TensorSpec
from megatron_dppo.checkpoint_conversion.tensor_store import row_blocks
from megatron_dppo.checkpoint_conversion.torch_dist import GlobalPlace, global_places
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import LocalParameter, local_parameters
from megatron_dppo.model.shape import ModelShape

ReadRows = Callable[[str, int, int], torch.Tensor]
"""(Hugging Face name, first row, rows) -> rows, called once for every row of every tensor, in order."""

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
    """Fill ``folder`` (which exists, empty). Memory: one chunk, which is a layer's matrix or a block of rows.

    Beside the weights it holds the empty extra states that Transformer Engine's modules look for when they load.
    """
    chunks = {_offsets_index(chunk): chunk for chunk in _chunks(shape, dtype)}
    items = [_tensor_item(index, chunk, shape, dtype) for index, chunk in chunks.items()]
    items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in _extra_states(shape)]
    [plan], metadata = create_default_global_save_plan([SavePlan(items)], rewrite_index_hints=False)
    # One file; no copying ahead, which is for tensors on GPUs.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    [plan] = writer.prepare_global_plan([plan])
    planner = _ReadingPlanner(lambda index: _assemble(chunks[index], dtype, read))
    results = writer.write_data(plan, planner).wait()
    stored = {result.index: result.storage_data for result in results}
    described = Metadata(
        metadata.state_dict_metadata, None, stored, StorageMeta(), CURRENT_DCP_VERSION
    )
    (folder / ".metadata").write_bytes(pickle.dumps(described))
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


class _ReadingPlanner(DefaultSavePlanner):
    """Hands the writer one chunk after the other, by ``read``; for other objects, the empty extra state."""

    def __init__(self, read: Callable[[MetadataIndex], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What ``write_item`` stands for."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._read(write_item.index)
        empty = io.BytesIO()
        torch.save([None], empty)  # Megatron stores the list of a key's objects
        return empty


def _offsets_index(chunk: _Chunk) -> MetadataIndex:
    """The chunk's place in its stacked tensor."""
    place, dims = chunk.place, chunk.parameter.shape
    return MetadataIndex(place.key, torch.Size((*place.index, chunk.start, *(0 for _ in dims[1:]))))


def _tensor_item(
    index: MetadataIndex, chunk: _Chunk, shape: ModelShape, dtype: torch.dtype
) -> WriteItem:
    lead, dims = chunk.place.index, chunk.parameter.shape
    stacked = (shape.num_layers, shape.num_experts)[: len(lead)]
    sizes = torch.Size((*(1 for _ in lead), chunk.count, *dims[1:]))
    assert index.offset is not None
    data = TensorWriteData(
        ChunkStorageMetadata(index.offset, sizes),
        TensorProperties(dtype=dtype),
        torch.Size((*stacked, *dims)),
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


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
