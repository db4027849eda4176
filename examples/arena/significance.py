"""Tests of differences between pairs of runs.

Student's test, the exact sign-flip test, Holm's adjustment for several claims, and the number of pairs that would be
needed for a decision.
"""

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
"""The sign-flip test rounds differences to multiples of this number. Kept metrics have five digits."""
MOST_PAIRS = 1000
"""Largest number of pairs that ``pairs_to_decide`` returns."""

Values = Sequence[float] | np.ndarray
OneSided = Callable[[Values], float]
"""Differences -> one-sided p of the hypothesis that their mean is above 0."""


@dataclass(frozen=True)
class Difference:
    """Mean of the differences between pairs, and its 95% interval by Student."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Values) -> Difference:
        """Compute mean and interval of ``values``. Raises ValueError for fewer than two values."""
        check_count(values)
        count = len(values)
        mean = float(np.mean(values))
        standard_error = spread(values) / math.sqrt(count)
        half_width = float(student.ppf(1 - LEVEL / 2, count - 1) * standard_error)
        return cls(mean, mean - half_width, mean + half_width)


def check_count(differences: Values) -> None:
    """Raise ValueError for fewer than two differences."""
    if len(differences) < 2:
        raise ValueError(f"{len(differences)} seeds, expected two or more")


def spread(differences: Values) -> float:
    """Return the standard deviation, estimated from the sample."""
    return float(np.std(differences, ddof=1))


def student_p(differences: Values) -> float:
    """Return the one-sided p of Student's test that the mean is above 0."""
    check_count(differences)
    count = len(differences)
    deviation = spread(differences)
    mean = float(np.mean(differences))
    if deviation == 0:
        return 0.0 if mean > 0 else 1.0
    return float(student.sf(mean * math.sqrt(count) / deviation, count - 1))


def sign_flip_p(differences: Values) -> float:
    """Return the one-sided p of the sign-flip test.

    p is the share of the 2^n choices of signs whose sum is at least the sum of the differences. p is exact if the
    distribution of the differences is symmetric about 0 under the null hypothesis. No normal distribution is needed.
    """
    check_count(differences)
    steps = np.rint(np.asarray(differences) / GRID).astype(np.int64)
    # P is the sum of the sizes with a positive sign. A choice of signs has the sum 2 P - total. So compare P.
    sizes = np.abs(steps)
    observed = int(steps[steps > 0].sum())
    # probability[P] is the share of the choices with the sum P, in steps of GRID. Half of the choices add a size to P.
    probability = np.zeros(int(sizes.sum()) + 1)
    probability[0] = 1.0
    for size in sizes:
        with_size = probability / 2
        with_size[size:] += probability[: len(probability) - size] / 2
        probability = with_size
    return min(float(probability[observed:].sum()), 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p of each test.

    The smallest of n values is multiplied by n, the next value by n - 1, and so on. An adjusted p is never smaller than
    the adjusted p before it. If every adjusted p of at most ``LEVEL`` counts as a decision, the probability of any
    wrong decision among the n tests is at most ``LEVEL``.
    """
    count = len(p_values)
    adjusted = [0.0] * count
    largest = 0.0
    ascending_indices = sorted(range(count), key=p_values.__getitem__)
    for rank, index in enumerate(ascending_indices):
        multiplied = min(1.0, (count - rank) * p_values[index])
        largest = max(largest, multiplied)
        adjusted[index] = largest
    return adjusted


def power(distances: Sequence[float], deviation: float, count: int, level: float) -> float:
    """Return a lower bound of the probability that ``count`` pairs decide on which side of each bound the mean is.

    Args:
        distances: distance from the true mean to each bound, all above 0.
        deviation: standard deviation of the differences.
        count: number of pairs, two or more.
        level: two-sided level; the test of each bound uses half of this level.
    """
    critical = student.ppf(1 - level / 2, count - 1)
    # The probability of missing any bound is at most the sum of the bounds' probabilities.
    missing_probability = 0.0
    for distance in distances:
        shift = distance * math.sqrt(count) / deviation
        missing_probability += float(nct.cdf(critical, count - 1, shift))
    return 1 - missing_probability


def pairs_to_decide(
    distances: Sequence[float], deviation: float, level: float = LEVEL
) -> int | None:
    """Return the smallest number of pairs with a ``power`` of at least ``POWER``; None if above ``MOST_PAIRS``."""
    if deviation == 0:
        return 2
    # Find an upper bound by doubling, then bisect.
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
