"""Adapters as tensors: under the names of ``model.adapters``, merged into the weights, and for checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.model.adapters import (
    ANY_EXPERT,
    CHECKPOINT_PREFIX,
    CHILD,
    LORA_A,
    LORA_B,
    AdapterPart,
)
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout, local_layers
from megatron_dppo.model.mapping import LocalParameter
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.lora.attaching import ROUTER
from megatron_dppo.trainer.lora.modules import LinearAdapter

_KEPT = 4
"""Merged parameters that are kept: a bucket's queries, keys and values are read off one."""


def adapter_values(adapters: list[LinearAdapter]) -> dict[ParameterKey, Tensor]:
    """This rank's A and B, under the names of ``adapter_parameters``; views."""
    found = {}
    for adapter in adapters:
        linear = adapter.linear
        for part in linear.parts:
            for which in (LORA_A, LORA_B):
                held = getattr(adapter.matrices(part.name), which).data
                name = f"{linear.path}.{CHILD}.{part.name}.{which}"
                if linear.experts:
                    slices = {f"{name}.{i}": held[i] for i in range(len(linear.experts))}
                else:
                    slices = {name: held}
                found.update({(linear.chunk, n): value for n, value in slices.items()})
    return found


@torch.no_grad()
def fill(
    adapters: list[LinearAdapter],
    table: Iterator[LocalParameter],
    whole: Callable[[str, tuple[int, ...]], Tensor],
    dims: Mapping[str, tuple[int, ...]],
) -> None:
    """Set every A and B to its part of ``whole(name, dims)``, the tensor of the whole model."""
    values = adapter_values(adapters)
    for entry in table:
        (segment,) = entry.segments
        source = whole(segment.hf_name, dims[segment.hf_name])
        values[entry.chunk, entry.name].copy_(segment.of_hf(source))


class MergedWeights(Mapping[ParameterKey, Tensor]):
    """A rank's parameters, those with adapters as ``W + scale * B A`` of this moment, in W's type.

    Made when asked for, in fp32 and from the frozen W, so that no update's rounding is in the next one's.
    """

    def __init__(
        self, parameters: Mapping[ParameterKey, Parameter], adapters: list[LinearAdapter]
    ) -> None:
        self._parameters = parameters
        self._deltas: dict[ParameterKey, Callable[[], Tensor]] = {}
        self._kept: OrderedDict[ParameterKey, Tensor] = OrderedDict()
        for adapter in adapters:
            for expert, name in _base_names(adapter, parameters):
                self._deltas[adapter.linear.chunk, name] = _delta_of(adapter, expert)

    @torch.no_grad()
    def __getitem__(self, key: ParameterKey) -> Tensor:
        base = self._parameters[key].data
        if key not in self._deltas:
            return base
        if key not in self._kept:
            self._kept[key] = (base.float() + self._deltas[key]()).to(base.dtype)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def __iter__(self) -> Iterator[ParameterKey]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def sharded_adapters(
    adapters: list[LinearAdapter], chunks: list[GPTModel], layout: Layout
) -> dict[str, Any]:
    """Every trained tensor of this rank as a sharded tensor, by ``model<chunk>`` and its name in the chunk.

    Keys are the adapters' names in the whole model, ``*`` standing for the experts that a first axis counts; those of
    trained routers are ``adapters.router.<layer>``. They know no layout.
    """
    out: dict[str, Any] = {f"model{i}": {} for i in range(len(chunks))}
    for adapter in adapters:
        linear = adapter.linear
        for part in linear.parts:
            for which in (LORA_A, LORA_B):
                name = f"{linear.path}.{CHILD}.{part.name}.{which}"
                tensor = getattr(adapter.matrices(part.name), which)
                out[f"model{linear.chunk}"][name] = _sharded(adapter, part, which, tensor, layout)
    return out


def sharded_routers(
    chunks: list[GPTModel], shape: ModelShape, layout: Layout, rank: int
) -> dict[str, dict[str, ShardedTensor]]:
    """The routers' weights likewise, whole on every rank of a stage."""
    at = layout.coordinates(rank)
    out: dict[str, dict[str, ShardedTensor]] = {}
    for i, chunk in enumerate(chunks):
        layers = local_layers(shape, layout, at.pp, i)
        out[f"model{i}"] = {
            name: ShardedTensor.from_rank_offsets(
                f"adapters.router.{layers[int(name.split('.')[2])]}",
                parameter,
                replica_id=(0, at.tp, at.dp),
            )
            for name, parameter in chunk.named_parameters()
            if name.endswith(ROUTER)
        }
    return out


def _sharded(
    adapter: LinearAdapter, part: AdapterPart, which: str, tensor: Parameter, layout: Layout
) -> ShardedTensor:
    linear = adapter.linear
    key = f"{CHECKPOINT_PREFIX}{part.module.format(expert=ANY_EXPERT)}.{which}"
    offsets = []
    is_cut = part.is_cut(which) and not (linear.of_experts and not linear.experts)
    if linear.experts:
        tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
        tensor_size = layout.expert_tensor
        replica = parallel_state.get_expert_data_parallel_rank()
        offsets.append((0, parallel_state.get_expert_model_parallel_rank(), layout.expert))
    else:
        tensor_rank, tensor_size = parallel_state.get_tensor_model_parallel_rank(), layout.tensor
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if is_cut:
        offsets.append((part.axis + len(offsets), tensor_rank, tensor_size))
    return ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, replica_id=(0, 0 if is_cut else tensor_rank, replica)
    )


def _base_names(
    adapter: LinearAdapter, parameters: Mapping[ParameterKey, Parameter]
) -> list[tuple[int | None, str]]:
    """(local expert, name) of the weights that the adapter adds to."""
    linear = adapter.linear
    if not linear.of_experts:
        return [(None, f"{linear.path}.weight")]
    prefix = f"{linear.path}.weight"
    numbers = [
        int(name.removeprefix(prefix))
        for chunk, name in parameters
        if chunk == linear.chunk and name.startswith(prefix)
    ]
    return [(i, f"{prefix}{i}") for i in sorted(numbers)]


def _delta_of(adapter: LinearAdapter, expert: int | None) -> Callable[[], Tensor]:
    return lambda: adapter.weight_delta(expert)
