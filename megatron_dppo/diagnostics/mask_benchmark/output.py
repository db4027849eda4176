"""Output of the measurements: console tables, Markdown and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_dppo.diagnostics.pages import SummaryTable

LEGEND = (
    "x first: time of the row / time of the first row (on a CPU: of all threads). % copy: (least traffic / time) / "
    "rate of a measured copy. For the least traffic, the forward pass reads the logits once, and the backward pass "
    "reads and overwrites the logits once. peak: memory beyond the logits / memory of the logits. all-reduces: number "
    "with floating-point numbers + number with integers. overhead: (time with the mask - time without) / time without."
)


def setting(result: dict[str, Any]) -> str:
    """Return a line about the machine and the sizes of the benchmark."""
    s = result["settings"]
    m = result["machine"]
    return (
        f"{m['processor']} ({s['device']}, {m['vector_unit']}), {m['threads']} thread(s) a rank, "
        f"torch {m['torch']}: TP{s['tp']}, T={s['tokens']}, V={s['vocab']}, {s['dtype']}, "
        f"{result['logits_mb']:.0f} MB of logits a rank, {s['repetitions']} interleaved repetitions"
    )


def sheets(result: dict[str, Any]) -> list[SummaryTable]:
    """Return the table of implementations and the table of masks."""
    on_cpu = result["settings"]["device"] == "cpu"
    return [
        _implementations(result["implementations"], on_cpu),
        _masks(result["masks"], "CPU time" if on_cpu else "time"),
    ]


def cost_ms(row: dict[str, Any], on_cpu: bool) -> float:
    """Return the time that compares implementations: on a CPU the time of all threads, on a GPU wall-clock time."""
    if on_cpu:
        return row["cpu_ms"]
    return row["forward_ms"] + row["backward_ms"]


def _implementations(rows: list[dict[str, Any]], on_cpu: bool) -> SummaryTable:
    columns = (
        "implementation",
        "version",
        "entropy",
        "Top-K",
        "fwd ms",
        "bwd ms",
        "CPU ms",
        "x first",
        "% copy",
        "peak",
        "all-reduces",
        "wire MB",
        "max abs dlogp",
        "grad error",
    )
    lines = []
    for r in rows:
        header = ""
        if r["header_all_reduces"]:
            header = f" + {r['header_all_reduces']}"
        lines.append(
            (
                r["name"],
                r["version"],
                "yes" if r["entropy"] else "",
                "yes" if r["topk"] else "",
                f"{r['forward_ms']:.1f} ± {r['forward_ms_iqr']:.1f}",
                f"{r['backward_ms']:.1f} ± {r['backward_ms_iqr']:.1f}",
                f"{r['cpu_ms']:.1f} ± {r['cpu_ms_iqr']:.1f}",
                f"{cost_ms(r, on_cpu) / cost_ms(rows[0], on_cpu):.2f}",
                f"{r['floor_share_of_copy_bandwidth']:.0%}",
                f"{r['peak_extra_over_logits']:.2f}",
                f"{r['payload_all_reduces']}{header}",
                f"{r['wire_mb']:.2f}",
                f"{r['max_log_prob_error']:.1e}",
                f"{r['relative_gradient_error']:.1e}",
            )
        )
    return SummaryTable("Forward and backward, median ± interquartile range", columns, lines)


def _masks(rows: list[dict[str, Any]], unit: str) -> SummaryTable:
    columns = ("update", "ms", "overhead", "overhead in the loss", "all-reduces", "wire MB")
    lines = [
        (
            r["name"],
            f"{r['total_ms']:.1f}",
            f"{r['overhead']:+.2%} ± {r['overhead_iqr']:.2%}",
            f"{r['loss_overhead']:+.2%} ± {r['loss_overhead_iqr']:.2%}",
            f"{r['extra_all_reduces']:+d}",
            f"{r['extra_wire_mb']:+.2f}",
        )
        for r in rows
    ]
    title = f"Statistics with entropy, loss and backward: what a mask adds, repetition by repetition ({unit})"
    return SummaryTable(title, columns, lines)


def show(result: dict[str, Any]) -> None:
    """Print both tables."""
    console = Console(width=200)
    console.print(setting(result))
    for sheet in sheets(result):
        sheet.show(console)
    console.print(LEGEND)


def markdown(result: dict[str, Any]) -> str:
    """Return both tables in Markdown."""
    blocks = [setting(result)]
    for sheet in sheets(result):
        rule = ["---", *["---:"] * (len(sheet.columns) - 1)]
        lines = [sheet.columns, rule, *sheet.rows]
        blocks += [f"{sheet.title}:", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(blocks) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw two panels: time of each implementation, overhead of each mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # ``barh`` draws the first row at the bottom, so reverse the rows.
    rows = result["implementations"][::-1]
    # The first row is the update without a mask.
    masks = result["masks"][1:][::-1]
    figure, (left_axes, right_axes) = pyplot.subplots(1, 2, figsize=(13, 4), layout="constrained")
    names = [r["name"] for r in rows]
    starts = [r["forward_ms"] for r in rows]
    left_axes.barh(names, starts, label="forward")
    left_axes.barh(names, [r["backward_ms"] for r in rows], left=starts, label="backward")
    left_axes.set_xlabel("ms, median")
    left_axes.legend()
    s = result["settings"]
    left_axes.set_title(
        f"TP{s['tp']}, T={s['tokens']}, V={s['vocab']}, {s['dtype']}, {s['device']}"
    )
    # In percent. The error bar extends half of the interquartile range to each side.
    right_axes.barh(
        [r["name"] for r in masks],
        [100 * r["overhead"] for r in masks],
        xerr=[100 * r["overhead_iqr"] / 2 for r in masks],
    )
    right_axes.axvline(0, color="black", linewidth=0.8)
    right_axes.set_xlabel("% over the update without a mask, median and IQR")
    right_axes.set_title("what a mask adds")
    figure.savefig(path, dpi=130)
