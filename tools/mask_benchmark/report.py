"""The measurements as console tables and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(result: dict[str, Any]) -> None:
    """Print both tables."""
    s, m = result["settings"], result["machine"]
    console = Console(width=200)
    console.print(
        f"{s['device']} · {m['processor']} · {m['threads']} thread(s) a rank · torch {m['torch']} · "
        f"TP{s['tp']} · T={s['tokens']} · V={s['vocab']} · {s['dtype']} · "
        f"{result['logits_mb']:.0f} MB of logits a rank · {s['repetitions']} interleaved repetitions"
    )
    console.print(_implementations(result["implementations"]))
    console.print(_masks(result["masks"]))


def _implementations(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="forward + backward, median ± IQR")
    for name in ("implementation", "version", "entropy", "Top-K", "fwd ms", "bwd ms", "CPU ms",
                 "x first", "% copy bw", "peak/logits", "all-reduces", "wire MB", "max|dlogp|",
                 "grad error"):  # fmt: skip
        table.add_column(name, justify="left" if name == "implementation" else "right")
    for r in rows:
        headers = f" + {r['header_all_reduces']} header" if r["header_all_reduces"] else ""
        table.add_row(
            r["name"], r["version"], "yes" if r["entropy"] else "", "yes" if r["topk"] else "",
            f"{r['forward_ms']:.1f} ± {r['forward_ms_iqr']:.1f}",
            f"{r['backward_ms']:.1f} ± {r['backward_ms_iqr']:.1f}",
            f"{r['cpu_ms']:.1f} ± {r['cpu_ms_iqr']:.1f}",
            f"{r['cpu_ms'] / rows[0]['cpu_ms']:.2f}",
            f"{r['floor_share_of_copy_bandwidth']:.0%}", f"{r['peak_extra_over_logits']:.2f}",
            f"{r['payload_all_reduces']}{headers}", f"{r['wire_mb']:.2f}",
            f"{r['max_log_prob_error']:.1e}", f"{r['relative_gradient_error']:.1e}",
        )  # fmt: skip
    table.caption = (
        "x first: CPU time in units of the first row. % copy bw: the floor (read; read and write in "
        "place) over the time, against a measured copy. peak: memory beyond the logits themselves."
    )
    return table


def _masks(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="statistics with entropy + loss + backward: what a mask adds, paired")
    for name in ("update", "ms", "overhead", "of it in the loss", "all-reduces", "wire MB"):
        table.add_column(name, justify="left" if name == "update" else "right")
    for r in rows:
        table.add_row(
            r["name"], f"{r['total_ms']:.1f}",
            f"{r['overhead']:+.2%} ± {r['overhead_iqr']:.2%}",
            f"{r['loss_overhead']:+.2%} ± {r['loss_overhead_iqr']:.2%}",
            f"{r['extra_all_reduces']:+d}", f"{r['extra_wire_mb']:+.2f}",
        )  # fmt: skip
    return table


def draw(result: dict[str, Any], path: Path) -> None:
    """Two panels: time of each implementation, and overhead of each mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, masks = result["implementations"][::-1], result["masks"][1:][::-1]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4), layout="constrained")
    names = [r["name"] for r in rows]
    left.barh(names, [r["forward_ms"] for r in rows], label="forward")
    starts = [r["forward_ms"] for r in rows]
    left.barh(names, [r["backward_ms"] for r in rows], left=starts, label="backward")
    left.set_xlabel("ms, median")
    left.legend()
    s = result["settings"]
    left.set_title(f"TP{s['tp']}, T={s['tokens']}, V={s['vocab']}, {s['dtype']}, {s['device']}")
    right.barh(
        [r["name"] for r in masks],
        [100 * r["overhead"] for r in masks],
        xerr=[50 * r["overhead_iqr"] for r in masks],
    )
    right.axvline(0, color="black", linewidth=0.8)
    right.set_xlabel("% over the update without a mask, median and IQR")
    right.set_title("what a mask adds")
    figure.savefig(path, dpi=130)
