"""Megatron-Core's distributed checkpoints (``torch_dist``), read by rows and without Megatron.

They are torch.distributed.checkpoint folders whose tensors are the whole model's: layers stacked along a first axis,
experts along a second. So one folder loads under every layout, and a parameter here is that of a single-rank layout.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dppo.checkpoint_conversion.dist_blocks import Box
from megatron_dppo.checkpoint_conversion.dist_reading import StoredBlocks, StoredTensor
from megatron_dppo.model.errors import CheckpointError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


@dataclass(frozen=True)
class GlobalPlace:
    """``tensor[index]`` of the checkpoint's tensor ``key`` is one parameter of a single-rank layout."""

    key: str
    index: tuple[int, ...]


def global_places(name: str) -> list[GlobalPlace]:
    """Where a single-rank parameter may lie: stacked over layers (the default), else in a tensor a layer."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return [GlobalPlace(name, ())]
    number, rest = int(layer[1]), layer[2]
    expert = _EXPERT.fullmatch(rest)
    index: tuple[int, ...] = ()
    if expert is not None:
        rest, index = f"mlp.experts.experts.{expert[1]}.weight", (int(expert[2]),)
    return [
        GlobalPlace(f"decoder.layers.{rest}", (number, *index)),
        GlobalPlace(f"decoder.layers.{number}.{rest}", index),
    ]


class TorchDistFolder:
    """Row access to the tensors of a ``torch_dist`` folder. Raises CheckpointError where it is none, or damaged."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stored = StoredBlocks(folder)

    def dtype(self, name: str) -> torch.dtype:
        """Of a single-rank parameter."""
        return self._find(name)[1].dtype

    def dims(self, name: str) -> tuple[int, ...]:
        """Shape of a single-rank parameter; a padded vocabulary may have more rows than the model."""
        place, tensor = self._find(name)
        return tensor.dims[len(place.index) :]

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a single-rank parameter."""
        place, tensor = self._find(name)
        lead = len(place.index)
        widths = tensor.dims[lead + 1 :]
        sizes = (*(1 for _ in place.index), count, *widths)
        out = torch.empty(sizes, dtype=tensor.dtype)
        wanted = Box((*place.index, start, *(0 for _ in widths)), sizes)
        self._stored.read(place.key, wanted, out)
        return out.view(count, *widths)

    def locate(self, name: str, index: Sequence[int]) -> tuple[Path, int]:
        """File and byte of an element of a single-rank parameter."""
        place, _ = self._find(name)
        return self._stored.locate(place.key, (*place.index, *index))

    def _find(self, name: str) -> tuple[GlobalPlace, StoredTensor]:
        places = global_places(name)
        for place in places:
            tensor = self._stored.tensors.get(place.key)
            if tensor is not None:
                if any(i >= n for i, n in zip(place.index, tensor.dims, strict=False)):
                    raise CheckpointError(
                        f"{self.folder}: {place.key} of shape {tensor.dims} has no {place.index}"
                    )
                return place, tensor
        raise CheckpointError(f"{self.folder}: has no tensor {' or '.join(p.key for p in places)}")

    def close(self) -> None:
        """Close the files."""
        self._stored.close()
