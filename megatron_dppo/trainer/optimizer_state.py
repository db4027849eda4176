"""Adam's state by parameter, in the same form for every optimizer class, layout and data type.

Megatron-Core's own optimizer state dicts differ between the plain and the distributed optimizer and
between EP 1 and EP > 1, and without Transformer Engine a distributed optimizer can't read its own:
its ``state_dict`` asserts a step that is not there yet, it copies into leaves that need gradients,
and it gives all parameters one step counter, which then counts once for each of them. Here each
parameter's ``exp_avg`` and ``exp_avg_sq`` (and its fp32 master where the parameter is bfloat16) is
one fp32 tensor in the parameter's shape, cut like the parameter, whatever kind of optimizer holds
it.
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
class Held:
    """What one optimizer on this rank holds of one parameter.

    ``main``: the tensor that it steps: the whole parameter, its fp32 copy, or (distributed) a flat
    slice of either that begins at element ``start`` of the parameter.
    """

    parameter: Parameter
    main: Tensor
    start: int = 0


def sharded_state(optimizer: ChainedOptimizer, model: dict[str, Any]) -> dict[str, Any]:
    """Adam's state as Megatron's sharded tensors. Collective.

    ``model``: the sharded state dict of the model. State that the optimizer has not made yet is
    made, as zeros: that is what its first step begins with.
    """
    full: dict[Parameter, dict[str, Tensor]] = {}
    for part in _parts(optimizer):
        _make_state(part)
        full.update(_gathered(part) if isinstance(part, DistributedOptimizer) else _whole(part))
    return _sharded(model, full)


def sharded_template(parameters: list[Parameter], model: dict[str, Any]) -> dict[str, Any]:
    """Empty tensors of the state of ``parameters`` (all of this rank's), to be filled by a load."""
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
    """Copy what a load filled in into the optimizer, which goes on after ``steps`` steps.

    The model's weights must have been loaded before: an fp32 parameter is its own master.
    """
    full = {p: loaded[str(i)] for i, p in enumerate(parameters)}
    for part in _parts(optimizer):
        _make_state(part)
        for held in _held(part):
            size = held.main.numel()
            for name, target in _tensors(part, held).items():
                source = full[held.parameter][name].reshape(-1)[held.start : held.start + size]
                target.view(-1).copy_(source)
        _set_steps(part, steps)


def optimizer_steps(optimizer: ChainedOptimizer) -> set[int]:
    """The numbers of steps that this rank's parameters (or their groups) have counted."""
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


def _tensors(part: MegatronOptimizer, held: Held) -> dict[str, Tensor]:
    state = part.optimizer.state[held.main]
    return {n: held.main if n == MASTER else state[n] for n in _names(held.parameter)}


def _held_fp32(part: FP32Optimizer) -> Iterator[Held]:
    for group in part.optimizer.param_groups:
        yield from (Held(p, p) for p in group["params"])


def _held_float16(part: Float16OptimizerWithFloat16Params) -> Iterator[Held]:
    for group, main_group in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from (Held(p, main) for p, main in zip(group, main_group, strict=True))
    for group in part.fp32_from_fp32_groups:
        yield from (Held(p, p) for p in group)


def _held_distributed(part: DistributedOptimizer) -> Iterator[Held]:
    for p, (group, order) in part.model_param_group_index_map.items():
        main = part.optimizer.param_groups[group]["params"][order]
        yield Held(p, main, part._get_model_param_range_map(p)["param"].start)


_HELD: dict[type[MegatronOptimizer], Callable[[Any], Iterator[Held]]] = {
    FP32Optimizer: _held_fp32,
    Float16OptimizerWithFloat16Params: _held_float16,
    DistributedOptimizer: _held_distributed,
}


def _held(part: MegatronOptimizer) -> Iterator[Held]:
    return _HELD[type(part)](part)


def _counts_per_parameter(part: MegatronOptimizer) -> bool:
    """Whether Adam's step is counted by parameter (torch), not by group (Transformer Engine)."""
    return isinstance(part.optimizer, torch.optim.Adam)


def _make_state(part: MegatronOptimizer) -> None:
    for held in _held(part):
        state = part.optimizer.state[held.main]
        if not state:
            state.update({name: torch.zeros_like(held.main.data) for name in MOMENTS})
            if _counts_per_parameter(part):
                state["step"] = torch.tensor(0.0)


def _set_steps(part: MegatronOptimizer, steps: int) -> None:
    if _counts_per_parameter(part):
        for held in _held(part):
            part.optimizer.state[held.main]["step"] = torch.tensor(float(steps))
    else:
        for group in part.optimizer.param_groups:
            group["step"] = steps


def _whole(part: MegatronOptimizer) -> dict[Parameter, dict[str, Tensor]]:
    return {held.parameter: _tensors(part, held) for held in _held(part)}


def _gathered(part: DistributedOptimizer) -> dict[Parameter, dict[str, Tensor]]:
    """The whole state by parameter, on the first rank of the optimizer's group; empty elsewhere.

    Bucket by bucket over gloo, in the buffers' own coordinates: Megatron-Core's gather forgets the
    padding between buckets, and a tied embedding has a bucket of its own.
    """
    group = part.data_parallel_group_gloo
    held = {h.parameter: h for h in _held(part)}
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
    """``full`` cut and named as the model's sharded tensors are; keyed by the order of ``full``."""
    tensors, _ = extract_sharded_tensors_and_factories(model)
    of_model = {id(sharded.data): sharded for sharded in nested_values(tensors)}
    return {
        str(i): {
            name: make_sharded_optimizer_tensor(of_model[id(p)], tensor, f"optimizer.state.{name}")
            for name, tensor in state.items()
        }
        for i, (p, state) in enumerate(full.items())
    }
