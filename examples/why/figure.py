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
from examples.why.plan import ALGORITHMS, CONFIG, PlannedRun
from megatron_dppo.config import load_config
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import read_records, series
from megatron_dppo.metrics.report import (
    BLUE,
    GREEN,
    PINK,
    SMALL,
    STYLE,
    VERMILION,
    centred_mean,
    finish,
)
from megatron_dppo.system.files import atomic_file

COLOURS = (VERMILION, PINK, GREEN, BLUE)
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
    steps. ``top``: the least upper end of the axis.
    """

    title: str
    metric: str
    unit: str
    scale: float = 1.0
    smooth: bool = True
    top: float = 0.0


PANELS = (
    Panel("Held-out accuracy", names.accuracy("held_out"), "fraction (avg@4)", smooth=False, top=1),
    Panel("Training reward", names.REWARD, "fraction", top=1),
    Panel("Mean |pi - mu|", names.GAP, "probability"),
    Panel("Bad updates: A < 0 and mu - pi >= 0.5", names.BAD_UPDATE, "% of tokens", 100),
    Panel("Masked, A > 0", names.MASKED_POSITIVE, "% of tokens with A > 0", 100, top=0.1),
    Panel("Masked, A < 0", names.MASKED_NEGATIVE, "% of tokens with A < 0", 100, top=0.1),
)


def label(algorithm: str, seeds: int) -> str:
    """The algorithm's name as the paper writes it, and how many seeds stand behind it."""
    return f"{LABELS.get(algorithm, algorithm)} ({seeds} seed{'' if seeds == 1 else 's'})"


def panel_series(directory: Path, panel: Panel) -> Series:
    """What ``panel`` shows of one run, in its unit, not smoothed. RecordsError: no metrics there."""
    steps, values = series(read_records(directory), panel.metric)
    return steps, [value * panel.scale for value in values]


def write_figure(runs: Sequence[PlannedRun], output: Path) -> Path:
    """Draw ``runs``, all of them with records, into ``output`` (PNG) and return that path."""
    directories = {
        name: [run.directory for run in runs if run.algorithm == name] for name in ALGORITHMS
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 9.5), dpi=130)
        figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
        figure.suptitle(_title(), fontsize=12, fontweight="bold")
        for axes, panel in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
            draw_panel(axes, panel, directories)
        _write_legend(figure, directories)
        with atomic_file(output) as file:
            FigureCanvasAgg(figure).print_png(file)
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
    axes.set_ylim(0, max(axes.get_ylim()[1], panel.top))
    finish(axes, panel.title, panel.unit, [])


def _title() -> str:
    """The conditions that all runs have in common."""
    config = load_config(CONFIG)
    updates = config.rollout.prompts_per_step // config.training.prompts_per_mini_batch
    age = f"{config.rollout.max_staleness} batch old"
    return f"One warm start; {updates} optimiser steps a batch, rate {config.optimizer.lr:g}, responses {age}"


def _write_legend(figure: Figure, directories: dict[str, list[Path]]) -> None:
    """Colours, the number of seeds behind each, and what line and band are."""
    handles = [
        Line2D([], [], color=colour, linewidth=3, label=label(name, len(folders)))
        for colour, (name, folders) in zip(COLOURS, directories.items(), strict=True)
        if folders
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False,
        title="line: mean of the seeds; band: lowest to highest; "
        "each seed as its mean of 5 steps, accuracy as measured",
        title_fontsize=SMALL,
    )  # fmt: skip
