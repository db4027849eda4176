"""The attributes of a metric: a row of ``table.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16", "fp8"]
"""Dtype of the weights of trainer and servers; fp8: of the servers' weights, beside a trainer in bfloat16."""
Stroke = Literal["first", "second", "third", "bound"]

SMALL_SHARE = 0.05
"""Largest bound of a share that can't be read on an axis from 0 to 1."""


@dataclass(frozen=True)
class NormalRange:
    """The normal range of a metric. A value outside is marked and explained, without an effect on the run.

    Bounds whose ``why`` says that they are this project's choice, and the ratios, were chosen here; the others are
    published for DPPO (arXiv 2602.04879) or follow from the arithmetic.

    Attributes:
        label: the metric's name for the user.
        why: likely causes of a value outside the range, and what to check.
        low, high: inclusive bounds; infinite where there is none.
        high_bf16: upper bound in bfloat16, where rounding makes the value larger.
        high_fp8: upper bound where the servers' weights are FP8; None: that in bfloat16.
        most_drop, most_rise: smallest and largest normal ratio to the mean of the last steps.
    """

    label: str
    why: str
    low: float = -math.inf
    high: float = math.inf
    high_bf16: float | None = None
    high_fp8: float | None = None
    most_drop: float = 0.0
    most_rise: float = math.inf

    def upper(self, dtype: Dtype) -> float:
        """Return the upper bound for a policy held in ``dtype``."""
        if dtype == "fp8" and self.high_fp8 is not None:
            return self.high_fp8
        if dtype != "float32" and self.high_bf16 is not None:
            return self.high_bf16
        return self.high


@dataclass(frozen=True)
class Line:
    """The line of a metric in the report: in ``panel``, as ``legend``, times ``scale``. ``right``: on the right axis.

    ``stroke`` "bound" draws a bound that another line of the panel should stay at or above.
    """

    panel: str
    legend: str
    stroke: Stroke = "first"
    scale: float = 1.0
    right: bool = False


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        divisor: metric that divides this sum over all ranks; None: recorded unchanged.
        recorded_as: name after the division; None: the same.
        share: whether the value is between 0 and 1, and shown in percent.
    """

    name: str
    meaning: str
    divisor: str | None = None
    recorded_as: str | None = None
    share: bool = False
    normal: NormalRange | None = None
    line: Line | None = None

    def show(self, value: float) -> str:
        """Format ``value`` with the metric's unit."""
        if self.share:
            return f"{100 * value:.3g}%"
        return f"{value:.3g}"

    def axis(self) -> tuple[float, float] | None:
        """Return the least range of a share's axis; None for a metric that is no share.

        The range is 0 to 1, or 0 to the metric's upper bound where that bound is a small share.
        """
        if not self.share:
            return None
        high = 1.0
        if self.normal is not None:
            high = self.normal.upper("float32")
        return 0.0, high if high < SMALL_SHARE else 1.0

    def range_text(self, dtype: Dtype) -> str:
        """Return the normal range as text; empty where the metric has no bounds."""
        if self.normal is None:
            return ""
        low = self.normal.low
        high = self.normal.upper(dtype)
        if math.isfinite(low) and math.isfinite(high):
            return f"{self.show(low)} to {self.show(high)}"
        if math.isfinite(high):
            return f"at most {self.show(high)}"
        if math.isfinite(low):
            return f"at least {self.show(low)}"
        return ""
