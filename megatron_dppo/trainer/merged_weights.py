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
    updates. But the sum is rounded to W's type, which may leave out most of a small ``scale * B A``.
    """

    def __init__(
        self, parameters: Mapping[ParameterKey, Tensor], adapters: list[lora_modules.LinearAdapter]
    ) -> None:
        self._parameters = parameters
        self._deltas: dict[ParameterKey, Callable[[], Tensor]] = {}
        self._cache: OrderedDict[ParameterKey, Tensor] = OrderedDict()
        self._held: dict[ParameterKey, tuple[Tensor, Tensor]] = {}
        """A pair of sums for each merged weight: of h d and of d^2 over its elements. d is ``scale * B A``, h is the
        change of the rounded weight. A weight that is merged several times counts once."""
        for adapter in adapters:
            for expert, name in _base_names(adapter, parameters):
                self._deltas[adapter.linear.chunk, name] = partial(adapter.weight_delta, expert)

    @torch.no_grad()
    def __getitem__(self, key: ParameterKey) -> Tensor:
        base = self._parameters[key]
        if key not in self._deltas:
            return base
        if key not in self._cache:
            delta = self._deltas[key]().float()
            self._cache[key] = (base.float() + delta).to(base.dtype)
            # Out of place: in float32, ``float`` returns the merged weight itself.
            change = (self._cache[key].float() - base).flatten()
            delta = delta.flatten()
            self._held[key] = (change.dot(delta), delta.dot(delta))
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return self._cache[key]

    def held_update(self) -> tuple[float, float]:
        """Return the sums of h d and of d^2 over the weights that were merged since the last call.

        d is the exact change ``scale * B A`` of an element, h is the change that W's type holds. The quotient of the
        sums is the projection of h onto d: 1 if nothing is lost, 0 if no element changes.
        """
        along = sum(float(product) for product, _ in self._held.values())
        size = sum(float(square) for _, square in self._held.values())
        self._held.clear()
        return along, size

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
