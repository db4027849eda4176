"""``table.md``: what every algorithm ended with, mean and range over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.why.aggregate import Series, end_value
from examples.why.figure import PANELS, label, panel_series
from examples.why.plan import PlannedRun
from megatron_dppo.system.files import write_atomically

WINDOW = 10
"""Steps that an end value is the mean of."""


def write_table(runs: Sequence[PlannedRun], output: Path) -> Path:
    """Write a Markdown table of ``runs``, one row an algorithm, into ``output``; returns it."""
    algorithms = list(dict.fromkeys(run.algorithm for run in runs))
    names = [f"{panel.title}, {panel.unit.split(',')[0]}" for panel in PANELS]
    lines = [_row([f"mean of the last {WINDOW} steps", *names]), _row(["---"] * (len(PANELS) + 1))]
    for algorithm in algorithms:
        folders = [run.directory for run in runs if run.algorithm == algorithm]
        cells = [cell([panel_series(folder, panel) for folder in folders]) for panel in PANELS]
        lines.append(_row([label(algorithm, len(folders)), *cells]))
    write_atomically(output, "\n".join(lines) + "\n")
    return output


def cell(seeds: Sequence[Series]) -> str:
    """``mean (lowest to highest)`` of the seeds' end values; a dash where none was measured."""
    ends = [end_value(one, max(one[0]), WINDOW) for one in seeds if one[0]]
    values = [value for value in ends if value is not None]
    if not values:
        return "-"
    mean = sum(values) / len(values)
    return f"{mean:.3g} ({min(values):.3g} to {max(values):.3g})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"
