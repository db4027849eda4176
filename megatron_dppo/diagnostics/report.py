"""Draw a run, or compare several.

``report.png`` shows one run, or a comparison of several, on one page: panels of metrics over steps.

With one run, colours stand for quantities. With several runs, colours stand for runs and line styles for quantities.
The palette is by Okabe and Ito, made for colour-blind readers.

megatron-dppo report runs/demo            # writes runs/demo/report.png
megatron-dppo report runs/a runs/b --output ab.png   # one line for each run
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_dppo.logging import fatal
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import (
    REPORT_FILE,
    Record,
    RecordsError,
    mean_accuracy,
    phase_table,
    read_records,
    series,
    step_of,
)
from megatron_dppo.metrics.row import Dtype, Metric, Stroke
from megatron_dppo.metrics.summary import RunInfo, add_metrics_of, differing_keys
from megatron_dppo.metrics.table import BY_METRIC, METRICS, own_metrics
from megatron_dppo.system.files import atomic_file

BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, BLACK, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999",
)  # fmt: skip
RUN_COLOURS = (BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, BLACK)
LineStyle = Literal["-", "--", "-."]
SMALL = 8.5
"""Font size of legends and remarks, points."""
FEW_POINTS = 30
"""Up to this number of steps, every step has a dot and lines are not smoothed."""
LEGEND_WIDTH = 72
"""Number of characters of a legend that fit over a panel in one row."""
WHOLE = 1.01
"""Upper end of an axis of shares, above 1 so that a line at 1 is visible in its full width."""
PERCENT = (0, 100 * WHOLE)
"""Range of an axis of shares in percent."""
STEP_AXIS = "step"
"""Label of the horizontal axis of every panel that shows steps."""


BOUND: dict[str, Any] = {"linestyle": "-", "linewidth": 6, "alpha": 0.35, "solid_capstyle": "butt"}
"""Line style of a metric that bounds another metric of its panel."""


@dataclass(frozen=True)
class RunRecords:
    """One run to draw; ``label`` is its name in a comparison."""

    label: str
    records: list[Record]
    dtype: Dtype = "float32"


STROKES: dict[Stroke, tuple[str, LineStyle]] = {
    "first": (BLUE, "-"),
    "second": (VERMILION, "--"),
    "third": (PINK, "-."),
    "bound": (GREEN, "-"),
}
"""Colour and style of a panel's lines, if colours stand for quantities."""


def in_panel(panel: str, *, right: bool = False) -> list[Metric]:
    """Return the metrics that ``panel`` draws on its left or its right axis."""
    rows: list[Metric] = []
    for row in METRICS.values():
        if row.line is not None and (row.line.panel, row.line.right) == (panel, right):
            rows.append(row)
    return rows


def centred_mean(values: list[float], reach: int) -> list[float]:
    """Return for each value the mean of the value and of up to ``reach`` neighbours on each side."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _plot(
    axes: Axes,
    steps: list[int],
    values: list[float],
    colour: str,
    style: LineStyle,
    is_only_run: bool,
) -> None:
    """Draw a line with a dot for each step.

    The line of more than ``FEW_POINTS`` steps is the mean of five steps, without dots. If there is only one run, the
    unsmoothed values are then drawn too, thin and pale.
    """
    line_values, marker = values, "o"
    if len(steps) > FEW_POINTS:
        line_values, marker = centred_mean(values, 2), ""
        if is_only_run:
            axes.plot(steps, values, "-", color=colour, alpha=0.22, linewidth=1)
    axes.plot(
        steps,
        line_values,
        style,
        color=colour,
        linewidth=1.8,
        marker=marker,
        markersize=6 if len(steps) == 1 else 3,
    )


def plot_metrics(
    axes: Axes, runs: list[RunRecords], metrics: list[Metric], *, log: bool = False
) -> list[Line2D]:
    """Draw the metrics' lines of every run; returns legend handles of the metrics that any run recorded.

    ``log``: the panel's axis is logarithmic, so values that are not above 0 are left out.
    """
    handles = []
    for metric in metrics:
        assert metric.line is not None
        line = metric.line
        has_data = False
        own_colour, style = STROKES[line.stroke]
        for index, run in enumerate(runs):
            points = [
                (step, value * line.scale)
                for step, value in zip(*series(run.records, metric.name), strict=True)
            ]
            if log:
                points = [(step, value) for step, value in points if value > 0]
            if not points:
                continue
            has_data = True
            steps, values = map(list, zip(*points, strict=True))
            colour = _colour(runs, index, own_colour)
            if line.stroke == "bound":
                # Draw the bound wide, pale and below the other lines: it stays visible if a line has equal values.
                axes.plot(steps, values, color=colour, zorder=1, **BOUND)
            else:
                _plot(axes, steps, values, colour, style, len(runs) == 1)
        if has_data:
            handle = _handle(line.legend, runs, own_colour, style)
            if line.stroke == "bound":
                handle.set(**BOUND)
            handles.append(handle)
    return handles


def plot_on_the_right(axes: Axes, runs: list[RunRecords], panel: str, unit: str) -> list[Line2D]:
    """Draw the shares of ``panel`` on a right axis, with the label ``unit``; returns legend handles."""
    metrics = in_panel(panel, right=True)
    if not is_recorded(runs, *(metric.name for metric in metrics)):
        return []
    right = axes.twinx()
    handles = plot_metrics(right, runs, metrics)
    right.set_ylim(*PERCENT)
    right.set_ylabel(unit)
    right.spines[["top"]].set_visible(False)
    return handles


def is_recorded(runs: list[RunRecords], *metrics: str) -> bool:
    """Return whether at least one run recorded at least one of the metrics."""
    for run in runs:
        for name in metrics:
            steps, _ = series(run.records, name)
            if steps:
                return True
    return False


def _colour(runs: list[RunRecords], index: int, own_colour: str) -> str:
    """Return the colour of a quantity of a run: of several runs, each has its own colour for all quantities."""
    return own_colour if len(runs) == 1 else RUN_COLOURS[index]


def _handle(
    name: str, runs: list[RunRecords], colour: str, style: LineStyle, marker: str = ""
) -> Line2D:
    """Return a legend entry; it is grey if colours stand for runs."""
    shade = "#444444" if len(runs) > 1 else colour
    return Line2D([], [], color=shade, linestyle=style, marker=marker, linewidth=1.8, label=name)


def simplify(axes: Axes, *, grid: Literal["both", "x"] = "both") -> None:
    """Draw a pale grid below the data, and only the left and the lower edge of the axes."""
    axes.grid(True, axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def finish(axes: Axes, title: str, unit: str, handles: list, *, handle_length: float = 1.6) -> None:
    """Set title, labels and grid, and put the legend above the axes."""
    # The line sample beside a name counts as six characters.
    width = sum(len(handle.get_label()) + 6 for handle in handles)
    rows = 0
    if handles:
        rows = 1 if width <= LEGEND_WIDTH else 2
    # Leave space for the legend between the title and the axes.
    axes.set_title(title, loc="left", fontweight="bold", pad=6 + 14 * rows)
    axes.set_ylabel(unit)
    axes.set_xlabel(STEP_AXIS)
    axes.xaxis.set_major_locator(
        MaxNLocator(integer=True, nbins=8, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
    simplify(axes)
    if handles:
        legend = axes.legend(
            handles=_by_rows(handles, rows),
            loc="lower left",
            bbox_to_anchor=(-0.01, 0.985),
            ncols=math.ceil(len(handles) / rows),
            frameon=False,
            fontsize=SMALL,
            handlelength=handle_length,
            columnspacing=0.9,
            handletextpad=0.5,
            borderaxespad=0.2,
        )
        # Leave the legend out of the layout: a wide one would narrow the panel below it.
        legend.set_in_layout(False)


def _by_rows(handles: list, rows: int) -> list:
    """Return ``handles`` in an order that reads row by row, although matplotlib fills a legend column by column."""
    columns = math.ceil(len(handles) / rows)
    lines = [handles[i : i + columns] for i in range(0, len(handles), columns)]
    return [handle for handle in chain(*zip_longest(*lines)) if handle is not None]


def _remark(axes: Axes, text: str) -> None:
    """Write a remark into the lower right corner."""
    axes.text(
        0.99, 0.03, text, transform=axes.transAxes, ha="right", fontsize=SMALL, color="#666666"
    )


def mark_empty(axes: Axes, handles: list, reason: str = "not recorded") -> None:
    """Write ``reason`` into the panel if there are no ``handles`` for its legend."""
    if not handles:
        axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", color=GREY)


def _band(axes: Axes, runs: list[RunRecords], metric: str, scale: float, unit: str) -> list:
    """Shade the normal range of ``metric``; returns a list with the legend handle.

    The list is empty if the range is below the axis. The limits of the axis stay.
    """
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
    handles = plot_metrics(axes, runs, in_panel("reward"))
    is_measured = False
    for index, run in enumerate(runs):
        accuracies = [(step_of(r), mean_accuracy(r)) for r in run.records]
        points = [(step, value) for step, value in accuracies if value is not None]
        if points:
            is_measured = True
            colour = _colour(runs, index, VERMILION)
            axes.plot(*zip(*points, strict=True), "--s", color=colour, linewidth=1.6, markersize=5)
    if is_measured:
        handles.append(_handle("held-out accuracy (avg@k)", runs, VERMILION, "--", "s"))
    elif handles:
        which_runs = "this run" if len(runs) == 1 else "these runs"
        _remark(axes, f"no evaluation in {which_runs}")
    least_value, largest_value = axes.dataLim.intervaly
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom if least_value < 0 else 0.0, top if largest_value > 1 else WHOLE)
    mark_empty(axes, handles)
    finish(axes, "Reward and held-out accuracy", "mean", handles)


def draw_gap(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw mean |pi - mu|: while trainer and engine have equal weights, and over the whole step.

    A dotted line shows the upper bound of each. The right axis has the agreement of routing.
    """
    handles: list[Line2D] = []
    bounds: list[tuple[float, str]] = []
    for metric in in_panel("gap"):
        assert metric.line is not None
        own_handles = plot_metrics(axes, runs, [metric], log=True)
        if metric.normal is None:
            handles += own_handles
            continue
        upper = max(metric.normal.upper(run.dtype) for run in runs)
        # ``plot_metrics`` returns no handle if no run recorded the metric.
        for handle in own_handles:
            handle.set_label(f"{metric.line.legend} (at most {upper:g})")
            handles.append(handle)
            colour = GREY
            if len(runs) == 1:
                colour = STROKES[metric.line.stroke][0]
            bounds.append((upper, colour))
    if handles:
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        for upper, colour in bounds:
            axes.axhline(upper, color=colour, linestyle=":", linewidth=1.2)
        axes.set_ylim(bottom / 3, max([top * 3, *(2 * upper for upper, _ in bounds)]))
    handles += plot_on_the_right(axes, runs, "gap", "routed alike, % of tokens x layers")
    mark_empty(axes, handles)
    unit = "probability, log axis (dotted: bounds)"
    finish(axes, "Mean |pi - mu| (trainer against engine)", unit, handles)


def draw_masked(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the share of tokens that the trust region masks, by sign of the advantage.

    The axis ends at the largest value. Normal values are below 1%: on an axis up to 100% they could not be read.
    """
    handles = plot_metrics(axes, runs, in_panel("masked"))
    if handles:
        axes.set_ylim(0, min(max(axes.get_ylim()[1], 0.1), PERCENT[1]))
        handles += _band(axes, runs, metric_names.MASKED_POSITIVE, 100, "%")
    if _has_no_advantage(runs):
        mark_empty(axes, handles, "no token to mask:\nthe responses of each group earned the same")
    else:
        mark_empty(axes, handles)
    finish(axes, "Masked tokens by sign of advantage", "% of tokens", handles)


def _has_no_advantage(runs: list[RunRecords]) -> bool:
    """Return whether the rewards within each group were equal, in every step of every run."""
    for run in runs:
        _, shares = series(run.records, metric_names.ZERO_VARIANCE_GROUPS)
        if set(shares) != {1.0}:
            return False
    return True


def draw_entropy(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the policy's mean entropy, and on the right axis the share of different responses in a group."""
    handles = plot_metrics(axes, runs, in_panel("entropy"))
    if handles:
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
        _remark(axes, "expected: a slow fall, no cliff")
    handles += plot_on_the_right(axes, runs, "entropy", "different, % of a group")
    mark_empty(axes, handles)
    finish(axes, "Entropy", "nats per token", handles if len(runs) == 1 else [])


def draw_likelihood(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the mean of -log pi of a supervised run: of each step's responses, and of each held-out set."""
    handles = plot_metrics(axes, runs, in_panel("likelihood"))
    held_out_sets: set[str] = set()
    for index, run in enumerate(runs):
        colour = _colour(runs, index, VERMILION)
        for name in sorted(set().union(*run.records)):
            held_out_set = metric_names.held_out_loss_set(name)
            if held_out_set is not None:
                held_out_sets.add(held_out_set)
                points = series(run.records, name)
                axes.plot(*points, "--s", color=colour, linewidth=1.6, markersize=5)
    if held_out_sets:
        legend = f"held-out: {', '.join(sorted(held_out_sets))}"
        handles.append(_handle(legend, runs, VERMILION, "--", "s"))
    mark_empty(axes, handles)
    finish(axes, "Likelihood of the responses", "mean -log pi, nats per token", handles)


def draw_teacher(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the policy's distance to the teacher. The estimate from the sampled tokens may be below 0."""
    handles = plot_metrics(axes, runs, in_panel("teacher"))
    mark_empty(axes, handles)
    finish(axes, "Distance to the teacher", "nats per token", handles)


def draw_arithmetic(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the model's FLOP/s on one rank.

    If every run recorded the share of the GPU's peak, draw this share, else TFLOP/s.
    """
    panel, unit = "tflops", "TFLOP/s"
    if all(is_recorded([run], metric_names.MFU) for run in runs):
        panel, unit = "mfu", "% of the GPU's bf16 peak"
    _draw_from_zero(axes, runs, panel, "Model arithmetic in training", unit)


def _draw_from_zero(
    axes: Axes, runs: list[RunRecords], panel: str, title: str, unit: str, right: str | None = None
) -> None:
    """Draw a panel whose axis starts at zero; an axis of shares goes from 0 to 100%.

    ``right`` is the unit of the shares on the right axis.
    """
    metrics = in_panel(panel)
    handles = plot_metrics(axes, runs, metrics)
    if handles and all(metric.share for metric in metrics):
        axes.set_ylim(*PERCENT)
    elif handles:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    if right is not None:
        handles += plot_on_the_right(axes, runs, panel, right)
    mark_empty(axes, handles)
    finish(axes, title, unit, handles)


Draw = Callable[[Axes, list[RunRecords]], None]
"""Function that draws a panel of the page."""


def _plain(panel: str, title: str, unit: str, right: str | None = None) -> Draw:
    """Return ``_draw_from_zero`` for a panel."""
    return partial(_draw_from_zero, panel=panel, title=title, unit=unit, right=right)


draw_length = _plain("length", "Response length and truncation", "tokens", "% truncated")
draw_memory = _plain("memory", "Peak memory and idle ranks", "GiB", "% of FLOPs")
draw_age = _plain("age", "Age of the tokens", "weight versions", "% interrupted")
draw_waiting = _plain("waiting", "Waiting", "% of the time")
draw_turns = _plain("turns", "Turns of the policy", "turns")
draw_prefix = _plain("prefix", "Prompt tokens in the prefix cache", "%")
draw_accepted = _plain("accepted", "Tokens for each verification", "tokens")
draw_update_seconds = _plain("update seconds", "Weight update: time", "seconds")
"""Draw the seconds of each update, of the engines' pause in it, and of the fastest update that the network allows."""
draw_update_bytes = _plain("update bytes", "Weight update: bytes", "GB")
"""Draw the bytes of each update, their static lower bound, and the bytes that left a node."""

REST = "rest"
PHASE_COLOURS = {
    "generate": BLUE,
    "train": ORANGE,
    "sync": GREEN,
    "evaluate": PINK,
    "reward": SKY,
    "checkpoint": VERMILION,
    REST: GREY,
}
SPARE_COLOURS = ("#7F7FBF", "#A6761D", "#666666", "#B2DF8A", "#CAB2D6")
MOST_PHASES = 5
"""Number of phases shown by name. The shorter phases are summed as ``rest``."""


def fold_short_phases(tables: list[Mapping[str, list[float]]]) -> list[dict[str, list[float]]]:
    """Return each table (phase -> seconds of each step) with the ``MOST_PHASES`` longest phases only.

    The longest phases are the phases with the most seconds in all ``tables`` together. The other phases are summed as
    ``rest``.
    """
    totals: dict[str, float] = {}
    for table in tables:
        for phase, seconds in table.items():
            totals[phase] = totals.get(phase, 0.0) + sum(seconds)
    ranked = sorted(totals, key=totals.__getitem__, reverse=True)
    longest_phases = ranked[:MOST_PHASES]
    short_phases = ranked[MOST_PHASES:]
    folded = []
    for table in tables:
        length = max((len(seconds) for seconds in table.values()), default=0)
        nothing = [0.0] * length
        row = {phase: table.get(phase, nothing) for phase in longest_phases}
        if short_phases:
            short_rows = [table[phase] for phase in short_phases if phase in table]
            row[REST] = [sum(column) for column in zip(*short_rows, strict=True)] or nothing
        folded.append(row)
    return folded


def phase_colours(phases: list[str]) -> dict[str, str]:
    """Return the colour of each phase: a known phase has a fixed colour, an unknown phase gets a spare colour."""
    spare_colours = iter(SPARE_COLOURS)
    colours: dict[str, str] = {}
    for phase in phases:
        if phase in PHASE_COLOURS:
            colours[phase] = PHASE_COLOURS[phase]
        else:
            colours[phase] = next(spare_colours)
    return colours


def draw_time(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw stacked bars of the seconds of each phase.

    With one run, each step has a bar. With several runs, each run has a bar, with the means over its steps. Step 0 (the
    work before training) is left out.
    """
    trained: list[RunRecords] = []
    for run in runs:
        records = [record for record in run.records if step_of(record) > 0]
        trained.append(RunRecords(run.label, records, run.dtype))
    tables = fold_short_phases([phase_table(run.records) for run in trained])
    colours = phase_colours(list(tables[0]))
    if len(trained) == 1:
        _draw_steps(axes, trained[0], tables[0], colours)
    else:
        _draw_means(axes, trained, tables, colours)
    handles = [Patch(color=colour, label=phase) for phase, colour in colours.items()]
    mark_empty(axes, handles)
    title = "Mean time per step"
    if len(trained) == 1:
        title = "Time per step"
    finish(axes, title, "seconds", handles, handle_length=1.0)
    if len(trained) > 1:
        # The first run is at the top, with space for its label above its bar.
        axes.set(xlabel="seconds", ylabel="", yticks=[], ylim=(len(runs) - 0.5, -0.7))


def _draw_steps(
    axes: Axes, run: RunRecords, table: Mapping[str, list[float]], colours: Mapping[str, str]
) -> None:
    steps = [step_of(record) for record in run.records]
    bottom = [0.0] * len(steps)
    # Many steps have narrow bars, and white edges would hide them.
    edge = 0.4 if len(steps) <= 60 else 0.0
    for phase, seconds in table.items():
        colour = colours[phase]
        axes.bar(steps, seconds, 1.0, bottom, color=colour, edgecolor="white", linewidth=edge)
        bottom = [low + value for low, value in zip(bottom, seconds, strict=True)]


def _draw_means(
    axes: Axes,
    runs: list[RunRecords],
    tables: list[dict[str, list[float]]],
    colours: Mapping[str, str],
) -> None:
    for row, (run, table) in enumerate(zip(runs, tables, strict=True)):
        bar_start = 0.0
        for phase, seconds in table.items():
            mean = sum(seconds) / max(1, len(seconds))
            axes.barh(
                row, mean, 0.45, bar_start, color=colours[phase], edgecolor="white", linewidth=0.4
            )
            bar_start += mean
        axes.text(0, row - 0.28, run.label, fontsize=SMALL, va="bottom")


PANELS = (draw_reward, draw_gap, draw_masked, draw_entropy, draw_length, draw_time)
"""The panels of every run of reinforcement learning."""
RECORDED = -math.inf
FURTHER_PANELS: Sequence[tuple[Sequence[str], float, Sequence[Draw]]] = (
    ([metric_names.TEACHER_GAP], RECORDED, [draw_teacher]),
    (
        [metric_names.TFLOPS, metric_names.PEAK_MEMORY, metric_names.IDLE_SHARE],
        RECORDED,
        [draw_arithmetic, draw_memory],
    ),
    ([metric_names.STALENESS_MAX], 0, [draw_age, draw_waiting]),
    ([metric_names.TURNS], 1, [draw_turns, draw_prefix]),
    ([metric_names.ACCEPTED_LENGTH], RECORDED, [draw_accepted]),
    ([metric_names.UPDATE_SECONDS], RECORDED, [draw_update_seconds, draw_update_bytes]),
)
"""Rows of metrics, a number and panels: the panels are drawn if a run has recorded a larger value of a metric."""
ROW_HEIGHT = 11 / 3
"""Height of a row of two panels, inches."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def write_report(directory: str | Path) -> Path:
    """Draw the run in ``directory`` into its ``report.png``; returns that path."""
    return write_comparison([directory])


def write_comparison(directories: Sequence[str | Path], output: Path | None = None) -> Path:
    """Draw several runs, at most ``len(RUN_COLOURS)``, into the PNG file ``output``; returns its path.

    Default of ``output``: ``report.png`` of the one run, or ``comparison.png`` here. One record of a run is enough; a
    panel without data says "not recorded". Raises RecordsError if a run has no metrics file or no record, and
    ValueError for more runs than colours.
    """
    if output is None:
        output = Path("comparison.png")
        if len(directories) == 1:
            output = Path(directories[0]) / REPORT_FILE
    if len(directories) > len(RUN_COLOURS):
        raise ValueError(
            f"{len(directories)} runs in one picture, expected at most {len(RUN_COLOURS)}: "
            "no more colours can be told apart"
        )
    infos = [RunInfo.of_run(directory) for directory in directories]
    for directory in directories:
        add_metrics_of(directory)
    runs = []
    for directory, info, label in zip(directories, infos, _labels(directories, infos), strict=True):
        records = read_records(directory)
        if not records:
            raise RecordsError(f"{directory}: no step is recorded yet, so there is nothing to draw")
        runs.append(RunRecords(label, records, info.dtype if info else "float32"))
    title = _title(directories, infos)
    with matplotlib.rc_context(STYLE):
        figure = FigureCanvasAgg(_draw(runs, title))
        with atomic_file(output) as file:
            figure.print_png(file)
    return output


def _labels(directories: Sequence[str | Path], infos: Sequence[RunInfo | None]) -> list[str]:
    """Return the label of each run: the parts of RunInfo that differ between the runs.

    The labels are folder names if a run has no RunInfo, or if two labels would be equal.
    """
    folders = [Path(directory).resolve().name for directory in directories]
    parts = [info.parts for info in infos if info is not None]
    if len(parts) < len(infos):
        return folders
    differing_columns = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    labels: list[str] = []
    for run in range(len(parts)):
        labels.append(", ".join(column[run] for column in differing_columns))
    if len(set(labels)) == len(labels):
        return labels
    return folders


def _title(directories: Sequence[str | Path], infos: Sequence[RunInfo | None]) -> str:
    """Return the title: the parts of RunInfo that all runs share, and with several runs their number.

    If a run has no RunInfo, the title is the folder's name of the one run, or the number of runs.
    """
    parts = [info.parts for info in infos if info is not None]
    if len(infos) == 1:
        if not parts:
            return Path(directories[0]).resolve().name
        return " | ".join(parts[0])
    if len(parts) < len(infos):
        return f"{len(infos)} runs"
    common_parts = [column[0] for column in zip(*parts, strict=True) if len(set(column)) == 1]
    return " | ".join([*common_parts, f"{len(infos)} runs"])


def _panels(runs: list[RunRecords]) -> list[Draw]:
    """Return the functions that draw the page's panels: six, and more for what the runs recorded; for supervised runs,
    two."""
    if is_recorded(runs, metric_names.NEGATIVE_LOG_LIKELIHOOD):
        return [draw_likelihood, draw_time]
    panels: list[Draw] = list(PANELS)
    for metrics, bound, further_panels in FURTHER_PANELS:
        if _largest(runs, metrics) > bound:
            panels += further_panels
    for title in _own_panels(runs):
        panels.append(_plain(title, title, unit=""))
    return panels


def _own_panels(runs: list[RunRecords]) -> list[str]:
    """Return the titles of the panels that only recorded metrics of the user name."""
    own_rows = own_metrics()
    built_in_titles = {
        row.line.panel for row in METRICS.values() if row.line is not None and row not in own_rows
    }
    titles: dict[str, None] = {}
    for row in own_rows:
        if row.line is not None and is_recorded(runs, row.name):
            titles[row.line.panel] = None
    return [title for title in titles if title not in built_in_titles]


def _draw(runs: list[RunRecords], title: str) -> Figure:
    """Draw the page; with several runs, their names are at the bottom."""
    drawn_panels = _panels(runs)
    rows = math.ceil(len(drawn_panels) / 2)
    figure = Figure(figsize=(10.5, ROW_HEIGHT * rows), dpi=130)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    steps: list[int] = []
    for run in runs:
        steps += [step_of(record) for record in run.records]
    margin = max(0.8, 0.02 * (max(steps) - min(steps)))
    places = list(figure.subplots(rows, 2).flat)
    for unused_axes in places[len(drawn_panels) :]:
        unused_axes.set_axis_off()
    for axes, draw in zip(places, drawn_panels, strict=False):
        draw(axes, runs)
        if axes.get_xlabel() == STEP_AXIS:
            axes.set_xlim(min(steps) - margin, max(steps) + margin)
    if any(len(run.records) > FEW_POINTS for run in runs):
        remark = "bold: mean of 5 steps"
        if len(runs) == 1:
            remark += ", thin: each step"
        figure.supxlabel(remark, fontsize=SMALL, color="#666666", x=0.99, ha="right")
    if len(runs) > 1:
        handles: list[Line2D] = []
        for i, run in enumerate(runs):
            handles.append(Line2D([], [], color=RUN_COLOURS[i], linewidth=3, label=run.label))
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(4, len(runs)), frameon=False
        )
    return figure


def _largest(runs: list[RunRecords], metrics: Sequence[str]) -> float:
    """Return the largest value of any of ``metrics`` in all runs; -inf if no run has one."""
    largest_value = -math.inf
    for run in runs:
        for metric in metrics:
            largest_value = max([largest_value, *series(run.records, metric)[1]])
    return largest_value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exits with status 2 and a message if a run cannot be drawn."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo report",
        description="Draw a run, or compare several and list the keys in which they differ.",
    )
    parser.add_argument("directories", nargs="+", metavar="DIR", help="folder of a run")
    parser.add_argument(
        "--output", type=Path, help="PNG file (one run: DIR/report.png; several: comparison.png)"
    )
    options = parser.parse_args(arguments)
    try:
        print(write_comparison(options.directories, options.output))
        for key, values in differing_keys(options.directories).items():
            print(f"{key}: {' | '.join(values)}")
    except (ValueError, OSError) as error:
        fatal(str(error))


if __name__ == "__main__":
    main()
