"""``why.png``: held-out accuracy, distance from the rollout policy, bad updates and masked tokens
of every algorithm, the mean of its seeds in a band from the lowest seed to the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from examples.why.aggregate import Series, band
from examples.why.plan import Conditions, PlannedRun
from megatron_dppo.metrics import names
from megatron_dppo.metrics.panels import (
    BLUE,
    GREEN,
    ORANGE,
    SMALL,
    VERMILION,
    centred_mean,
    finish,
)
from megatron_dppo.metrics.records import read_records, series
from megatron_dppo.metrics.report import STYLE

COLOURS = (VERMILION, ORANGE, GREEN, BLUE)
LABELS = {
    "pg-is": "PG-IS",
    "pg-tis": "PG-TIS",
    "grpo-clip-higher": "GRPO-ClipHigher",
    "dppo-binary-tv": "DPPO-Binary-TV",
}
SMOOTHING = 2
"""Neighbours on either side that a training step's value is averaged with."""


@dataclass(frozen=True)
class Panel:
    """One panel: a metric of ``metrics.jsonl``, the unit it is shown in, and how it is drawn.

    ``scale`` turns the recorded value into ``unit``. ``smooth``: each seed as the mean of five
    steps. ``top`` is the least upper end of the axis.
    """

    title: str
    metric: str
    unit: str
    scale: float = 1.0
    smooth: bool = True
    log: bool = False
    top: float = 0.0


PANELS = (
    Panel("Held-out accuracy", names.accuracy("held_out"), "fraction (avg@4)", smooth=False, top=1),
    Panel("Training reward", names.REWARD, "fraction", top=1),
    Panel("Mean |pi - mu|", names.GAP, "probability, log axis", log=True),
    Panel("Bad updates: A < 0 and mu - pi >= 0.5", names.BAD_UPDATE, "% of tokens", 100),
    Panel("Masked, A > 0", names.MASKED_POSITIVE, "% of tokens with A > 0", 100, top=0.1),
    Panel("Masked, A < 0", names.MASKED_NEGATIVE, "% of tokens with A < 0", 100, top=0.1),
)


def label(algorithm: str) -> str:
    """The algorithm's name as the paper writes it."""
    return LABELS.get(algorithm, algorithm)


def panel_series(directory: Path, panel: Panel) -> Series:
    """What ``panel`` shows of one run, in its unit, not smoothed. RecordsError: no metrics there."""
    steps, values = series(read_records(directory), panel.metric)
    return steps, [value * panel.scale for value in values]


def write_figure(runs: Sequence[PlannedRun], conditions: Conditions, output: Path) -> Path:
    """Draw ``runs``, all of them with records, into ``output`` (PNG) and return that path."""
    directories = {
        name: [run.directory for run in runs if run.algorithm == name]
        for name in conditions.algorithms
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 9.5), dpi=130)
        figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
        figure.suptitle(
            "The same start, four algorithms, conditions in which the trust region matters",
            fontsize=12, fontweight="bold",
        )  # fmt: skip
        for axes, panel in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
            draw_panel(axes, panel, directories)
        _write_legend(figure, directories)
        FigureCanvasAgg(figure).print_png(output)
    return output


def draw_panel(axes: Axes, panel: Panel, directories: dict[str, list[Path]]) -> None:
    """Mean line and band of every algorithm that has a run."""
    for colour, folders in zip(COLOURS, directories.values(), strict=True):
        seeds = [panel_series(folder, panel) for folder in folders]
        if panel.smooth:
            seeds = [(steps, centred_mean(values, SMOOTHING)) for steps, values in seeds]
        shown = band(seeds)
        axes.fill_between(shown.steps, shown.low, shown.high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(shown.steps, shown.mean, color=colour, linewidth=1.8)
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, max(axes.get_ylim()[1], panel.top))
    finish(axes, panel.title, panel.unit, [])


def _write_legend(figure: Figure, directories: dict[str, list[Path]]) -> None:
    """Colours, the number of seeds behind each, and what line and band are."""
    handles = [
        Line2D([], [], color=colour, linewidth=3, label=f"{label(name)} ({len(folders)} seeds)")
        for colour, (name, folders) in zip(COLOURS, directories.items(), strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.supxlabel(
        "line: mean of the seeds; band: lowest to highest seed; each seed as its mean of 5 steps, "
        "accuracy as measured",
        fontsize=SMALL, color="#666666", x=0.99, ha="right",
    )  # fmt: skip
