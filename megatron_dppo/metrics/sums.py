"""Sums, maxima and minima of a step, as tensors, and the vector that reduces them over ranks.

Losses and diagnostics return sums instead of means: one division by a global count gives the same
number for every packing, micro-batching and data-parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class MetricNames:
    """Names of a ``MetricSums`` in the order of its vector; equal on all ranks of a reduction."""

    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    minima: tuple[str, ...] = ()

    def vector_size(self, world_size: int) -> int:
        """Length of ``MetricSums.to_vector`` for a reduction over ``world_size`` ranks."""
        return len(self.sums) + world_size * (len(self.maxima) + len(self.minima))


@dataclass(frozen=True)
class MetricSums:
    """Scalar tensors by metric name: sums, maxima and minima over tokens, micro-batches and ranks.

    The names depend on the configuration, never on the data, so every rank packs the same vector.
    Only ``values`` waits for the device.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def identity(names: MetricNames, device: torch.device | str = "cpu") -> MetricSums:
        """The contribution of a rank without tokens: float64 0, -inf and inf."""

        def filled(keys: Iterable[str], value: float) -> dict[str, Tensor]:
            return {k: torch.tensor(value, dtype=torch.float64, device=device) for k in keys}

        return MetricSums(
            filled(names.sums, 0.0), filled(names.maxima, -math.inf), filled(names.minima, math.inf)
        )

    @property
    def names(self) -> MetricNames:
        """The names in sorted order, which is the order of ``to_vector``."""
        return MetricNames(
            tuple(sorted(self.sums)), tuple(sorted(self.maxima)), tuple(sorted(self.minima))
        )

    def merge(self, other: MetricSums) -> MetricSums:
        """Sum, maximum and minimum by name; a name that only one of the two has is kept."""
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
        """Pack into a float64 vector for one SUM all-reduce of all three kinds.

        Each rank writes its maxima and minima into slots of its own, which are 0 on the other ranks,
        so the sum keeps them unchanged.

        Args:
            rank, world_size: within the group that reduces.
            device: of the vector; default: of the metrics.

        Returns:
            float64 ``[names.vector_size(world_size)]``, detached.
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
        """Unpack the sum of the vectors of ``world_size`` ranks; inverse of ``to_vector``.

        Raises ValueError if the vector's length does not match ``names`` and ``world_size``.
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
        """All metrics as Python floats, in one transfer. Device sync: once a step, after reduction."""
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
