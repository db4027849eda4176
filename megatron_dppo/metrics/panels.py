"""Panels of the report: metrics over steps, for one run or for several.

With one run, colours stand for quantities; with several, colours stand for runs and line styles for
quantities. The colours are those of Okabe and Ito, made for colour-blind readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, zip_longest
from math import ceil
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megatron_dppo.metrics import names
from megatron_dppo.metrics.normal_ranges import BY_METRIC, Dtype
from megatron_dppo.metrics.records import Record, mean_accuracy, series, step_of

BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, BLACK, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999",
)  # fmt: skip
RUN_COLOURS = (BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, BLACK)
LineStyle = Literal["-", "--", "-."]
SMALL = 8.5
"""Font size of legends and remarks, points."""
FEW_POINTS = 30
"""Up to this number of steps every step has a dot, and lines are not smoothed."""
LEGEND_WIDTH = 72
"""Characters of a legend that fit over a panel in one row; a line's sample counts as six."""
STEP_AXIS = "step"
"""Label of the horizontal axis of every panel that shows steps."""


BOUND: dict[str, Any] = {"linestyle": "-", "linewidth": 6, "alpha": 0.35, "solid_capstyle": "butt"}
"""How a bound is drawn."""


@dataclass(frozen=True)
class RunRecords:
    """One run to draw; ``label`` is its name in a comparison."""

    label: str
    records: list[Record]
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class Quantity:
    """One line of a panel.

    ``scale``: factor on the recorded value. ``is_bound``: what another line of the panel should stay at or
    above; drawn wide and pale below it, as both may be equal.
    """

    name: str
    metric: str
    colour: str
    style: LineStyle = "-"
    scale: float = 1.0
    is_bound: bool = False


def centred_mean(values: list[float], reach: int) -> list[float]:
    """Mean of each value and of up to ``reach`` neighbours on each side."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _plot(axes: Axes, steps: list[int], values: list[float], colour: str, style: LineStyle) -> None:
    """Draw a line with a dot for each step; of many steps the mean of five, without dots."""
    few = len(steps) <= FEW_POINTS
    axes.plot(
        steps,
        values if few else centred_mean(values, 2),
        style,
        color=colour,
        linewidth=1.8,
        marker="o" if few else "",
        markersize=6 if len(steps) == 1 else 3,
    )


def _plot_quantity(
    axes: Axes, steps: list[int], values: list[float], colour: str, style: LineStyle, alone: bool
) -> None:
    """Draw the line; with one run of many steps also the unsmoothed values, thin and pale."""
    if alone and len(steps) > FEW_POINTS:
        axes.plot(steps, values, "-", color=colour, alpha=0.22, linewidth=1)
    _plot(axes, steps, values, colour, style)


def plot_quantities(
    axes: Axes, runs: list[RunRecords], quantities: list[Quantity], *, log: bool = False
) -> list[Line2D]:
    """Draw every quantity of every run; returns legend handles of the recorded ones."""
    handles = []
    for quantity in quantities:
        drawn = False
        for index, run in enumerate(runs):
            steps, values = series(run.records, quantity.metric)
            values = [value * quantity.scale for value in values]
            if log:
                kept = [i for i, value in enumerate(values) if value > 0]
                steps, values = [steps[i] for i in kept], [values[i] for i in kept]
            if steps:
                colour = RUN_COLOURS[index] if len(runs) > 1 else quantity.colour
                if quantity.is_bound:
                    axes.plot(steps, values, color=colour, zorder=1, **BOUND)
                else:
                    _plot_quantity(axes, steps, values, colour, quantity.style, len(runs) == 1)
                drawn = True
        if drawn:
            handle = _handle(quantity.name, runs, quantity.colour, quantity.style)
            handle.set(**BOUND if quantity.is_bound else {})
            handles.append(handle)
    return handles


def plot_on_the_right(
    axes: Axes, runs: list[RunRecords], quantity: Quantity, limits: tuple[float, float], unit: str
) -> list[Line2D]:
    """Draw a quantity on a right axis that covers at least ``limits``; returns legend handles."""
    if not any(series(run.records, quantity.metric)[0] for run in runs):
        return []
    right = axes.twinx()
    handles = plot_quantities(right, runs, [quantity])
    right.set_ylim(limits[0], max(limits[1], right.get_ylim()[1]))
    right.set_ylabel(unit)
    right.spines[["top"]].set_visible(False)
    return handles


def _handle(
    name: str, runs: list[RunRecords], colour: str, style: LineStyle, marker: str = ""
) -> Line2D:
    """A legend entry; grey if colours stand for runs."""
    shade = "#444444" if len(runs) > 1 else colour
    return Line2D([], [], color=shade, linestyle=style, marker=marker, linewidth=1.8, label=name)


def finish(axes: Axes, title: str, unit: str, handles: list, *, handle_length: float = 1.6) -> None:
    """Set title, labels and grid, and put the legend above the axes."""
    width = sum(len(handle.get_label()) + 6 for handle in handles)
    rows = 0 if not handles else 1 if width <= LEGEND_WIDTH else 2
    axes.set_title(title, loc="left", fontweight="bold", pad=6 + 14 * rows)
    axes.set_ylabel(unit)
    axes.set_xlabel(STEP_AXIS)
    axes.xaxis.set_major_locator(
        MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if handles:
        legend = axes.legend(
            handles=_by_rows(handles, rows), loc="lower left", bbox_to_anchor=(-0.01, 0.985),
            ncols=ceil(len(handles) / rows),
            frameon=False, fontsize=SMALL, handlelength=handle_length, columnspacing=0.9,
            handletextpad=0.5, borderaxespad=0.2,
        )  # fmt: skip
        legend.set_in_layout(False)  # else a wide legend would narrow the panel below it


def _by_rows(handles: list, rows: int) -> list:
    """``handles`` in the order that reads row by row in a legend, which is filled column by column."""
    columns = ceil(len(handles) / rows)
    lines = [handles[i : i + columns] for i in range(0, len(handles), columns)]
    return [handle for handle in chain(*zip_longest(*lines)) if handle is not None]


def _remark(axes: Axes, words: str) -> None:
    """Write a remark into the lower right corner."""
    axes.text(
        0.99, 0.03, words, transform=axes.transAxes, ha="right", fontsize=SMALL, color="#666666"
    )


def mark_empty(axes: Axes, handles: list, reason: str = "not recorded") -> None:
    """Write the reason into the panel if the legend has no entry."""
    if not handles:
        axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", color=GREY)


def _band(axes: Axes, runs: list[RunRecords], metric: str, scale: float, unit: str) -> list:
    """Shade the normal range of ``metric``, keeping the axis limits; returns the legend handle."""
    upper = max(BY_METRIC[metric].upper(run.dtype) for run in runs) * scale
    name = f"expected: at most {upper:g}{unit}"
    bottom, top = axes.get_ylim()
    if bottom >= upper:
        return []
    band = axes.axhspan(bottom, min(upper, top), color=GREEN, alpha=0.1, linewidth=0, label=name)
    axes.set_ylim(bottom, top)
    return [band]


def draw_reward(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the mean training reward and the accuracy on held-out problems."""
    handles = plot_quantities(axes, runs, [Quantity("training reward", names.REWARD, BLUE)])
    for index, run in enumerate(runs):
        found = [(step_of(r), mean_accuracy(r)) for r in run.records]
        points = [(step, value) for step, value in found if value is not None]
        if points:
            colour = RUN_COLOURS[index] if len(runs) > 1 else VERMILION
            axes.plot(*zip(*points, strict=True), "--s", color=colour, linewidth=1.6, markersize=5)
    measured = any(mean_accuracy(record) is not None for run in runs for record in run.records)
    if measured:
        handles.append(_handle("held-out accuracy (avg@k)", runs, VERMILION, "--", "s"))
    elif handles:
        _remark(
            axes, "no evaluation in this run" if len(runs) == 1 else "no evaluation in these runs"
        )
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(0.0, bottom), max(1.0, top))
    mark_empty(axes, handles)
    finish(axes, "Reward and held-out accuracy", "fraction", handles)


def draw_gap(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw mean |pi - mu| at equal weights and over the step, and what is expected of each as a thin line of its
    colour; right axis: agreement of routing.
    """
    quantities = [
        Quantity("equal weights", names.GAP_ON_POLICY, BLUE),
        Quantity("whole step", names.GAP, VERMILION, "--"),
    ]
    handles = plot_quantities(axes, runs, quantities, log=True)
    if handles:
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom / 3, top * 3)
        for handle, quantity in zip(handles, quantities, strict=False):
            upper = max(BY_METRIC[quantity.metric].upper(run.dtype) for run in runs)
            colour = quantity.colour if len(runs) == 1 else GREY
            axes.axhline(upper, color=colour, linestyle=":", linewidth=1.2)
            handle.set_label(f"{quantity.name} (at most {upper:g})")
        axes.set_ylim(bottom / 3, max(top * 3, 2 * upper))
    agreement = Quantity("routing", names.ROUTING_AGREEMENT, PINK, "-.", scale=100)
    handles += plot_on_the_right(
        axes, runs, agreement, (0, 101), "routed alike, % of tokens x layers"
    )
    mark_empty(axes, handles)
    unit = "probability, log axis (dotted: bounds)"
    finish(axes, "Mean |pi - mu| (trainer against engine)", unit, handles)


def draw_masked(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the share of tokens that the trust region masks, by sign of the advantage."""
    quantities = [
        Quantity("A > 0", names.MASKED_POSITIVE, BLUE, scale=100),
        Quantity("A < 0", names.MASKED_NEGATIVE, VERMILION, "--", scale=100),
    ]
    handles = plot_quantities(axes, runs, quantities)
    if handles:
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
        handles += _band(axes, runs, quantities[0].metric, 100, "%")
    flat = [series(run.records, names.ZERO_VARIANCE_GROUPS)[1] for run in runs]
    without_advantage = all(flat) and {share for shares in flat for share in shares} == {1.0}
    reason = "no token to mask:\nthe responses of each group earned the same"
    mark_empty(axes, handles, *([reason] if without_advantage else []))
    finish(axes, "Masked tokens by sign of advantage", "% of tokens", handles)


def draw_entropy(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the policy's mean entropy (it should fall slowly)."""
    handles = plot_quantities(axes, runs, [Quantity("policy", names.ENTROPY, BLUE)])
    if handles:
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
        _remark(axes, "expected: a slow fall, no cliff")
    mark_empty(axes, handles)
    finish(axes, "Entropy", "nats per token", handles if len(runs) == 1 else [])


def draw_length(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the mean response length; right axis: share of truncated responses."""
    handles = plot_quantities(axes, runs, [Quantity("length", names.RESPONSE_LENGTH, BLUE)])
    if handles:
        axes.set_ylim(0, axes.get_ylim()[1])
    truncated = Quantity("truncated (right axis)", names.TRUNCATED, VERMILION, "--", 100)
    handles += plot_on_the_right(axes, runs, truncated, (0, 5), "% truncated")
    mark_empty(axes, handles)
    finish(axes, "Response length and truncation", "tokens", handles)
