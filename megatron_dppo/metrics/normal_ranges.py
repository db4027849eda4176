"""Normal ranges of the metrics that show whether a run is healthy, and the check against them.

Ranges whose text says "chosen bound", and the factors for sudden changes, are this project's
choice; the others are published for DPPO (arXiv 2602.04879) or follow from the arithmetic. A figure
outside its range is marked and explained; it changes nothing in the run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from megatron_dppo.metrics import names

Dtype = Literal["float32", "bfloat16"]
HISTORY = 5
"""Number of earlier steps whose mean a figure is compared with to detect a sudden change."""


@dataclass(frozen=True)
class NormalRange:
    """The normal range of one metric.

    Attributes:
        metric, label: the metric's name, and its name for people.
        why: likely causes of a figure outside the range, and what to check.
        low, high: bounds (inclusive); infinite where there is none.
        high_bf16: upper bound in bfloat16, where rounding makes it larger.
        most_drop, most_rise: smallest and largest normal ratio to the mean of the last
            ``HISTORY`` steps.
    """

    metric: str
    label: str
    why: str
    low: float = -math.inf
    high: float = math.inf
    high_bf16: float | None = None
    most_drop: float = 0.0
    most_rise: float = math.inf

    def upper(self, dtype: Dtype) -> float:
        """Upper bound for a policy held in ``dtype``."""
        return self.high_bf16 if dtype == "bfloat16" and self.high_bf16 is not None else self.high

    def show(self, value: float) -> str:
        """``value`` as text with the metric's unit."""
        return f"{100 * value:.3g}%" if self.metric in names.SHARES else f"{value:.3g}"

    def range_text(self, dtype: Dtype) -> str:
        """The range as text; empty where the metric has no bounds."""
        low, high = self.low, self.upper(dtype)
        if math.isfinite(low) and math.isfinite(high):
            return f"{self.show(low)} to {self.show(high)}"
        if math.isfinite(high):
            return f"at most {self.show(high)}"
        return f"at least {self.show(low)}" if math.isfinite(low) else ""


NORMAL_RANGES: tuple[NormalRange, ...] = (
    NormalRange(
        names.GAP_ON_POLICY,
        "|pi-mu| at equal weights",
        "Trainer and engine disagree about the same tokens under the same weights: a weight "
        "update that did not arrive whole, another sampling temperature, a different kernel or "
        "precision, or experts routed differently.",
        high=1e-4,
        high_bf16=5e-3,
    ),
    NormalRange(
        names.ROUTING_AGREEMENT,
        "natural routing as the engine's",
        "The trainer's routers would choose other experts than the engine recorded. Rounding in "
        "bfloat16 moves up to a tenth of the choices; far fewer matches mean recordings of other "
        "layers, tokens or weights. Chosen bound.",
        low=0.75,
    ),
    NormalRange(
        names.GAP,
        "mean |pi-mu| of the step",
        "The policy moves far within one rollout batch (stable DPPO runs stay near 0.004): a "
        "smaller learning rate or fewer optimiser steps per batch. If the gap at equal weights is "
        "equally large, check that first. Chosen bound.",
        high=0.02,
    ),
    NormalRange(
        names.MASKED_POSITIVE,
        "masked tokens of positive advantage",
        "The trust region blocks more than the rare tokens it is meant for (Binary-TV at "
        "0.15-0.2: well under 1%): steps too large, stale rollouts, or a threshold set for "
        "another divergence. Ratio clips block more than DPPO.",
        high=0.01,
    ),
    NormalRange(
        names.MASKED_NEGATIVE,
        "masked tokens of negative advantage",
        "As for positive advantages; here the mask also keeps unlikely tokens from being pushed to "
        "probability 0.",
        high=0.01,
    ),
    NormalRange(
        names.BAD_UPDATE,
        "bad updates (A<0 and mu-pi >= 0.5)",
        "Tokens of high probability in the engine lost 0.5 of probability or more: a sign of a "
        "coming collapse. Stable runs stay at or below 0.5%.",
        high=0.005,
    ),
    NormalRange(
        names.CAP_HIT,
        "tokens at the ratio cap",
        "Importance ratios are cut on many tokens: the batch is far off-policy. Chosen bound.",
        high=0.01,
    ),
    NormalRange(
        names.TOPK_MASS,
        "mass of the engine's top K",
        "The top-K ids hold little of the distribution, so the Top-K divergence is coarse: a "
        "larger K, or a lower temperature.",
        low=0.99,
    ),
    NormalRange(
        names.ENTROPY,
        "entropy",
        "It should fall slowly. A sudden drop is a collapse: the responses of a group become "
        "equal, and training has no further effect.",
        most_drop=0.4,
    ),
    NormalRange(
        names.GRAD_NORM,
        "gradient norm",
        "A jump to several times its recent size: a few tokens dominate the batch. Clipping "
        "bounds one such step; many in a row often precede a collapse.",
        most_rise=5.0,
    ),
    NormalRange(
        names.ZERO_VARIANCE_GROUPS,
        "zero-variance groups (all responses with the same reward)",
        "The advantages of such groups are 0, so they have no gradient: the problems are too easy "
        "or too hard. Chosen bound.",
        high=0.8,
    ),
    NormalRange(
        names.TRUNCATED,
        "truncated responses",
        "Many responses reach the length limit: raise rollout.max_response_tokens, or check "
        "whether responses have become longer without need. Chosen bound.",
        high=0.1,
    ),
)

BY_METRIC: dict[str, NormalRange] = {item.metric: item for item in NORMAL_RANGES}


class NormalityCheck:
    """Compares each step's metrics with their normal ranges and with the steps before."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        self._history: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def step(self, values: Mapping[str, float]) -> dict[str, str]:
        """Compare one step; returns metric -> finding, for the unusual metrics only."""
        unusual: dict[str, str] = {}
        for item in NORMAL_RANGES:
            value = values.get(item.metric)
            if value is None:
                continue
            finding = self._judge(item, value)
            if finding:
                unusual[item.metric] = f"{item.label} {item.show(value)}: {finding}"
            if math.isfinite(value):
                self._history[item.metric].append(value)
        return unusual

    def _judge(self, item: NormalRange, value: float) -> str:
        """The finding about ``value``; empty if it is normal."""
        if not math.isfinite(value):
            return "not a finite number"
        if not item.low <= value <= item.upper(self.dtype):
            return f"expected {item.range_text(self.dtype)} in {self.dtype}"
        history = self._history[item.metric]
        if len(history) == HISTORY:
            usual = fmean(history)
            if usual > 0 and not item.most_drop * usual <= value <= item.most_rise * usual:
                return f"its mean over the {HISTORY} steps before was {item.show(usual)}"
        return ""
