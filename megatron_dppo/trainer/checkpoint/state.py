"""The blocks of a checkpoint's tensors that a rank holds and writes: weights, and Adam's state by parameter.

Replicas hold the same weights, and with the plain optimizer also the same state. Each replica writes a share of what
they hold in common, so that every element is written once. With the distributed optimizer each rank writes the state
slices that it updates. Every rank computes its share without communication.

Adam's state has the same form for every optimizer class, layout and device: each parameter's ``exp_avg`` and
``exp_avg_sq`` (and the fp32 master of a bfloat16 parameter) in the parameter's order of elements. The moments are fp32,
or bfloat16 if ``megatron_optimizer.exp_avg_dtype`` says so. A rank has the state that it updates: the state of whole
parameters with the plain optimizer, or of flat slices of parameters with the distributed optimizer.

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
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_dppo.checkpoint_conversion.dist_reading import Box, TensorBlock, flat_boxes
from megatron_dppo.data.balancing import partition_by_cost

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"
STATE_PREFIX = "optimizer.state."
_FUSED_MASTER = "master_param"
"""Transformer Engine's name of the fp32 master in the state of a precision-aware FusedAdam. This optimizer steps a
narrower tensor than the master. With other optimizers the tensor that Adam steps is the master.
"""


@dataclass(frozen=True)
class StateSlice:
    """Adam's state of consecutive elements of ``parameter``, from element ``start`` on.

    ``tensors``: 1-D views of the optimizer's tensors, by name; a copy into a view changes the optimizer's state.
    """

    parameter: Parameter
    start: int
    tensors: dict[str, Tensor]


def state_slices(optimizer: ChainedOptimizer) -> list[StateSlice]:
    """Return the state of all elements that this rank updates. Not collective.

    State that the optimizer has not allocated yet is allocated with its values before the first step (zero moments).
    """
    slices = []
    for part in _parts(optimizer):
        adam_of = _adam_by_tensor(part)
        for shard in _shards(part):
            stepped = _stepped_tensor(part, shard.main)
            adam = adam_of[id(stepped)]
            state = adam.state[stepped]
            if not state:
                _start_state(adam, stepped)
                state = adam.state[stepped]
            tensors = {name: state[name] for name in MOMENTS}
            if shard.parameter.dtype is not torch.float32:
                # A float32 parameter is its own master, so the checkpoint has it as the weight.
                tensors[MASTER] = state.get(_FUSED_MASTER, stepped)
            flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
            slices.append(StateSlice(shard.parameter, shard.start, flat))
    return slices


def _start_state(adam: Optimizer, stepped: Tensor) -> None:
    """Allocate the state of ``stepped`` with its values before the first step."""
    # Transformer Engine's Adam knows the types of its moments, and copies the master from the weight.
    if hasattr(adam, "initialize_state"):
        adam.initialize_state(stepped, store_param_remainders=False)
        return
    adam.state[stepped].update({name: torch.zeros_like(stepped.data) for name in MOMENTS})
    if _counts_per_parameter(adam):
        adam.state[stepped]["step"] = torch.tensor(0.0)


def synchronize_masters(optimizer: ChainedOptimizer) -> None:
    """Make an offloaded weight's master and the master's copy equal after a checkpoint was loaded. Not collective.

    Megatron-Core's optimizer has a master of each weight. HybridDeviceOptimizer steps a copy of this master. Loading a
    checkpoint fills only one of the two. If the parameter is fp32, the parameter is the master, and the master is
    filled. Otherwise the copy is filled.
    """
    for part in _parts(optimizer):
        for shard in _shards(part):
            stepped = _stepped_tensor(part, shard.main)
            is_copy = stepped is not shard.main
            # In the precision-aware optimizer ``shard.main`` is a 16-bit tensor, and the copy is the only fp32 master.
            is_master = shard.main.dtype is torch.float32
            if not (is_copy and is_master):
                continue
            if shard.parameter.dtype is torch.float32:
                stepped.data.copy_(shard.main.data)
            else:
                shard.main.data.copy_(stepped.data)


def is_replicated(optimizer: ChainedOptimizer) -> bool:
    """Return whether all replicas hold the same state. They do with the plain optimizer."""
    return not any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))


def set_steps(optimizer: ChainedOptimizer, steps: int) -> None:
    """Set Adam's step count of every parameter."""
    for part in _parts(optimizer):
        for adam in adams(part):
            for group in _counted_groups(adam):
                if not _counts_per_parameter(adam):
                    group["step"] = steps
                    continue
                for tensor in group["params"]:
                    adam.state[tensor]["step"] = torch.tensor(float(steps))


def optimizer_steps(optimizer: ChainedOptimizer) -> set[int]:
    """Return the step counts of this rank's parameters (or parameter groups); one element if all agree."""
    counts: list[Any] = []
    for part in _parts(optimizer):
        for adam in adams(part):
            counts += [group["step"] for group in _counted_groups(adam) if "step" in group]
            counts += [state["step"] for state in adam.state.values() if "step" in state]
    return {int(count) for count in counts}


def adams(part: MegatronOptimizer) -> list[Optimizer]:
    """Return the optimizers that step the tensors of ``part``: several if some of the state is on the host."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        return list(part.optimizer.sub_optimizers)
    return [part.optimizer]


def _adam_by_tensor(part: MegatronOptimizer) -> dict[int, Optimizer]:
    """Return the optimizer that steps a tensor, by the tensor's identity."""
    adam_of: dict[int, Optimizer] = {}
    for adam in adams(part):
        for group in adam.param_groups:
            adam_of.update(dict.fromkeys(map(id, group["params"]), adam))
    return adam_of


def _stepped_tensor(part: MegatronOptimizer, main: Tensor) -> Tensor:
    """Return the tensor that Adam steps for ``main``, a tensor of ``part``'s parameter groups.

    With HybridDeviceOptimizer it may be a copy of ``main``; else it is ``main``.
    """
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        return part.optimizer.param_to_inner_param[main]
    return main


def _counted_groups(adam: Optimizer) -> list[dict[str, Any]]:
    """Return the groups with parameters: Transformer Engine's Adam counts no steps of a group without parameters."""
    return [group for group in adam.param_groups if group["params"]]


class _OptimizerShard(NamedTuple):
    """The part of a parameter that an optimizer on this rank updates.

    ``main``: the tensor in the optimizer's parameter groups. This is the parameter or its fp32 copy. With the
    distributed optimizer it is a flat slice of one of them, which begins at element ``start`` of the parameter.
    """

    parameter: Parameter
    main: Tensor
    start: int = 0


def _parts(optimizer: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Return the chained optimizers that have parameters on this rank."""
    return [p for p in optimizer.chained_optimizers if not getattr(p, "is_stub_optimizer", False)]


def _shards_fp32(part: FP32Optimizer) -> Iterator[_OptimizerShard]:
    for group in part.optimizer.param_groups:
        yield from (_OptimizerShard(p, p) for p in group["params"])


def _shards_float16(part: Float16OptimizerWithFloat16Params) -> Iterator[_OptimizerShard]:
    for group, main_group in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from (_OptimizerShard(p, main) for p, main in zip(group, main_group, strict=True))
    for group in part.fp32_from_fp32_groups:
        yield from (_OptimizerShard(p, p) for p in group)


def _shards_distributed(part: DistributedOptimizer) -> Iterator[_OptimizerShard]:
    # In Adam's groups the fp32 parameters come first. Megatron-Core's ``model_param_group_index_map`` is not used here:
    # it numbers parameters in the order of the buffers. In a group of fp32 and 16-bit parameters it would pair a
    # parameter with the main tensor of another parameter.
    for fp32_params, float16_params, group in zip(
        part.model_fp32_groups, part.model_float16_groups, part.optimizer.param_groups, strict=True
    ):
        for p, main in zip([*fp32_params, *float16_params], group["params"], strict=True):
            yield _OptimizerShard(p, main, part._get_model_param_range_map(p)["param"].start)


_SHARDS_OF: dict[type[MegatronOptimizer], Callable[[Any], Iterator[_OptimizerShard]]] = {
    FP32Optimizer: _shards_fp32,
    Float16OptimizerWithFloat16Params: _shards_float16,
    DistributedOptimizer: _shards_distributed,
}


def _shards(part: MegatronOptimizer) -> Iterator[_OptimizerShard]:
    return _SHARDS_OF[type(part)](part)


def _counts_per_parameter(adam: Optimizer) -> bool:
    # torch's Adam counts steps by parameter, Transformer Engine's by group.
    return isinstance(adam, torch.optim.Adam)


class LocalBlock(NamedTuple):
    """A block and its elements on this rank: a contiguous view of the trainer's tensor, in the box's shape."""

    block: TensorBlock
    values: Tensor


@dataclass(frozen=True)
class RankState:
    """This rank's part of a checkpoint.

    ``blocks``: all blocks that this rank holds. ``share``: the blocks that it writes. ``objects``: the modules' extra
    states that it writes, by key.
    """

    blocks: list[LocalBlock]
    share: list[LocalBlock]
    objects: dict[str, Any]


@dataclass(frozen=True)
class _LocalTensor:
    """A parameter or buffer of this rank, as the blocks of a checkpoint.

    ``is_main``: whether this rank or its data-parallel replicas write the tensor. False: another tensor- or
    pipeline-parallel rank, or its replicas, write the tensor. ``replica``: this rank's index among its data-parallel
    replicas.
    """

    weight: list[LocalBlock]
    state: list[LocalBlock]
    is_main: bool
    is_expert: bool
    replica: int


def named_chunks(chunks: list[GPTModel]) -> list[tuple[str, GPTModel]]:
    """Return this rank's model chunks with their names in a checkpoint's state."""
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def model_state(chunks: list[GPTModel]) -> dict[str, Any]:
    """Return Megatron's sharded state dict of this rank's chunks, with the live tensors. Not collective."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {name: c.sharded_state_dict(metadata=metadata) for name, c in named_chunks(chunks)}


def rank_state(model: dict[str, Any], optimizer: ChainedOptimizer) -> RankState:
    """Return this rank's blocks of weights and optimizer state. Not collective.

    ``model`` is Megatron's sharded state dict with the live tensors. All replicas must pass equal arguments, because
    each computes its own share from them.
    """
    slices: dict[int, list[StateSlice]] = {}
    for state in state_slices(optimizer):
        # Key the slices by the parameter's identity, because ``==`` of tensors compares elements.
        slices.setdefault(id(state.parameter), []).append(state)
    tensors: list[_LocalTensor] = []
    objects: dict[str, Any] = {}
    for sharded in nested_values(model):
        if isinstance(sharded, ShardedObject):
            if is_main_replica(sharded.replica_id):
                objects[sharded.unique_key] = sharded.data
        elif isinstance(sharded, (ShardedTensor, ShardedTensorFactory)):
            tensors.append(_local_tensor(sharded, slices.get(id(sharded.data), ())))
        else:
            raise TypeError(
                f"Megatron's state dict holds {type(sharded)}, expected ShardedTensor, ShardedTensorFactory "
                "or ShardedObject"
            )
    # All replicas of the plain optimizer hold the same state, so they can divide the writing.
    split_state = is_replicated(optimizer)
    blocks: list[LocalBlock] = []
    for tensor in tensors:
        blocks += [*tensor.weight, *tensor.state]
    share = list(_share(tensors, split_state=split_state))
    return RankState(blocks=blocks, share=share, objects=objects)


def _local_tensor(
    sharded: ShardedTensor | ShardedTensorFactory, slices: Iterable[StateSlice]
) -> _LocalTensor:
    """Return the blocks of a tensor of Megatron's state dict, and the blocks of its optimizer state in ``slices``."""
    regions = _regions(sharded)
    state: list[LocalBlock] = []
    for state_slice in slices:
        for name, values in state_slice.tensors.items():
            state += _blocks(regions, f"{STATE_PREFIX}{name}.", values, state_slice.start)
    # Megatron's replica id is the data-parallel index, or a tuple that ends with it.
    replica_ids = sharded.replica_id
    if not isinstance(replica_ids, tuple):
        replica_ids = (replica_ids,)
    *other_ids, data_parallel_id = replica_ids
    return _LocalTensor(
        weight=list(_blocks(regions, "", sharded.data.detach().view(-1), 0)),
        state=state,
        is_main=not any(other_ids),
        # Megatron marks expert parameters by allreduce=False: the expert-data-parallel ranks hold their replicas.
        is_expert=not getattr(sharded.data, "allreduce", True),
        replica=data_parallel_id,
    )


def _regions(sharded: ShardedTensor | ShardedTensorFactory) -> list[tuple[int, TensorBlock]]:
    """Return (first element, block) of each checkpoint tensor in a local tensor. A fused local tensor has several."""
    base = sharded.data
    built = sharded if isinstance(sharded, ShardedTensor) else sharded.build()
    regions = []
    # ``built`` is a ShardedTensor, or a nested dict or list of ShardedTensors. Put it in a dict: ``nested_values`` then
    # yields every ShardedTensor.
    for tensor in nested_values({"": built}):
        # A factory builds views of the fused parameter, so a view's address gives its position in the parameter.
        start, remainder = divmod(tensor.data.data_ptr() - base.data_ptr(), base.dtype.itemsize)
        if remainder or not tensor.data.is_contiguous():
            raise TypeError(
                f"{tensor.key}: its elements are not contiguous in the parameter that it is fused in"
            )
        # Prepended axes, as of layers or experts, have size 1 here and are not in ``local_shape``.
        prepended_sizes = (1,) * tensor.prepend_axis_num
        box = Box(tuple(tensor.global_offset), (*prepended_sizes, *tensor.local_shape))
        dims = tuple(tensor.global_shape)
        block = TensorBlock(tensor.key, dims, box, base.dtype, tensor.allow_shape_mismatch)
        regions.append((start, block))
    return regions


def _blocks(
    regions: list[tuple[int, TensorBlock]], prefix: str, values: Tensor, start: int
) -> Iterator[LocalBlock]:
    """Split ``values`` (1-D), the elements of a local tensor from ``start`` on, into blocks.

    Args:
        regions: (first element, block) of each checkpoint tensor in the local tensor.
        prefix: put before the tensor's key, for optimizer state.
        values: the elements; the blocks are views of them.
        start: position of the first of ``values`` in the local tensor.
    """
    for first_index, region in regions:
        # Elements [low, high) of the local tensor are in both ``values`` and the region. If there are none, low >= high
        # and ``flat_boxes`` yields no box.
        low = max(start, first_index)
        high = min(start + values.numel(), first_index + region.box.elements)
        offset = low - start
        for box in flat_boxes(region.box.sizes, low - first_index, high - first_index):
            offsets = tuple(a + b for a, b in zip(region.box.offsets, box.offsets, strict=True))
            block = replace(
                region, key=prefix + region.key, box=Box(offsets, box.sizes), dtype=values.dtype
            )
            yield LocalBlock(block, values[offset : offset + box.elements].view(box.sizes))
            offset += box.elements


def _share(tensors: list[_LocalTensor], *, split_state: bool) -> Iterator[LocalBlock]:
    """Yield the blocks that this rank writes.

    ``split_state``: replicas hold the same optimizer state, and divide it among themselves as they divide the weights.
    """
    main_tensors = [tensor for tensor in tensors if tensor.is_main]
    if not split_state:
        for tensor in main_tensors:
            yield from tensor.state
    # Number of replicas by ``is_expert``. Experts are divided separately, because their replicas are other ranks.
    replica_counts = {
        False: parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        True: parallel_state.get_expert_data_parallel_world_size(),
    }
    for is_expert, replica_count in replica_counts.items():
        candidates: list[tuple[_LocalTensor, list[LocalBlock]]] = []
        for tensor in main_tensors:
            if tensor.is_expert == is_expert:
                state = tensor.state if split_state else []
                candidates.append((tensor, [*tensor.weight, *state]))
        sizes = [sum(block.bytes for block, _ in blocks) for _, blocks in candidates]
        for replica, indices in enumerate(partition_by_cost(sizes, replica_count)):
            # Every rank computes the shares of all replicas, and yields the blocks in the share of its replica.
            for i in indices:
                tensor, blocks = candidates[i]
                if tensor.replica == replica:
                    yield from blocks
