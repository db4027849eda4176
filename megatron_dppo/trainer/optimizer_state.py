"""Adam's state by parameter, in one form for every optimizer class, layout and dtype.

Each parameter's ``exp_avg`` and ``exp_avg_sq`` (and the fp32 master of a bfloat16 parameter) is fp32,
in the parameter's order of elements. A rank sees the slices that it updates itself: whole parameters
with the plain optimizer, flat slices of them with the distributed one.

Megatron-Core's own optimizer state dicts (0.16.1) are not used; docs/checkpoints.md says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
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
