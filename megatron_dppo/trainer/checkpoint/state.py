"""What a rank holds of a checkpoint's tensors (weights, and Adam's state by parameter), and its share of writing them.

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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

from megatron_dppo.checkpoint_conversion.dist_reading import Box, TensorBlock, flat_boxes
from megatron_dppo.data.packing import partition_by_cost

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"
STATE_PREFIX = "optimizer.state."


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
        for shard in _shards(part):
            state = part.optimizer.state[shard.main]
            if not state:
                state.update({name: torch.zeros_like(shard.main.data) for name in MOMENTS})
                if _counts_per_parameter(part):
                    state["step"] = torch.tensor(0.0)
            tensors = {name: state[name] for name in MOMENTS}
            if shard.parameter.dtype is not torch.float32:
                # A float32 parameter is its own master, and is written as the weight.
                tensors[MASTER] = shard.main
            flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
            slices.append(StateSlice(shard.parameter, shard.start, flat))
    return slices


def set_steps(optimizer: ChainedOptimizer, steps: int) -> None:
    """Set Adam's step count of every parameter."""
    for part in _parts(optimizer):
        if _counts_per_parameter(part):
            for shard in _shards(part):
                part.optimizer.state[shard.main]["step"] = torch.tensor(float(steps))
        else:
            for group in _counted_groups(part):
                group["step"] = steps


def optimizer_steps(optimizer: ChainedOptimizer) -> set[int]:
    """The step counts of this rank's parameters (or parameter groups); one element if they agree."""
    counts: list[Any] = []
    for part in _parts(optimizer):
        inner = part.optimizer
        counts += [g["step"] for g in _counted_groups(part) if "step" in g]
        counts += [state["step"] for state in inner.state.values() if "step" in state]
    return {int(count) for count in counts}


def _counted_groups(part: MegatronOptimizer) -> list[dict[str, Any]]:
    """Those whose steps Transformer Engine's Adam counts: it passes over groups of which this rank has nothing."""
    return [group for group in part.optimizer.param_groups if group["params"]]


class _Shard(NamedTuple):
    """The part of one parameter that one optimizer on this rank updates.

    ``main``: the tensor that it updates: the parameter, its fp32 copy, or (distributed optimizer) a
    flat slice of either that begins at element ``start`` of the parameter.
    """

    parameter: Parameter
    main: Tensor
    start: int = 0


def _parts(optimizer: ChainedOptimizer) -> list[MegatronOptimizer]:
    return [p for p in optimizer.chained_optimizers if not getattr(p, "is_stub_optimizer", False)]


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
    # torch's Adam counts steps by parameter, Transformer Engine's by group.
    return isinstance(part.optimizer, torch.optim.Adam)


class LocalBlock(NamedTuple):
    """A block and its elements on this rank: contiguous, of the box's shape, as they lie in the trainer."""

    block: TensorBlock
    values: Tensor


@dataclass(frozen=True)
class RankState:
    """``blocks``: all that this rank holds. ``share``: those that it writes; ``objects``: what else, by key."""

    blocks: list[LocalBlock]
    share: list[LocalBlock]
    objects: dict[str, Any]


@dataclass(frozen=True)
class _LocalTensor:
    """A local tensor with all that a checkpoint holds of it.

    ``is_main``: no rank outside its replicas writes it. ``replica``: which of them this rank is.
    """

    weight: list[LocalBlock]
    state: list[LocalBlock]
    is_main: bool
    is_expert: bool
    replica: int


def named_chunks(chunks: list[GPTModel]) -> list[tuple[str, GPTModel]]:
    """This rank's model chunks, by the names under which a checkpoint's state has them."""
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def model_state(chunks: list[GPTModel]) -> dict[str, Any]:
    """Megatron's sharded state dict of this rank's chunks, of live tensors. Not collective."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {name: c.sharded_state_dict(metadata=metadata) for name, c in named_chunks(chunks)}


def rank_state(model: dict[str, Any], optimizer: ChainedOptimizer) -> RankState:
    """What this rank holds of weights and optimizer. ``model``: Megatron's sharded state dict, of live tensors.

    Replicas must call it alike: each finds its share by itself.
    """
    slices: dict[int, list[StateSlice]] = {}
    for state in state_slices(optimizer):
        # By identity: tensors compare element by element.
        slices.setdefault(id(state.parameter), []).append(state)
    tensors, objects = [], {}
    for sharded in nested_values(model):
        if isinstance(sharded, ShardedObject):
            if is_main_replica(sharded.replica_id):
                objects[sharded.unique_key] = sharded.data
        elif isinstance(sharded, (ShardedTensor, ShardedTensorFactory)):
            tensors.append(_local_tensor(sharded, slices.get(id(sharded.data), ())))
        else:
            raise TypeError(f"Megatron's state dict holds {type(sharded)}, expected sharded ones")
    # Replicas of the plain optimizer hold the same state.
    split_state = not any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))
    return RankState(
        blocks=[block for tensor in tensors for block in (*tensor.weight, *tensor.state)],
        share=list(_share(tensors, split_state=split_state)),
        objects=objects,
    )


def _local_tensor(
    sharded: ShardedTensor | ShardedTensorFactory, slices: Iterable[StateSlice]
) -> _LocalTensor:
    regions = _regions(sharded)
    state = [
        block
        for one in slices
        for name, values in one.tensors.items()
        for block in _blocks(regions, f"{STATE_PREFIX}{name}.", values, one.start)
    ]
    replica = sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id,)
    return _LocalTensor(
        weight=list(_blocks(regions, "", sharded.data.detach().view(-1), 0)),
        state=state,
        is_main=not any(replica[:-1]),
        # So Megatron marks what other ranks than the data-parallel ones hold replicas of.
        is_expert=not getattr(sharded.data, "allreduce", True),
        replica=replica[-1],
    )


def _regions(sharded: ShardedTensor | ShardedTensorFactory) -> list[tuple[int, TensorBlock]]:
    """(first element, block) of what a local tensor fills: one, or one for each tensor that is fused in it."""
    base = sharded.data
    is_one = isinstance(sharded, ShardedTensor)
    regions = []
    for one in [sharded] if is_one else nested_values({"": sharded.build()}):
        # What a factory builds are views of the fused parameter: their addresses tell where they lie in it.
        start, rest = divmod(one.data.data_ptr() - base.data_ptr(), base.dtype.itemsize)
        if rest or not one.data.is_contiguous():
            raise TypeError(f"{one.key}: not rows of the parameter that holds it")
        sizes = (*(1,) * one.prepend_axis_num, *one.local_shape)
        box = Box(tuple(one.global_offset), sizes)
        dims = tuple(one.global_shape)
        regions.append(
            (start, TensorBlock(one.key, dims, box, base.dtype, one.allow_shape_mismatch))
        )
    return regions


def _blocks(
    regions: list[tuple[int, TensorBlock]], prefix: str, values: Tensor, start: int
) -> Iterator[LocalBlock]:
    """``values`` (1-D), which are elements ``start ..`` of the local tensor, as blocks."""
    for first, region in regions:
        low = max(start, first)
        high = min(start + values.numel(), first + region.box.elements)
        offset = low - start
        for box in flat_boxes(region.box.sizes, low - first, high - first):
            moved = tuple(a + b for a, b in zip(region.box.offsets, box.offsets, strict=True))
            block = replace(
                region, key=prefix + region.key, box=Box(moved, box.sizes), dtype=values.dtype
            )
            yield LocalBlock(block, values[offset : offset + box.elements].view(box.sizes))
            offset += box.elements


def _share(tensors: list[_LocalTensor], *, split_state: bool) -> Iterator[LocalBlock]:
    """What this rank writes. ``split_state``: replicas share out the state with the weights."""
    main = [tensor for tensor in tensors if tensor.is_main and tensor.weight]
    if not split_state:
        yield from (block for tensor in main for block in tensor.state)
    replicas_of = {
        False: parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        True: parallel_state.get_expert_data_parallel_world_size(),
    }
    # Apart, because the replicas of experts are other ranks.
    for is_expert, replicas in replicas_of.items():
        alike = [
            (tensor, [*tensor.weight, *tensor.state] if split_state else tensor.weight)
            for tensor in main
            if tensor.is_expert == is_expert
        ]
        sizes = [sum(block.bytes for block, _ in blocks) for _, blocks in alike]
        for replica, indices in enumerate(partition_by_cost(sizes, replicas)):
            for tensor, blocks in (alike[i] for i in indices):
                if tensor.replica == replica:
                    yield from blocks
