"""Tests of differences between pairs of runs: Student's, the exact sign-flip test, Holm's adjustment for several
claims, and the number of pairs that would decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import nct
from scipy.stats import t as student

LEVEL = 0.05
"""Two-sided level of every test, and of the family of the claims' primary tests."""
POWER = 0.8
GRID = 1e-5
"""The sign-flip test rounds differences to multiples of it: what is kept of a run has five digits."""
MOST_PAIRS = 1000

Values = Sequence[float] | np.ndarray
OneSided = Callable[[Values], float]
"""Differences -> p of a mean above 0: how likely a sum as large as theirs is where their signs are chance."""


@dataclass(frozen=True)
class Difference:
    """Mean of the differences between pairs, and its 95% interval by Student."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Values) -> Difference:
        """Raises ValueError for fewer than two values."""
        check_count(values)
        mean, count = float(np.mean(values)), len(values)
        half = float(student.ppf(1 - LEVEL / 2, count - 1) * spread(values) / math.sqrt(count))
        return cls(mean, mean - half, mean + half)


def check_count(differences: Values) -> None:
    """Raise ValueError for fewer than two."""
    if len(differences) < 2:
        raise ValueError(f"{len(differences)} seeds, expected two or more")


def spread(differences: Values) -> float:
    """Their standard deviation, an estimate from the sample."""
    return float(np.std(differences, ddof=1))


def student_p(differences: Values) -> float:
    """One-sided p of Student's test that their mean is above 0."""
    check_count(differences)
    count, deviation, mean = len(differences), spread(differences), float(np.mean(differences))
    if deviation == 0:
        return 0.0 if mean > 0 else 1.0
    return float(student.sf(mean * math.sqrt(count) / deviation, count - 1))


def sign_flip_p(differences: Values) -> float:
    """One-sided p of the sign-flip test: the share of the 2^n choices of signs whose sum is at least the one seen.

    Exact for differences that are symmetric about 0 where the mean is 0, whatever their distribution. The distribution
    of the sum is found by adding one difference after another, in steps of ``GRID``.
    """
    check_count(differences)
    steps = np.rint(np.asarray(differences) / GRID).astype(np.int64)
    # A choice of signs has the sum 2 P - total, with P the sum of those that it makes positive.
    sizes, seen = np.abs(steps), int(steps[steps > 0].sum())
    share = np.zeros(int(sizes.sum()) + 1)
    share[0] = 1.0
    for size in sizes:
        moved = share / 2
        moved[size:] += share[: len(share) - size] / 2
        share = moved
    return min(float(share[seen:].sum()), 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p of each: that of the smallest counts n times, of the next n - 1 times, none less than one before it.

    Where every p that is at most ``LEVEL`` decides, the chance of a wrong decision among all n is at most ``LEVEL``.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def power(distances: Sequence[float], deviation: float, count: int, level: float) -> float:
    """Least probability that ``count`` pairs show, at the two-sided ``level``, that their mean is on the right side of
    every bound.

    Args:
        distances: From the true mean to each bound, all above 0.
        deviation: The standard deviation of the differences.
        count: Number of pairs, two or more.
        level: Two-sided; half of it is each bound's.
    """
    critical = student.ppf(1 - level / 2, count - 1)
    shifts = [distance * math.sqrt(count) / deviation for distance in distances]
    return 1 - sum(float(nct.cdf(critical, count - 1, shift)) for shift in shifts)


def pairs_to_decide(
    distances: Sequence[float], deviation: float, level: float = LEVEL
) -> int | None:
    """The smallest number of pairs with a ``power`` of at least ``POWER``; None: more than ``MOST_PAIRS``."""
    if deviation == 0:
        return 2
    low, high = 1, 2
    while power(distances, deviation, high, level) < POWER:
        if high >= MOST_PAIRS:
            return None
        low, high = high, min(2 * high, MOST_PAIRS)
    while high - low > 1:
        middle = (low + high) // 2
        if power(distances, deviation, middle, level) < POWER:
            low = middle
        else:
            high = middle
    return high
