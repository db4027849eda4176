"""What a rank holds of a checkpoint's tensors (weights, and Adam's state by parameter), and what of it it writes.

Replicas hold the same weights (and with the plain optimizer the same state): each writes a share, so
that every element is written once. With the distributed optimizer each writes the slices that it
updates. Nothing is sent between ranks for that.

Adam's state has one form for every optimizer class, layout and dtype: each parameter's ``exp_avg`` and
``exp_avg_sq`` (and the fp32 master of a bfloat16 parameter) is fp32, in the parameter's order of elements. A
rank sees the slices that it updates itself: whole parameters with the plain optimizer, flat slices of them
with the distributed one.

Megatron-Core's own optimizer state dicts (0.16.1) are not used; docs/checkpoints.md says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.checkpoint_conversion.dist_blocks import Block, Box, Dims, flat_boxes
from megatron_dppo.data.packing import partition_by_cost

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"


@dataclass(frozen=True)
class StateSlice:
    """Adam's state of some elements of ``parameter``, from ``start`` on.

    ``tensors``: by name, 1-D, as they lie in the optimizer: what is copied into them is its state.
    """

    parameter: Parameter
    start: int
    tensors: dict[str, Tensor]


def state_slices(optimizer: ChainedOptimizer) -> list[StateSlice]:
    """The state of all that this rank updates. Not collective.

    State that the optimizer has not allocated yet is set to zeros, the values before its first step.
    """
    slices = []
    for part in _parts(optimizer):
        _make_state(part)
        for held in _shards(part):
            tensors = _tensors(part, held)
            flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
            slices.append(StateSlice(held.parameter, held.start, flat))
    return slices


def is_distributed(optimizer: ChainedOptimizer) -> bool:
    """Whether each replica updates a part of every parameter, instead of all of it."""
    return any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))


def set_steps(optimizer: ChainedOptimizer, steps: int) -> None:
    """Set Adam's step count of every parameter."""
    for part in _parts(optimizer):
        _set_steps(part, steps)


def optimizer_steps(optimizer: ChainedOptimizer) -> set[int]:
    """The step counts of this rank's parameters (or parameter groups); one element if they agree."""
    found = set()
    for part in _parts(optimizer):
        inner = part.optimizer
        counts = [g["step"] for g in inner.param_groups if "step" in g]
        counts += [state["step"] for state in inner.state.values() if "step" in state]
        found |= {int(count) for count in counts}
    return found


@dataclass(frozen=True)
class _Shard:
    """The part of one parameter that one optimizer on this rank updates.

    ``main``: the tensor that it updates: the parameter, its fp32 copy, or (distributed optimizer) a
    flat slice of either that begins at element ``start`` of the parameter.
    """

    parameter: Parameter
    main: Tensor
    start: int = 0


def _parts(optimizer: ChainedOptimizer) -> list[MegatronOptimizer]:
    return [p for p in optimizer.chained_optimizers if not getattr(p, "is_stub_optimizer", False)]


def _names(parameter: Parameter) -> tuple[str, ...]:
    return MOMENTS if parameter.dtype is torch.float32 else (*MOMENTS, MASTER)


def _tensors(part: MegatronOptimizer, held: _Shard) -> dict[str, Tensor]:
    state = part.optimizer.state[held.main]
    return {n: held.main if n == MASTER else state[n] for n in _names(held.parameter)}


def _shards_fp32(part: FP32Optimizer) -> Iterator[_Shard]:
    for group in part.optimizer.param_groups:
        yield from (_Shard(p, p) for p in group["params"])


def _shards_float16(part: Float16OptimizerWithFloat16Params) -> Iterator[_Shard]:
    for group, main_group in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from (_Shard(p, main) for p, main in zip(group, main_group, strict=True))
    for group in part.fp32_from_fp32_groups:
        yield from (_Shard(p, p) for p in group)


def _shards_distributed(part: DistributedOptimizer) -> Iterator[_Shard]:
    for p, (group, order) in part.model_param_group_index_map.items():
        main = part.optimizer.param_groups[group]["params"][order]
        yield _Shard(p, main, part._get_model_param_range_map(p)["param"].start)


_SHARDS_OF: dict[type[MegatronOptimizer], Callable[[Any], Iterator[_Shard]]] = {
    FP32Optimizer: _shards_fp32,
    Float16OptimizerWithFloat16Params: _shards_float16,
    DistributedOptimizer: _shards_distributed,
}


def _shards(part: MegatronOptimizer) -> Iterator[_Shard]:
    return _SHARDS_OF[type(part)](part)


def _counts_per_parameter(part: MegatronOptimizer) -> bool:
    """Whether Adam counts steps by parameter (torch) or by group (Transformer Engine)."""
    return isinstance(part.optimizer, torch.optim.Adam)


def _make_state(part: MegatronOptimizer) -> None:
    for held in _shards(part):
        state = part.optimizer.state[held.main]
        if not state:
            state.update({name: torch.zeros_like(held.main.data) for name in MOMENTS})
            if _counts_per_parameter(part):
                state["step"] = torch.tensor(0.0)


def _set_steps(part: MegatronOptimizer, steps: int) -> None:
    if _counts_per_parameter(part):
        for held in _shards(part):
            part.optimizer.state[held.main]["step"] = torch.tensor(float(steps))
    else:
        for group in part.optimizer.param_groups:
            group["step"] = steps


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
    parts, tensor = _local_boxes(sharded), sharded.data.detach()
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


def _local_boxes(sharded: ShardedTensor | ShardedTensorFactory) -> list[_Part]:
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
