"""Panels of the report: how well a run uses its machine."""

from __future__ import annotations

from matplotlib.axes import Axes

from megatron_dppo.metrics import names
from megatron_dppo.metrics.panels import (
    BLUE,
    VERMILION,
    Quantity,
    RunRecords,
    finish,
    plot_on_the_right,
    plot_quantities,
)
from megatron_dppo.metrics.records import series


def is_recorded(runs: list[RunRecords], *metrics: str) -> bool:
    """Whether any run has any of the metrics."""
    return any(series(run.records, metric)[0] for run in runs for metric in metrics)


def draw_arithmetic(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the model's FLOP/s of a rank: as a share of the GPU's peak where every run's is known, else in TFLOP/s."""
    known = all(is_recorded([run], names.MFU) for run in runs)
    share = Quantity("MFU", names.MFU, BLUE, scale=100)
    handles = plot_quantities(
        axes, runs, [share if known else Quantity("a rank", names.TFLOPS, BLUE)]
    )
    if handles:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    finish(
        axes,
        "Model arithmetic in training",
        "% of the GPU's bf16 peak" if known else "TFLOP/s",
        handles,
    )


def draw_memory(axes: Axes, runs: list[RunRecords]) -> None:
    """Draw the most memory that a rank took; right axis: the ranks' idle share."""
    handles = plot_quantities(axes, runs, [Quantity("fullest rank", names.PEAK_MEMORY, BLUE)])
    if handles:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    idle = Quantity("ranks idle (right axis)", names.IDLE_SHARE, VERMILION, "--", 100)
    handles += plot_on_the_right(axes, runs, idle, (0, 10), "% of FLOPs")
    finish(axes, "Peak memory and idle ranks", "GiB", handles)
