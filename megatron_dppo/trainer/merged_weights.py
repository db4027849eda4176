"""The weights of an adapted policy with its adapters merged, computed parameter by parameter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.trainer import lora_modules

_CACHE_SIZE = 4
"""Number of merged parameters that are kept. A bucket reads several tensors of one parameter in turn, for example
queries, keys and values. With the cache, the parameter is not merged again for each tensor."""


class MergedWeights(Mapping[ParameterKey, Tensor]):
    """A rank's parameters. Adapted weights are ``W + scale * B A`` with the current A and B, in W's type.

    A weight is merged when it is read, in fp32 and from the frozen W, so that rounding errors do not accumulate over
    updates.
    """

    def __init__(
        self,
        parameters: Mapping[ParameterKey, Tensor],
        adapters: list[lora_modules.LinearAdapter],
    ) -> None:
        self._parameters = parameters
        self._deltas: dict[ParameterKey, Callable[[], Tensor]] = {}
        self._cache: OrderedDict[ParameterKey, Tensor] = OrderedDict()
        for adapter in adapters:
            for expert, name in _base_names(adapter, parameters):
                self._deltas[adapter.linear.chunk, name] = partial(adapter.weight_delta, expert)

    @torch.no_grad()
    def __getitem__(self, key: ParameterKey) -> Tensor:
        base = self._parameters[key]
        if key not in self._deltas:
            return base
        if key not in self._cache:
            self._cache[key] = (base.float() + self._deltas[key]()).to(base.dtype)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return self._cache[key]

    def __iter__(self) -> Iterator[ParameterKey]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _base_names(
    adapter: lora_modules.LinearAdapter, parameters: Mapping[ParameterKey, Tensor]
) -> list[tuple[int | None, str]]:
    """Return (local expert, name) of the adapter's weights. The expert is None for a linear outside of experts."""
    linear = adapter.linear
    if not linear.of_experts:
        return [(None, f"{linear.path}.weight")]
    prefix = f"{linear.path}.weight"
    local_experts: list[int] = []
    for chunk, name in parameters:
        if chunk == linear.chunk and name.startswith(prefix):
            local_experts.append(int(name.removeprefix(prefix)))
    return [(expert, f"{prefix}{expert}") for expert in sorted(local_experts)]
