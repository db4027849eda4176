"""Several seeds of one algorithm as one line with a band, and as one mean with a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Series = tuple[list[int], list[float]]
"""Steps and the values at them, as ``megatron_dppo.metrics.records.series`` returns them."""


@dataclass(frozen=True)
class Band:
    """Mean, least and greatest value over the seeds at each of ``steps``."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def band(seeds: Sequence[Series]) -> Band:
    """The band of several seeds at the steps that every one of them has a value at.

    A step that a seed lacks is left out: a mean over fewer seeds would jump there.
    """
    tables = [dict(zip(*one, strict=True)) for one in seeds]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    columns = [[table[step] for table in tables] for step in steps]
    return Band(
        steps=steps,
        mean=[sum(column) / len(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )


def end_value(one: Series, last_step: int, window: int) -> float | None:
    """Mean of a seed's values at the ``window`` steps up to ``last_step``; None where it has none."""
    steps, values = one
    found = [v for s, v in zip(steps, values, strict=True) if last_step - window < s <= last_step]
    return sum(found) / len(found) if found else None
