"""Sums, maxima and minima of a step: tensors until the one reduction that makes them global.

Losses and diagnostics return these instead of means, so that dividing once by a global count gives
the same number for every packing, micro-batching and data-parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class MetricNames:
    """The names of a ``MetricSums`` in the order in which its vector holds them; equal on all ranks
    of a reduction.
    """

    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    minima: tuple[str, ...] = ()

    def vector_size(self, world_size: int) -> int:
        """Elements of ``MetricSums.to_vector`` for a reduction over ``world_size`` ranks."""
        return len(self.sums) + world_size * (len(self.maxima) + len(self.minima))


@dataclass(frozen=True)
class MetricSums:
    """Scalar tensors by name. ``sums`` add up over tokens, micro-batches and ranks; ``maxima`` and
    ``minima`` as named.

    The names are static: they depend on the configuration, never on the data, so every rank packs
    the same vector. Nothing here reads a value back from the device.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def identity(names: MetricNames, device: torch.device | str = "cpu") -> MetricSums:
        """What a rank contributes that saw no token: 0, -inf and inf."""

        def filled(keys: Iterable[str], value: float) -> dict[str, Tensor]:
            return {k: torch.tensor(value, dtype=torch.float64, device=device) for k in keys}

        return MetricSums(
            filled(names.sums, 0.0), filled(names.maxima, -math.inf), filled(names.minima, math.inf)
        )

    @property
    def names(self) -> MetricNames:
        """The names in sorted order: the layout of ``to_vector``."""
        return MetricNames(
            tuple(sorted(self.sums)), tuple(sorted(self.maxima)), tuple(sorted(self.minima))
        )

    def merge(self, other: MetricSums) -> MetricSums:
        """Both together; a name that only one of them has is kept as it is."""
        return MetricSums(
            _merged(self.sums, other.sums, torch.add),
            _merged(self.maxima, other.maxima, torch.maximum),
            _merged(self.minima, other.minima, torch.minimum),
        )

    __add__ = merge

    def add(self, name: str, value: Tensor | float) -> MetricSums:
        """A copy with ``value`` added to the sum ``name``."""
        return self.merge(MetricSums(sums={name: torch.as_tensor(value, dtype=torch.float64)}))

    def to_vector(
        self, rank: int = 0, world_size: int = 1, device: torch.device | str | None = None
    ) -> Tensor:
        """Float64 vector whose SUM over the ranks of a group holds every metric: one all-reduce for
        all three kinds.

        Maxima and minima travel in a slot of their own for each rank (zero elsewhere), so a sum
        carries them unchanged. ``rank`` and ``world_size`` are those within the group that reduces.
        """
        names = self.names
        every = [self.sums[n] for n in names.sums]
        extremes = [self.maxima[n] for n in names.maxima] + [self.minima[n] for n in names.minima]
        if device is None:
            device = (every + extremes)[0].device if every or extremes else "cpu"
        vector = torch.zeros(names.vector_size(world_size), dtype=torch.float64, device=device)
        if every:
            vector[: len(every)] = _stacked(every, device)
        if extremes:
            start = len(every) + rank * len(extremes)
            vector[start : start + len(extremes)] = _stacked(extremes, device)
        return vector

    @staticmethod
    def from_vector(names: MetricNames, vector: Tensor, world_size: int = 1) -> MetricSums:
        """The inverse of ``to_vector`` after the vectors of ``world_size`` ranks were summed.

        Raises ValueError where the vector's length does not belong to ``names`` and ``world_size``.
        """
        expected = names.vector_size(world_size)
        if vector.shape != (expected,):
            raise ValueError(
                f"metric vector has shape {tuple(vector.shape)}, expected ({expected},) for "
                f"{len(names.sums)} sums, {len(names.maxima)} maxima and {len(names.minima)} "
                f"minima of {world_size} ranks"
            )
        n, high = len(names.sums), len(names.maxima)
        slots = vector[n:].reshape(world_size, high + len(names.minima))
        maxima = slots[:, :high].amax(0) if high else vector.new_empty(0)
        minima = slots[:, high:].amin(0) if names.minima else vector.new_empty(0)
        return MetricSums(
            dict(zip(names.sums, vector[:n].unbind(), strict=True)),
            dict(zip(names.maxima, maxima.unbind(), strict=True)),
            dict(zip(names.minima, minima.unbind(), strict=True)),
        )

    def values(self) -> dict[str, float]:
        """Everything as Python floats in one transfer from the device (a device sync: once a step,
        after the reduction).
        """
        names = self.names
        flat = self.to_vector().tolist()
        return dict(zip((*names.sums, *names.maxima, *names.minima), flat, strict=True))


def _merged(a: dict[str, Tensor], b: dict[str, Tensor], combine) -> dict[str, Tensor]:
    merged = dict(a)
    for name, value in b.items():
        merged[name] = combine(merged[name], value) if name in merged else value
    return merged


def _stacked(values: list[Tensor], device: torch.device | str) -> Tensor:
    return torch.stack([v.detach().to(device=device, dtype=torch.float64) for v in values])
