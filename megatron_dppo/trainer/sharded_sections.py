"""A parameter that is a stack of sections, each divided among ranks, as one tensor of a distributed checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from torch import Tensor


def in_sections(
    whole: ShardedTensor, widths: Sequence[int], ranks: int, rank: int
) -> ShardedTensorFactory:
    """Place each section of a rank's parameter in the checkpoint's tensor, which is a stack of the whole sections.

    ``widths``: the rows of each section on one rank. ``whole``: the parameter as Megatron-Core divides it, in equal
    runs of rows.
    """
    axis = whole.prepend_axis_num

    def build(
        key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        sections = []
        start = 0
        for part, width in zip(tensor.split(list(widths)), widths, strict=True):
            offset = list(whole.global_offset)
            # All ranks have equal widths: the whole sections before this section have ``start * ranks`` rows.
            offset[axis] = start * ranks + rank * width
            sections.append(
                ShardedTensor(
                    key,
                    part,
                    part.dtype,
                    tuple(part.shape),
                    whole.global_shape,
                    tuple(offset),
                    None,
                    replica_id,
                    prepend_axis_num=axis,
                )
            )
            start += width
        return sections

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)
