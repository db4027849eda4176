"""The result of a reward, and its check: a finite number of moderate size, alone or with named parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

_MAX_SHOWN = 200
"""Largest number of characters of a value in an error."""
LARGEST_REWARD = 1e18
"""Largest absolute value. The squares of a group's rewards are summed in float32, whose largest number is 3.4e38."""
USABLE_NUMBER = f"a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"


@dataclass(frozen=True)
class RewardResult:
    """The result of a reward that returns more than a number.

    Attributes:
        value: Any finite number.
        components: Named parts of the value. They become metrics and are saved with samples.
        reason: An explanation of the value.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


def result_of(value: Any) -> RewardResult | str:
    """Convert the return value of a reward to a result, or return a description of the error in it."""
    result = value
    if not isinstance(value, RewardResult):
        result = RewardResult(value)
    # The value itself has the name "".
    named_numbers = {"": result.value, **result.components}
    for name, number in named_numbers.items():
        name_text = f" as {name!r}" if name else ""
        if not isinstance(number, Real):
            type_name = type(number).__name__
            return (
                f"it returned a {type_name}{name_text}, expected a finite number or a RewardResult"
            )
        if not is_usable(number):
            return f"it returned {_shown(number)}{name_text}, expected {USABLE_NUMBER}"
    components = {name: float(number) for name, number in result.components.items()}
    return RewardResult(float(result.value), components, str(result.reason))


def is_usable(value: Any) -> bool:
    """Whether a value can be a reward, or a part of one: a finite number, small enough that sums do not overflow."""
    if not isinstance(value, Real):
        return False
    # Compare without a conversion: an integer can be too large for a float. NaN compares as false.
    number: Any = value
    return bool(-LARGEST_REWARD <= number <= LARGEST_REWARD)


def _shown(value: Any) -> str:
    try:
        return str(value)[:_MAX_SHOWN]
    # str() raises ValueError for integers of more than some thousand digits.
    except ValueError:
        return "a number of thousands of digits"
