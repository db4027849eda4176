"""Figure of ``--parts``: parts of the gap, and pi / mu and |pi - mu| of every token against mu.

The token panels are those of Figure 2 of arXiv 2602.04879.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from megatron_dppo.doctor.ladder import Measured
from megatron_dppo.metrics.report import BLUE, GREEN, ORANGE, PINK, SMALL, STYLE, VERMILION

COLOURS = {
    "sampling transform": ORANGE,
    "staleness": VERMILION,
    "routing": PINK,
    "numerics": BLUE,
}
SMALLEST_GAP = 1e-9
"""Smaller gaps are drawn at this value: a logarithmic axis has no zero."""
NARROWEST_RATIO = 1.001
"""The axis of pi / mu covers at least 1 / this to this; else rounding would fill it."""
WIDE_RATIO = 4.0
"""If a ratio is above this or below 1 / this, the axis is logarithmic."""
GROUPS, FEWEST = 16, 50
"""Percentiles: largest number of groups of tokens, smallest number of tokens in a group."""
DARKENING = LinearSegmentedColormap.from_list("tokens", ["#9ecae1", "#08306b"])


def draw(
    path: Path,
    title: str,
    split: Mapping[str, float],
    measured: Sequence[Measured],
    rollout_log_probs: np.ndarray,
) -> None:
    """Write the PNG: a row of bars, then two panels for each of two passes in the run's dtype.

    The passes are the first (nothing fixed) and the last (all causes fixed but numerics).

    Args:
        path: of the PNG.
        title: of the figure.
        split: cause -> part of the gap.
        measured: all passes.
        rollout_log_probs: [tokens], log mu.
    """
    in_type = [m for m in measured if m.rung.dtype == measured[0].rung.dtype]
    shown = [in_type[0], in_type[-1]] if len(in_type) > 1 else in_type
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 2.4 + 3.9 * len(shown)), dpi=130)
        figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
        figure.suptitle(title, fontsize=12, fontweight="bold")
        grid = figure.add_gridspec(1 + len(shown), 2, height_ratios=[1, *[2.2] * len(shown)])
        _draw_parts(figure.add_subplot(grid[0, :]), split, measured[0].gap)
        rows = [[figure.add_subplot(grid[1 + i, j]) for j in (0, 1)] for i in range(len(shown))]
        for (left, right), result in zip(rows, shown, strict=True):
            log_pi = result.log_probs.numpy()
            _draw_ratio(left, rollout_log_probs, log_pi, _name(result, measured))
            _draw_gap(right, rollout_log_probs, log_pi, result.gap)
        gaps = [right for _, right in rows]
        limits = [axes.get_ylim() for axes in gaps]
        for axes in gaps:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        FigureCanvasAgg(figure).print_png(path)


def _name(result: Measured, measured: Sequence[Measured]) -> str:
    return "all but numerics fixed" if measured.index(result) else result.rung.fixes


def _draw_parts(axes: Axes, split: Mapping[str, float], total: float) -> None:
    """Draw one bar for each cause, from the gap before its fix to the gap after it."""
    level = total
    for row, (cause, part) in enumerate(split.items()):
        axes.barh(row, -part, left=level, color=COLOURS[cause], height=0.62)
        share = f"{part:.2e}" + (f" ({100 * part / total:.0f}%)" if total else "")
        axes.text(max(level, level - part), row, f" {share}", va="center", fontsize=SMALL)
        level -= part
    axes.set_yticks(range(len(split)), list(split))
    axes.invert_yaxis()
    axes.set_xlim(min(0, axes.get_xlim()[0]), 1.18 * max(total, axes.get_xlim()[1] / 1.05))
    axes.set_xlabel("mean |pi - mu| left")
    axes.set_title("What the gap is made of", loc="left", fontweight="bold")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_ratio(axes: Axes, log_mu: np.ndarray, log_pi: np.ndarray, name: str) -> None:
    ratio = np.exp(log_pi - log_mu)
    widest = max(ratio.max(), 1 / ratio.min())
    _density(axes, log_mu, ratio, "log" if widest > WIDE_RATIO else "linear")
    axes.axhline(1, color="#444444", linewidth=0.8)
    for percent in (1, 99):
        (line,) = axes.plot(*_percentile(log_mu, ratio, percent), color=GREEN)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1 / NARROWEST_RATIO), max(high, NARROWEST_RATIO))
    if axes.get_yscale() == "linear":
        # 0.9995, not "-5" beside a "1e-4 + 1".
        axes.ticklabel_format(axis="y", useOffset=False)
    _finish(axes, f"pi / mu   ({name})", "ratio")
    line.set_label("1st and 99th percentile")
    axes.legend(handles=[line], frameon=False, fontsize=SMALL, loc="best")


def _draw_gap(axes: Axes, log_mu: np.ndarray, log_pi: np.ndarray, mean: float) -> None:
    gap = np.maximum(np.abs(np.exp(log_pi) - np.exp(log_mu)), SMALLEST_GAP)
    _density(axes, log_mu, gap, "log")
    (line,) = axes.plot(*_percentile(log_mu, gap, 99), color=GREEN, label="99th percentile")
    flat = axes.axhline(max(mean, SMALLEST_GAP), color=VERMILION, ls="--", label=f"mean {mean:.1e}")
    _finish(axes, "|pi - mu|, the token's TV", "probability")
    axes.legend(handles=[line, flat], frameon=False, fontsize=SMALL, loc="best")


def _density(
    axes: Axes, log_mu: np.ndarray, values: np.ndarray, scale: Literal["log", "linear"]
) -> None:
    """Draw the density of tokens as hexagons, darker for more tokens."""
    axes.hexbin(
        np.exp(log_mu), values, xscale="log", yscale=scale, bins="log", gridsize=48,
        cmap=DARKENING, mincnt=1, linewidths=0.2,
    )  # fmt: skip


def _percentile(
    log_mu: np.ndarray, values: np.ndarray, percent: float
) -> tuple[list[float], list[float]]:
    """A percentile of ``values`` against mu, over groups of equally many tokens of similar mu."""
    order = np.argsort(log_mu, kind="stable")
    groups = np.array_split(order, max(1, min(GROUPS, len(order) // FEWEST)))
    centres = [float(np.exp(np.median(log_mu[group]))) for group in groups]
    return centres, [float(np.percentile(values[group], percent)) for group in groups]


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("mu, the engine's probability of the token")
    axes.set_ylabel(unit)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
