"""Panel of the report: seconds of a step by phase."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from megatron_dppo.metrics.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    SMALL,
    VERMILION,
    RunRecords,
    finish,
    mark_empty,
)
from megatron_dppo.metrics.records import phase_table, step_of

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
"""Number of phases shown by name; the shorter ones are summed as ``rest``."""


def fold_short_phases(tables: list[Mapping[str, list[float]]]) -> list[dict[str, list[float]]]:
    """Each run's phase -> seconds, reduced to the ``MOST_PHASES`` longest over all runs and ``rest``."""
    totals: dict[str, float] = {}
    for table in tables:
        for phase, seconds in table.items():
            totals[phase] = totals.get(phase, 0.0) + sum(seconds)
    ranked = sorted(totals, key=lambda phase: -totals[phase])
    kept, short = ranked[:MOST_PHASES], ranked[MOST_PHASES:]
    folded = []
    for table in tables:
        length = max((len(seconds) for seconds in table.values()), default=0)
        nothing = [0.0] * length
        row = {phase: table.get(phase, nothing) for phase in kept}
        if short:
            row[REST] = [sum(table[p][i] for p in short if p in table) for i in range(length)]
        folded.append(row)
    return folded


def phase_colours(phases: list[str]) -> dict[str, str]:
    """Phase -> colour: fixed for known phases, spare colours for others."""
    spare = iter(SPARE_COLOURS)
    return {p: PHASE_COLOURS[p] if p in PHASE_COLOURS else next(spare) for p in phases}


def draw_time(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw seconds by phase, stacked: of each step of one run, or of the mean step of each run.

    Step 0 (the work before training) is left out.
    """
    trained = [RunRecords(r.label, [x for x in r.records if step_of(x) > 0], r.dtype) for r in runs]
    tables = fold_short_phases([phase_table(run.records) for run in trained])
    colours = phase_colours(list(tables[0]))
    if len(trained) == 1:
        _draw_steps(axes, trained[0], tables[0], colours)
    else:
        _draw_means(axes, trained, tables, colours)
    handles = [Patch(color=colour, label=phase) for phase, colour in colours.items()]
    mark_empty(axes, handles)
    title = "Time per step" if len(trained) == 1 else "Mean time per step"
    finish(axes, title, "seconds", handles, handle_length=1.0)
    if len(trained) > 1:
        axes.set(xlabel="seconds", ylabel="", yticks=[], ylim=(len(runs) - 0.5, -0.7))


def _draw_steps(
    axes: Axes, run: RunRecords, table: Mapping[str, list[float]], colours: Mapping[str, str]
) -> None:
    steps = [step_of(record) for record in run.records]
    bottom = [0.0] * len(steps)
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
        left = 0.0
        for phase, seconds in table.items():
            mean = sum(seconds) / max(1, len(seconds))
            axes.barh(row, mean, 0.45, left, color=colours[phase], edgecolor="white", linewidth=0.4)
            left += mean
        axes.text(0, row - 0.28, run.label, fontsize=SMALL, va="bottom")
