"""The attributes of a metric: a row of ``table.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "fp8"]
"""Dtype of the weights of trainer and servers. fp8: the servers' weights are FP8, the trainer's are bfloat16."""
Stroke = Literal["first", "second", "third", "bound"]

SMALL_SHARE = 0.05
"""An axis from 0 to 1 is too coarse for the normal range of a share whose upper bound is below this number."""


@dataclass(frozen=True)
class NormalRange:
    """The normal range of a metric. A value outside of it is marked and explained, without an effect on the run.

    Some bounds are published for DPPO (arXiv 2602.04879), or follow from the arithmetic. All other bounds are this
    project's choice, and their ``why`` says so. The ratios are this project's choice.

    Attributes:
        label: the metric's name for the user.
        why: likely causes of a value outside the range, and what to check.
        low, high: inclusive bounds; infinite for a metric without a bound.
        high_bf16: upper bound for bfloat16 weights: their rounding makes the value larger. None: ``high``.
        high_fp8: upper bound for servers with FP8 weights; None: ``high_bf16``.
        most_drop, most_rise: smallest and largest normal ratio of the value to its mean over the last steps.
        high_first: upper bound in the first steps, which have no such mean yet.
    """

    label: str
    why: str
    low: float = -math.inf
    high: float = math.inf
    high_bf16: float | None = None
    high_fp8: float | None = None
    most_drop: float = 0.0
    most_rise: float = math.inf
    high_first: float = math.inf

    def upper(self, dtype: Dtype) -> float:
        """Return the upper bound for a policy held in ``dtype``."""
        if dtype == "fp8" and self.high_fp8 is not None:
            return self.high_fp8
        if dtype != "float32" and self.high_bf16 is not None:
            return self.high_bf16
        return self.high


@dataclass(frozen=True)
class Line:
    """The line of a metric in the report.

    Attributes:
        panel: title of the panel that has the line.
        legend: name of the line.
        stroke: style of the line. ``bound``: the line is a bound for another line of the panel.
        scale: factor of the values.
        right: whether the line belongs to the right axis.
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
        divisor: metric that divides this metric's sum over all ranks; None: the sum is recorded.
        recorded_as: name of the quotient in the records; None: ``name``.
        share: whether the value is between 0 and 1, and shown in percent.
        normal: normal range; None: no value is marked.
        line: line in the report; None: the report does not show the metric. If no panel has the line's title, the
            report gets a panel of that title.
        measure: only for a user's own metric: a function (``TokenInputs``, ``Decisions``) -> numbers or bools of all
            tokens, shaped as ``log_probs``. The metric is their sum over the tokens in ``loss_mask`` whose number is
            finite.
    """

    name: str
    meaning: str
    divisor: str | None = None
    recorded_as: str | None = None
    share: bool = False
    normal: NormalRange | None = None
    line: Line | None = None
    measure: Callable[[Any, Any], Any] | None = None

    def show(self, value: float) -> str:
        """Format ``value`` with the metric's unit."""
        if self.share:
            return f"{100 * value:.3g}%"
        return f"{value:.3g}"

    def axis(self) -> tuple[float, float] | None:
        """Return the range that the axis of a share shows at least; None for a metric that is no share.

        The range is 0 to 1, or 0 to the metric's upper bound if that bound is below ``SMALL_SHARE``.
        """
        if not self.share:
            return None
        if self.normal is not None:
            bound = self.normal.upper("float32")
            if bound < SMALL_SHARE:
                return 0.0, bound
        return 0.0, 1.0

    def range_text(self, dtype: Dtype) -> str:
        """Return the normal range as text; empty if the metric has no bounds."""
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
