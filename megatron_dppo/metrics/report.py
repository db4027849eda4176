"""``report.png``: figures of one run, or a comparison of several, on one page.

megatron-dppo report runs/demo            # writes runs/demo/report.png
megatron-dppo report runs/a runs/b --output ab.png   # one line a run
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megatron_dppo.logging import fatal
from megatron_dppo.metrics import panels
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import REPORT_FILE, RecordsError, read_records, step_of
from megatron_dppo.metrics.summary import RunInfo
from megatron_dppo.system.files import atomic_file

PANELS = (
    panels.draw_reward,
    panels.draw_gap,
    panels.draw_masked,
    panels.draw_entropy,
    panels.draw_length,
    panels.draw_time,
)
USE_PANELS = (panels.draw_arithmetic, panels.draw_memory)
"""Of the machine's use: drawn where any run has recorded it."""
USE_METRICS = (names.TFLOPS, names.PEAK_MEMORY, names.IDLE_SHARE)
UPDATE_PANELS = (panels.draw_update_seconds, panels.draw_update_bytes)
"""Of weight updates: drawn where any run has recorded their seconds."""
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
    """Draw the run in ``directory`` into its ``report.png``; returns that path.

    One record is enough; a panel without data says "not recorded". Raises RecordsError if there is
    no metrics file or no record in it.
    """
    return write_comparison([directory], Path(directory) / REPORT_FILE)


def write_comparison(directories: Sequence[str | Path], output: str | Path) -> Path:
    """Draw several runs into one picture.

    Args:
        directories: of the runs, at most ``len(RUN_COLOURS)``.
        output: PNG file.

    Returns:
        ``output``.

    Raises:
        RecordsError: a run has no metrics file or no record.
        ValueError: more runs than colours.
    """
    if len(directories) > len(panels.RUN_COLOURS):
        raise ValueError(
            f"{len(directories)} runs in one picture, expected at most {len(panels.RUN_COLOURS)}: "
            f"so many colours can be told apart"
        )
    infos = [RunInfo.of_run(directory) for directory in directories]
    runs = []
    for directory, info, label in zip(directories, infos, _labels(directories, infos), strict=True):
        records = read_records(directory)
        if not records:
            raise RecordsError(f"{directory}: no step is recorded yet, so there is nothing to draw")
        runs.append(panels.RunRecords(label, records, info.dtype if info else "float32"))
    title = _title(directories, infos)
    with matplotlib.rc_context(STYLE):
        _save(_draw(runs, title), Path(output))
    return Path(output)


def _labels(directories: Sequence[str | Path], infos: Sequence[RunInfo | None]) -> list[str]:
    """Label of each run: the parts of RunInfo that differ; folder names if that is ambiguous."""
    folders = [Path(directory).resolve().name for directory in directories]
    parts = [info.parts for info in infos if info is not None]
    if len(parts) < len(infos):
        return folders
    differing = [i for i in range(len(parts[0])) if len({part[i] for part in parts}) > 1]
    labels = [", ".join(part[i] for i in differing) for part in parts]
    return labels if len(set(labels)) == len(labels) else folders


def _title(directories: Sequence[str | Path], infos: Sequence[RunInfo | None]) -> str:
    """The parts of RunInfo that all runs share; of one run without configuration its folder."""
    parts = [info.parts for info in infos if info is not None]
    if len(infos) == 1:
        return " | ".join(parts[0] if parts else (Path(directories[0]).resolve().name,))
    if len(parts) < len(infos):
        return f"{len(infos)} runs"
    common = [column[0] for column in zip(*parts, strict=True) if len(set(column)) == 1]
    return " | ".join([*common, f"{len(infos)} runs"])


def _draw(runs: list[panels.RunRecords], title: str) -> Figure:
    """The page: six panels, two more each of the machine's use and of weight updates; of several runs also their
    names below.
    """
    drawn = PANELS + (USE_PANELS if panels.is_recorded(runs, *USE_METRICS) else ())
    drawn += UPDATE_PANELS if panels.is_recorded(runs, names.UPDATE_SECONDS) else ()
    figure = Figure(figsize=(10.5, 11 * len(drawn) / len(PANELS)), dpi=130)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    steps = [step_of(record) for run in runs for record in run.records]
    margin = max(0.8, 0.02 * (max(steps) - min(steps)))
    for axes, draw in zip(figure.subplots(len(drawn) // 2, 2).flat, drawn, strict=True):
        draw(axes, runs)
        if axes.get_xlabel() == panels.STEP_AXIS:
            axes.set_xlim(min(steps) - margin, max(steps) + margin)
    if any(len(run.records) > panels.FEW_POINTS for run in runs):
        remark = "bold: mean of 5 steps" + (", thin: each step" if len(runs) == 1 else "")
        figure.supxlabel(remark, fontsize=panels.SMALL, color="#666666", x=0.99, ha="right")
    if len(runs) > 1:
        handles = [
            Line2D([], [], color=panels.RUN_COLOURS[i], linewidth=3, label=run.label)
            for i, run in enumerate(runs)
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(4, len(runs)), frameon=False
        )
    return figure


def _save(figure: Figure, output: Path) -> None:
    """Write the PNG and rename it, so that no reader sees an incomplete file."""
    with atomic_file(output) as file:
        FigureCanvasAgg(figure).print_png(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; exits with status 2 and a message if a run cannot be drawn."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo report", description="Draw a run, or compare several."
    )
    parser.add_argument("directories", nargs="+", metavar="DIR", help="folder of a run")
    parser.add_argument(
        "--output", type=Path, help="PNG file (one run: DIR/report.png; several: comparison.png)"
    )
    options = parser.parse_args(arguments)
    single = len(options.directories) == 1
    default = Path(options.directories[0]) / REPORT_FILE if single else Path("comparison.png")
    try:
        print(write_comparison(options.directories, options.output or default))
    except (ValueError, OSError) as error:
        fatal(str(error))


if __name__ == "__main__":
    main()
