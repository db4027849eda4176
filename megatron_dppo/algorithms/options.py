"""The numbers that an algorithm can be given, their meaning and their ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Settings = Literal["stability", "scaling"]
"""Whose numbers a preset has: the paper's stability study's, or those of its scaling runs."""
Role = Literal["mask", "weight", "cap", "topk", "penalty"]


@dataclass(frozen=True)
class Option:
    """``meaning``; ``role``: the part of the algorithm that takes the number; its range, ``low``
    excluded unless ``includes_low``, ``high`` included.
    """

    meaning: str
    role: Role
    low: float = 0.0
    high: float = math.inf
    includes_low: bool = False
    whole: bool = False

    def problem(self, value: Any) -> str | None:
        """What is wrong with ``value``; None where nothing is. A bool is not a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"expected a number, got {value!r}"
        if self.whole and not isinstance(value, int):
            return f"expected a whole number, got {value!r}"
        if not (self.low < value <= self.high or (self.includes_low and value == self.low)):
            bracket = "[" if self.includes_low else "("
            return f"{value!r} is outside its range, {bracket}{self.low:g}, {self.high:g}]"
        return None


OPTIONS: dict[str, Option] = {
    "tv_threshold": Option(
        "largest total variation at which a diverging token still trains", "mask", 0, 1, True
    ),
    "tv_threshold_negative": Option("tv_threshold where A < 0, if given", "mask", 0, 1, True),
    "kl_threshold": Option(
        "largest KL(mu || pi), nats, at which a diverging token still trains",
        "mask",
        includes_low=True,
    ),
    "kl_threshold_negative": Option(
        "kl_threshold where A < 0, if given", "mask", includes_low=True
    ),
    "clip_low": Option("r below 1 - this is blocked where A < 0", "mask", 0, 1, True),
    "clip_high": Option("r above 1 + this is blocked where A > 0", "mask", includes_low=True),
    "max_drop": Option(
        "drop of probability from which a token with A < 0 is blocked", "mask", 0, 1
    ),
    "rare_below": Option("rollout probability below which the clip is relaxed", "mask", 0, 1, True),
    "mismatch_low": Option("smallest pi' / mu that trains", "mask", includes_low=True),
    "mismatch_high": Option("largest pi' / mu that trains", "mask"),
    "penalty_threshold": Option("delta of DRPO's quadratic penalty, in probability", "weight"),
    "ratio_cap": Option("C: the weight of a token is cut to this", "cap"),
    "topk": Option("K: ids of TopK(mu) that the engine returns for each token", "topk", whole=True),
    "kl_coefficient": Option(
        "factor of r - 1 - log r, an estimate of KL(mu || pi) that is added to a token's loss",
        "penalty",
        includes_low=True,
    ),
    "log_ratio_coefficient": Option(
        "factor of (log r)^2 / 2 that is added to a token's loss", "penalty", includes_low=True
    ),
}

NEGATIVE = {
    "tv_threshold": "tv_threshold_negative",
    "kl_threshold": "kl_threshold_negative",
}
"""Threshold -> the option that replaces it where A < 0."""
COEFFICIENTS = tuple(name for name, option in OPTIONS.items() if option.role == "penalty")
"""Of additive terms, which every algorithm takes and none has by itself."""


def accepted(numbers: Mapping[str, float]) -> list[str]:
    """Names of every option that an algorithm with these ``numbers`` takes."""
    return sorted([*numbers, *(NEGATIVE[n] for n in numbers if n in NEGATIVE), *COEFFICIENTS])


def replaced(
    name: str, numbers: Mapping[str, float], options: Mapping[str, Any]
) -> dict[str, float]:
    """``numbers`` of the algorithm ``name`` with ``options`` in their place.

    Raises ValueError, naming what is accepted, for an option that the algorithm has not, a value of
    the wrong type or outside its range, and bounds that exclude each other.
    """
    known, found = accepted(numbers), dict(numbers)
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"algorithm {name!r} has no option {option!r}; it has {', '.join(known)}"
            )
        problem = OPTIONS[option].problem(value)
        if problem is not None:
            meaning = OPTIONS[option].meaning
            raise ValueError(f"algorithm {name!r}, option {option!r} ({meaning}): {problem}")
        found[option] = value
    low, high = found.get("mismatch_low", 0.0), found.get("mismatch_high", math.inf)
    if low > high:
        raise ValueError(
            f"algorithm {name!r}: mismatch_low {low:g} lies above mismatch_high {high:g}, so no "
            "token would train"
        )
    return found
