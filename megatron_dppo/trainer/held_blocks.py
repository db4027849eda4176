"""What this rank holds of a checkpoint's tensors, and what of it this rank writes.

Replicas hold the same weights (and with the plain optimizer the same state): each writes a share, so
that every element is written once. With the distributed optimizer each writes the slices that it
updates. Nothing is sent between ranks for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_dppo.checkpoint_conversion.dist_blocks import Block, Box, Dims, flat_boxes
from megatron_dppo.data.packing import partition_by_cost
from megatron_dppo.trainer.optimizer_state import StateSlice, is_distributed, state_slices

STATE_PREFIX = "optimizer.state."


@dataclass(frozen=True)
class HeldBlock:
    """A block and its elements on this rank: contiguous, of the box's shape, as they lie in the trainer."""

    block: Block
    values: Tensor


@dataclass(frozen=True)
class HeldState:
    """``blocks``: all that this rank holds. ``own``: the part that it writes; ``objects``: what else, by key."""

    blocks: list[HeldBlock]
    own: list[HeldBlock]
    objects: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """Elements ``start ..`` of a local tensor: the box at ``offsets`` of the checkpoint's tensor ``key``."""

    key: str
    dims: Dims
    offsets: Dims
    sizes: Dims
    start: int
    elements: int
    resizable: bool


@dataclass(frozen=True)
class _Held:
    """A local tensor with all that a checkpoint holds of it.

    ``is_main``: no rank outside its replicas writes it. ``replica``: which of them this rank is.
    """

    weight: list[HeldBlock]
    state: list[HeldBlock]
    is_main: bool
    is_expert: bool
    replica: int

    @property
    def bytes(self) -> int:
        return sum(held.block.bytes for held in (*self.weight, *self.state))


def named_chunks(chunks: list[GPTModel]) -> list[tuple[str, GPTModel]]:
    """This rank's model chunks, by the names under which a checkpoint's state has them."""
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def model_state(chunks: list[GPTModel]) -> dict[str, Any]:
    """Megatron's sharded state dict of this rank's chunks, of live tensors. Not collective."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {name: c.sharded_state_dict(metadata=metadata) for name, c in named_chunks(chunks)}


def held_state(model: dict[str, Any], optimizer: ChainedOptimizer) -> HeldState:
    """What this rank holds of weights and optimizer. ``model``: Megatron's sharded state dict, of live tensors.

    Replicas must call it alike: each finds its share on its own.
    """
    slices: dict[int, list[StateSlice]] = {}
    for found in state_slices(optimizer):
        slices.setdefault(id(found.parameter), []).append(found)
    tensors, objects = [], {}
    for sharded in nested_values(model):
        if isinstance(sharded, ShardedObject):
            if is_main_replica(sharded.replica_id):
                objects[sharded.unique_key] = sharded.data
        elif isinstance(sharded, (ShardedTensor, ShardedTensorFactory)):
            tensors.append(_held(sharded, slices.get(id(sharded.data), ())))
        else:
            raise TypeError(f"Megatron's state dict holds {type(sharded)}, expected sharded ones")
    return HeldState(
        blocks=[block for held in tensors for block in (*held.weight, *held.state)],
        own=list(_own(tensors, split_state=not is_distributed(optimizer))),
        objects=objects,
    )


def _held(sharded: ShardedTensor | ShardedTensorFactory, slices: Iterable[StateSlice]) -> _Held:
    parts, tensor = _parts(sharded), sharded.data.detach()
    state = [
        block
        for found in slices
        for name, values in found.tensors.items()
        for block in _blocks(parts, f"{STATE_PREFIX}{name}.", values, found.start)
    ]
    whose = sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id,)
    return _Held(
        weight=list(_blocks(parts, "", tensor.view(-1), 0)),
        state=state,
        is_main=not any(whose[:-1]),
        is_expert=not getattr(sharded.data, "allreduce", True),
        replica=whose[-1],
    )


def _parts(sharded: ShardedTensor | ShardedTensorFactory) -> list[_Part]:
    """The boxes that a local tensor fills: one, or one for each tensor that is fused in it."""
    base = sharded.data
    is_one = isinstance(sharded, ShardedTensor)
    built = [sharded] if is_one else list(nested_values({"": sharded.build()}))
    parts = []
    for one in built:
        start, rest = divmod(one.data.data_ptr() - base.data_ptr(), base.dtype.itemsize)
        if rest or not one.data.is_contiguous():
            raise TypeError(f"{one.key}: not rows of the parameter that holds it")
        lead = (1,) * one.prepend_axis_num
        parts.append(
            _Part(
                key=one.key,
                dims=tuple(one.global_shape),
                offsets=tuple(one.global_offset),
                sizes=(*lead, *one.local_shape),
                start=start,
                elements=one.data.numel(),
                resizable=one.allow_shape_mismatch,
            )
        )
    return parts


def _blocks(parts: list[_Part], prefix: str, values: Tensor, start: int) -> Iterator[HeldBlock]:
    """``values`` (1-D), which are elements ``start ..`` of the local tensor, as blocks."""
    for part in parts:
        low = max(start, part.start)
        high = min(start + values.numel(), part.start + part.elements)
        at = low - start
        for box in flat_boxes(part.sizes, low - part.start, high - part.start):
            moved = tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True))
            block = Block(
                f"{prefix}{part.key}",
                part.dims,
                Box(moved, box.sizes),
                values.dtype,
                part.resizable,
            )
            yield HeldBlock(block, values[at : at + box.elements].view(box.sizes))
            at += box.elements


def _own(tensors: list[_Held], *, split_state: bool) -> Iterator[HeldBlock]:
    """What this rank writes. ``split_state``: replicas hold the same state, and share it out with the weights."""
    main = [held for held in tensors if held.is_main and held.bytes]
    if not split_state:
        yield from (block for held in main for block in held.state)
    replicas_of = {
        False: parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        True: parallel_state.get_expert_data_parallel_world_size(),
    }
    for is_expert, replicas in replicas_of.items():  # apart: their replicas are other ranks
        alike = [held for held in main if held.is_expert == is_expert]
        sizes = [held.bytes if split_state else _weight_bytes(held) for held in alike]
        for replica, indices in enumerate(partition_by_cost(sizes, replicas)):
            for held in (alike[i] for i in indices):
                if held.replica == replica:
                    yield from held.weight
                    if split_state:
                        yield from held.state


def _weight_bytes(held: _Held) -> int:
    return sum(block.block.bytes for block in held.weight)
