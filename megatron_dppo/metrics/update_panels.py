"""Panels of the report: weight updates against their static lower bounds."""

from __future__ import annotations

from matplotlib.axes import Axes

from megatron_dppo.metrics import names
from megatron_dppo.metrics.panels import (
    BLUE,
    GREEN,
    VERMILION,
    Quantity,
    RunRecords,
    finish,
    plot_quantities,
)


def draw_update_seconds(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw each update's seconds, their part in which the engines stood still, and the fewest that the network allows
    (where its rate is stated)."""
    quantities = [
        Quantity("whole update", names.UPDATE_SECONDS, BLUE),
        Quantity("engines paused", names.UPDATE_STALL, VERMILION, "--"),
        Quantity("network's bound", names.UPDATE_BOUND, GREEN, is_bound=True),
    ]
    _draw(axes, runs, quantities, "Weight update: time", "seconds")


def draw_update_bytes(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the bytes that each update moved, their static lower bound, and those of them that left a node."""
    quantities = [
        Quantity("moved", names.UPDATE_BYTES_MOVED, BLUE, scale=1e-9),
        Quantity("bound", names.UPDATE_BYTES_BOUND, GREEN, scale=1e-9, is_bound=True),
        Quantity("between nodes", names.UPDATE_BYTES_BETWEEN_NODES, VERMILION, "--", scale=1e-9),
    ]
    _draw(axes, runs, quantities, "Weight update: bytes", "GB")


def _draw(
    axes: Axes, runs: list[RunRecords], quantities: list[Quantity], title: str, unit: str
) -> None:
    handles = plot_quantities(axes, runs, quantities)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    finish(axes, title, unit, handles)
