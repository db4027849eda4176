"""Metrics as sums on the device. The sums are read once a step.

One all-reduce of a vector reduces sums, maxima and minima over the ranks. Losses return sums instead of means: the
division of a sum by a global count gives the same number for every packing, micro-batching and data-parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_dppo.metrics.table import METRICS


@dataclass(frozen=True)
class MetricNames:
    """Names of the metrics of a ``MetricSums`` in the order of its vector; equal on all ranks of a reduction."""

    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    minima: tuple[str, ...] = ()

    def vector_size(self, world_size: int) -> int:
        """Length of ``MetricSums.to_vector`` for a reduction over ``world_size`` ranks."""
        return len(self.sums) + world_size * (len(self.maxima) + len(self.minima))


@dataclass(frozen=True)
class MetricSums:
    """Scalar tensors by metric name: sums, maxima and minima over tokens, micro-batches and ranks.

    The names depend on the configuration, never on the data, so the vectors of all ranks have the same order. Only
    ``values`` waits for the device.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> MetricNames:
        """The names, sorted. ``to_vector`` has the same order."""
        return MetricNames(
            tuple(sorted(self.sums)), tuple(sorted(self.maxima)), tuple(sorted(self.minima))
        )

    def __add__(self, other: MetricSums) -> MetricSums:
        """Add sums and take maxima and minima by name. A metric of only one of the operands is kept."""
        return MetricSums(
            _merged(self.sums, other.sums, torch.add),
            _merged(self.maxima, other.maxima, torch.maximum),
            _merged(self.minima, other.minima, torch.minimum),
        )

    def add(self, name: str, value: Tensor | float) -> MetricSums:
        return self + MetricSums(sums={name: torch.as_tensor(value, dtype=torch.float64)})

    def to_vector(
        self, rank: int = 0, world_size: int = 1, device: torch.device | str | None = None
    ) -> Tensor:
        """Pack sums, maxima and minima into a float64 vector for one SUM all-reduce.

        Args:
            rank: this rank in the group of the all-reduce.
            world_size: number of ranks in this group.
            device: device of the vector; default: the device of the metrics.

        Returns:
            float64 ``[names.vector_size(world_size)]``, detached.
        """
        names = self.names
        sums = [self.sums[n] for n in names.sums]
        extremes = [self.maxima[n] for n in names.maxima] + [self.minima[n] for n in names.minima]
        if device is None:
            device = "cpu"
            if sums or extremes:
                device = (sums + extremes)[0].device
        vector = torch.zeros(names.vector_size(world_size), dtype=torch.float64, device=device)
        if sums:
            vector[: len(sums)] = _stacked(sums, device)
        if extremes:
            # The vector has a slot for each rank. This rank writes its extremes to its own slot and leaves 0 in the
            # other slots. So the sum of all ranks' vectors has every rank's extremes.
            start = len(sums) + rank * len(extremes)
            vector[start : start + len(extremes)] = _stacked(extremes, device)
        return vector

    @staticmethod
    def from_vector(names: MetricNames, vector: Tensor, world_size: int = 1) -> MetricSums:
        """Unpack the sum of the vectors of ``world_size`` ranks; inverse of ``to_vector``.

        Raises ValueError if the vector's length does not match ``names`` and ``world_size``.
        """
        expected_length = names.vector_size(world_size)
        if vector.shape != (expected_length,):
            raise ValueError(
                f"metric vector has shape {tuple(vector.shape)}, expected ({expected_length},) for "
                f"{len(names.sums)} sums, {len(names.maxima)} maxima and {len(names.minima)} minima "
                f"of {world_size} ranks"
            )
        sum_count = len(names.sums)
        max_count = len(names.maxima)
        slots = vector[sum_count:].reshape(world_size, max_count + len(names.minima))
        # torch has no maximum of an empty dimension.
        maxima = vector.new_empty(0)
        minima = vector.new_empty(0)
        if names.maxima:
            maxima = slots[:, :max_count].amax(0)
        if names.minima:
            minima = slots[:, max_count:].amin(0)
        return MetricSums(
            dict(zip(names.sums, vector[:sum_count].unbind(), strict=True)),
            dict(zip(names.maxima, maxima.unbind(), strict=True)),
            dict(zip(names.minima, minima.unbind(), strict=True)),
        )

    def values(self) -> dict[str, float]:
        """Return all metrics as Python floats, in one transfer. Device sync: call once a step, after the reduction."""
        names = self.names
        numbers = self.to_vector().tolist()
        return dict(zip((*names.sums, *names.maxima, *names.minima), numbers, strict=True))


def _merged(
    a: dict[str, Tensor], b: dict[str, Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    merged = dict(a)
    for name, value in b.items():
        if name in merged:
            merged[name] = combine(merged[name], value)
        else:
            merged[name] = value
    return merged


def _stacked(values: list[Tensor], device: torch.device | str) -> Tensor:
    return torch.stack([v.detach().to(device=device, dtype=torch.float64) for v in values])


FREQUENCY_SUMS = (
    "frequency/high",
    "frequency/high_square",
    "frequency/low",
    "frequency/low_square",
)
"""Sums that only the frequency canary (``loop/frequency_canary.py``) reads; they are not recorded."""


def means(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers to record, by metric name, from sums, maxima and minima that were reduced over all ranks.

    A sum with a divisor is divided by the divisor's value; if this value is 0, the quotient is nan. Metrics without a
    divisor, or without a row in the table, are returned unchanged.
    """
    recorded_values = {}
    for name, value in values.items():
        if name in FREQUENCY_SUMS:
            continue
        row = METRICS.get(name)
        if row is None or row.divisor is None:
            recorded_values[name] = value
            continue
        quotient = math.nan
        if values[row.divisor]:
            quotient = value / values[row.divisor]
        recorded_values[row.recorded_as or name] = quotient
    return recorded_values
