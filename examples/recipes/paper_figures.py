"""Draw the paper's figures from runs, and write the page docs/paper.md.

    python -m examples.recipes.paper_figures "Figure 13"          # from the folders of the recipes' runs
    python -m examples.recipes.paper_figures "Figure 13" --toy    # makes toy runs (paper_toys.py) and draws them
    python -m examples.recipes.paper_figures --toy                # every figure; then writes the page

A figure has the paper's panels and axes. Its runs, panels and smoothing stand in examples/paper.yaml.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.ndimage import gaussian_filter1d

from examples.recipes import paper_page
from examples.recipes.paper import experiments, figures, runs_of
from examples.recipes.paper_toys import STEPS, TOKENS_FILE, TOYS, ToyRun, make
from megatron_dppo.config.loading import load_config
from megatron_dppo.metrics.records import MASKED_TOKENS_FILE, read_records, read_step_lines, series

RUNS = Path("runs/figures")
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999",
)  # fmt: skip
"""Colours by Okabe and Ito, made for colour-blind readers."""
SHOWN_TOKENS = 25
"""Number of blocked tokens in each list of Appendix D's figure. ``masked_tokens.jsonl`` has more."""
BINS = 20


@dataclass(frozen=True)
class Curve:
    """One run of a figure: its label and its folder."""

    label: str
    folder: Path


Rows = Mapping[str, Sequence[Curve]]
"""Title of an experiment -> its curves."""


def recipe_rows(figure: str) -> Rows:
    """Return the curves of a figure with the folders in which the recipes' commands make their runs."""
    rows: dict[str, list[Curve]] = {}
    for run in runs_of(figure):
        folder = Path(load_config(run.path, run.words).run.directory)
        rows.setdefault(experiments()[run.experiment]["title"], []).append(Curve(run.label, folder))
    return rows


def toy_rows(figure: str) -> Rows:
    """Return the curves of a figure's toy runs. The runs of :func:`toy_runs` must have been made."""
    rows: dict[str, list[Curve]] = {}
    for run in runs_of(figure):
        toy = TOYS[run.experiment]
        title = f"{experiments()[run.experiment]['title']}\n(toy: task {toy.task}, {toy.mismatch})"
        rows.setdefault(title, []).append(Curve(run.label, ToyRun.of(run).directory))
    return rows


def draw(figure: str, rows: Rows, steps: int, path: Path) -> None:
    """Draw the panels of ``figure``: a row for each experiment, or a column if there is only one panel.

    ``steps``: the end of the horizontal axis. Raises RecordsError if a folder has no run.
    """
    panels = figures()[figure]["panels"]
    is_single = len(panels) == 1
    shape = (1, len(rows)) if is_single else (len(rows), len(panels))
    canvas, axes = pyplot.subplots(
        *shape, figsize=(3.1 * shape[1], 2.6 * shape[0] + 0.4), squeeze=False, layout="constrained"
    )
    for row, (title, curves) in enumerate(rows.items()):
        for column, (panel, content) in enumerate(panels.items()):
            place = axes[0][row] if is_single else axes[row][column]
            _draw_panel(place, content, curves, steps)
            place.set_title(title if is_single else panel, fontsize=8)
            if is_single:
                place.set_ylabel(panel, fontsize=8)
            elif column == 0 and len(rows) > 1:
                place.set_ylabel(title, fontsize=7)
            place.tick_params(labelsize=7)
    _draw_legend(canvas, next(iter(rows.values())), columns=min(4, 2 * shape[1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=80)
    pyplot.close(canvas)


def _draw_legend(canvas: Figure, curves: Sequence[Curve], columns: int) -> None:
    if len(curves) < 2:
        return
    handles = []
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        handles.append(pyplot.Line2D([], [], color=colour, label=curve.label))
    canvas.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=7, frameon=False
    )


def _draw_panel(
    axes: Axes, content: Mapping[str, Any], curves: Sequence[Curve], steps: int
) -> None:
    if "columns" in content:
        _draw_bins(axes, content["columns"], curves[0].folder / TOKENS_FILE)
    elif "files" in content:
        _draw_blocked_tokens(axes, curves[0].folder)
    else:
        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            for metric in content["metrics"]:
                _draw_curve(axes, curve, metric, content.get("sigma"), colour)
        axes.set_xlim(0, steps)
        axes.set_xlabel("step", fontsize=7)


def _draw_curve(axes: Axes, curve: Curve, metric: str, sigma: float | None, colour: str) -> None:
    numbers, values = series(read_records(curve.folder), metric)
    if not values:
        return
    line = np.asarray(values, dtype=float)
    if sigma is not None:
        axes.plot(numbers, line, color=colour, alpha=0.2, linewidth=0.7)
        line = gaussian_filter1d(line, sigma)
    axes.plot(numbers, line, color=colour, linewidth=1.1)


def _draw_bins(axes: Axes, columns: Sequence[str], path: Path) -> None:
    """Draw the second column over bins of the first: the median, and the range of the middle 98%."""
    with path.open(encoding="utf-8") as file:
        rows = [(float(row[columns[0]]), float(row[columns[1]])) for row in csv.DictReader(file)]
    table = np.array(rows)
    bins = np.minimum((table[:, 0] * BINS).astype(int), BINS - 1)
    centres, lows, medians, highs = [], [], [], []
    for number in np.unique(bins):
        low, median, high = np.quantile(table[bins == number, 1], [0.01, 0.5, 0.99])
        centres.append((number + 0.5) / BINS)
        lows.append(low)
        medians.append(median)
        highs.append(high)
    axes.fill_between(centres, lows, highs, color=COLOURS[0], alpha=0.25, label="98% of tokens")
    axes.plot(centres, medians, color=COLOURS[0], linewidth=1.2, label="median")
    axes.set_xlim(0, 1)
    axes.set_xlabel("probability of the token under the engine", fontsize=7)
    axes.legend(fontsize=7, frameon=False)


def _draw_blocked_tokens(axes: Axes, folder: Path) -> None:
    """Draw how often the mask blocked each token in the last step: to the right at A > 0, to the left at A < 0."""
    tokens = read_step_lines(folder / MASKED_TOKENS_FILE)[-1]["tokens"]
    for sign, name, colour in ((1, "raised", COLOURS[0]), (-1, "lowered", COLOURS[1])):
        most_blocked = sorted(tokens, key=lambda token: -token[name])[:SHOWN_TOKENS]
        for place, token in enumerate(most_blocked):
            axes.barh(-place, sign * token[name], color=colour, height=0.8)
            text = token.get("text", str(token["id"]))
            axes.annotate(text, (sign * token[name], -place), fontsize=5, va="center")
    axes.set_yticks([])
    axes.set_xlabel("blocked at A < 0 (left), at A > 0 (right)", fontsize=7)


def draw_toy(figure: str) -> Path:
    """Draw a figure from its toy runs; return the picture's file."""
    path = paper_page.picture_of(figure)
    draw(figure, toy_rows(figure), STEPS, path)
    return path


def toy_runs(names: Sequence[str]) -> list[ToyRun]:
    """Return the toy runs of the figures ``names``."""
    return [ToyRun.of(run) for name in names for run in runs_of(name)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.recipes.paper_figures", description=__doc__.partition("\n")[0]
    )
    drawn = [name for name, row in figures().items() if "panels" in row]
    parser.add_argument("figure", nargs="?", choices=drawn, metavar="FIGURE", help='as "Figure 13"')
    parser.add_argument("--toy", action="store_true", help="from toy runs, which are made first")
    parser.add_argument("--processes", type=int, default=2, help="toy runs at a time (default: 2)")
    parser.add_argument("--output", type=Path, help="file of the picture (default: runs/figures)")
    options = parser.parse_args(arguments)
    if options.figure is None and not options.toy:
        parser.error('expected a figure, such as "Figure 13", or --toy for all')
    names = drawn if options.figure is None else [options.figure]
    if options.toy:
        make(toy_runs(names), options.processes)
        for name in names:
            print(draw_toy(name))
        paper_page.write()
        return 0
    path = options.output or RUNS / paper_page.picture_of(options.figure).name
    rows = recipe_rows(options.figure)
    steps = max(paper_page.steps_of_figure(options.figure).values())
    draw(options.figure, rows, steps, path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
