"""Adam's state by parameter, in one format for every optimizer class, layout and dtype.

Each parameter's ``exp_avg`` and ``exp_avg_sq`` (and the fp32 master of a bfloat16 parameter) is one
fp32 tensor of the parameter's shape, sharded like the parameter.

Megatron-Core's own optimizer state dicts are not used: they differ between the plain and the
distributed optimizer and between EP 1 and EP > 1. Without Transformer Engine a distributed optimizer
cannot load its own: ``state_dict`` asserts a step that does not exist yet, loading copies into leaves
that require gradients, and all parameters share one step counter, which then counts once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor
from torch.nn import Parameter

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"


@dataclass(frozen=True)
class ParameterShard:
    """The part of one parameter that one optimizer on this rank updates.

    ``main``: the tensor that it updates: the parameter, its fp32 copy, or (distributed optimizer) a
    flat slice of either that begins at element ``start`` of the parameter.
    """

    parameter: Parameter
    main: Tensor
    start: int = 0


def sharded_state(optimizer: ChainedOptimizer, model: dict[str, Any]) -> dict[str, Any]:
    """Adam's state as Megatron's sharded tensors. Collective.

    State that the optimizer has not allocated yet is set to zeros, the values before its first
    step. ``model``: the model's sharded state dict.
    """
    full: dict[Parameter, dict[str, Tensor]] = {}
    for part in _parts(optimizer):
        _make_state(part)
        full.update(_gathered(part) if isinstance(part, DistributedOptimizer) else _whole(part))
    return _sharded(model, full)


def sharded_template(parameters: list[Parameter], model: dict[str, Any]) -> dict[str, Any]:
    """Uninitialised sharded tensors for a load of the state of ``parameters`` (all of this rank)."""
    return _sharded(
        model,
        {
            p: {name: torch.empty(p.shape, dtype=torch.float32) for name in _names(p)}
            for p in parameters
        },
    )


@torch.no_grad()
def load_state(
    optimizer: ChainedOptimizer, parameters: list[Parameter], loaded: dict[str, Any], steps: int
) -> None:
    """Copy loaded state into the optimizer.

    The model's weights must be loaded before: an fp32 parameter is its own master.

    Args:
        optimizer: to fill.
        parameters: as given to ``sharded_template``.
        loaded: the template after the load.
        steps: optimiser steps so far.
    """
    full = {p: loaded[str(i)] for i, p in enumerate(parameters)}
    for part in _parts(optimizer):
        _make_state(part)
        for held in _shards(part):
            size = held.main.numel()
            for name, target in _tensors(part, held).items():
                source = full[held.parameter][name].reshape(-1)[held.start : held.start + size]
                target.view(-1).copy_(source)
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


def _parts(optimizer: ChainedOptimizer) -> list[MegatronOptimizer]:
    return [p for p in optimizer.chained_optimizers if not getattr(p, "is_stub_optimizer", False)]


def _names(parameter: Parameter) -> tuple[str, ...]:
    return MOMENTS if parameter.dtype is torch.float32 else (*MOMENTS, MASTER)


def _tensors(part: MegatronOptimizer, held: ParameterShard) -> dict[str, Tensor]:
    state = part.optimizer.state[held.main]
    return {n: held.main if n == MASTER else state[n] for n in _names(held.parameter)}


def _shards_fp32(part: FP32Optimizer) -> Iterator[ParameterShard]:
    for group in part.optimizer.param_groups:
        yield from (ParameterShard(p, p) for p in group["params"])


def _shards_float16(part: Float16OptimizerWithFloat16Params) -> Iterator[ParameterShard]:
    for group, main_group in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from (ParameterShard(p, main) for p, main in zip(group, main_group, strict=True))
    for group in part.fp32_from_fp32_groups:
        yield from (ParameterShard(p, p) for p in group)


def _shards_distributed(part: DistributedOptimizer) -> Iterator[ParameterShard]:
    for p, (group, order) in part.model_param_group_index_map.items():
        main = part.optimizer.param_groups[group]["params"][order]
        yield ParameterShard(p, main, part._get_model_param_range_map(p)["param"].start)


_SHARDS_OF: dict[type[MegatronOptimizer], Callable[[Any], Iterator[ParameterShard]]] = {
    FP32Optimizer: _shards_fp32,
    Float16OptimizerWithFloat16Params: _shards_float16,
    DistributedOptimizer: _shards_distributed,
}


def _shards(part: MegatronOptimizer) -> Iterator[ParameterShard]:
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


def _whole(part: MegatronOptimizer) -> dict[Parameter, dict[str, Tensor]]:
    return {held.parameter: _tensors(part, held) for held in _shards(part)}


def _gathered(part: DistributedOptimizer) -> dict[Parameter, dict[str, Tensor]]:
    """The whole state by parameter, on the first rank of the optimizer's group; empty elsewhere.

    Gathered over gloo bucket by bucket, in the buffers' own offsets: Megatron-Core's gather ignores
    the padding between buckets, and a tied embedding has its own bucket.
    """
    group = part.data_parallel_group_gloo
    held = {h.parameter: h for h in _shards(part)}
    full: dict[Parameter, dict[str, Tensor]] = {}
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        (bucket_ranges,) = ranges.values()
        for bucket, bucket_range in zip(buffer.buckets, bucket_ranges, strict=True):
            shard_size = bucket.grad_data.numel() // group.size()
            for name in _names(bucket.params_list[0]):
                shard = torch.zeros(shard_size, dtype=torch.float32)
                for p, at in bucket_range["param_map"].items():
                    place = slice(at["gbuf_local"].start, at["gbuf_local"].end)
                    shard[place] = _tensors(part, held[p])[name].detach().cpu().view(-1)
                whole = _gather_to_first(shard, group)
                if whole is None:
                    continue
                for p in bucket.params_list:
                    start = buffer.param_index_map[p][0] - bucket.offset
                    values = whole[start : start + p.numel()].view(p.shape)
                    full.setdefault(p, {})[name] = values
    return full


def _gather_to_first(shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(shard, shards, dist.get_global_rank(group, 0), group)
    return None if shards is None else torch.cat(shards)


def _sharded(model: dict[str, Any], full: dict[Parameter, dict[str, Tensor]]) -> dict[str, Any]:
    """``full`` as sharded tensors, sharded and named like the model's; keys: order of ``full``."""
    tensors, _ = extract_sharded_tensors_and_factories(model)
    of_model = {id(sharded.data): sharded for sharded in nested_values(tensors)}
    return {
        str(i): {
            name: make_sharded_optimizer_tensor(of_model[id(p)], tensor, f"optimizer.state.{name}")
            for name, tensor in state.items()
        }
        for i, (p, state) in enumerate(full.items())
    }
