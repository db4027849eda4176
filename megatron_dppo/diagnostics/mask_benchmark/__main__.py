"""Measure the time of the policy statistics and masks on this machine, beside other implementations.

    megatron-dppo bench-mask --tokens 256 --vocab 151936 --dtype bfloat16 --tp 2 --json mask.json

All implementations run in the same processes on the same logits, interleaved; reported are medians
and interquartile ranges. A mask's overhead is paired with the same update without a mask; the
mask's threshold is so high that it blocks nothing. The gain of row skipping is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from megatron_dppo.diagnostics.pages import SummaryTable
from megatron_dppo.system.network import free_port


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo bench-mask",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel processes")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the micro-batch")
    parser.add_argument("--vocab", type=int, default=151936, help="true vocabulary")
    parser.add_argument("--topk", type=int, default=20, help="K of the Top-K masks")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--masked-share", type=float, default=0.1, help="for row skipping")
    parser.add_argument("--compile", action="store_true", help="let peers use torch.compile")
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    parser.add_argument("--png", type=Path, help="write a chart here")
    parser.add_argument("--markdown", type=Path, help="write the tables here as Markdown")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, read rank 0's measurements, print and write them; returns the exit code."""
    from torch.multiprocessing.spawn import ProcessException

    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.json"
        try:
            run_ranks(options, result_path)
        except ProcessException as error:
            print(f"a rank failed: {error}", file=sys.stderr)
            return 1
        result = json.loads(result_path.read_text())

    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(result))
    if options.png:
        draw(result, options.png)
    return 0


def run_ranks(options: argparse.Namespace, result: Path) -> None:
    """A process for each tensor-parallel rank, on this machine; rank 0 writes ``result``. Raises torch's
    ProcessException where one fails, which ends the others."""
    from torch import multiprocessing

    # Set the variables before ranks start: torch reads them when it is imported.
    os.environ |= {
        "WORLD_SIZE": str(options.tp),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(options.threads),
        "TORCHDYNAMO_DISABLE": "0" if options.compile else "1",
    }
    # Daemons end with this process, which by itself would wait for them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    multiprocessing.spawn(_rank, (options, result), options.tp, daemon=True)


def _rank(rank: int, options: argparse.Namespace, result: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from megatron_dppo.diagnostics.mask_benchmark.measure import measure

    measured = measure(options)
    if rank == 0:
        result.write_text(json.dumps(measured))


# Output of the measurements: console tables, Markdown and a chart.

LEGEND = (
    "x first: time (on a CPU: of all threads) in units of the first row. % copy: the floor (read; read and "
    "write in place) over the time, against a measured copy. peak: memory beyond the logits, in units of them. "
    "all-reduces: of payloads, + of a header of integers."
)


def setting(result: dict[str, Any]) -> str:
    """One line about the machine and the problem size."""
    s, m = result["settings"], result["machine"]
    return (
        f"{m['processor']} ({s['device']}, {m['vector_unit']}), {m['threads']} thread(s) a rank, "
        f"torch {m['torch']}: TP{s['tp']}, T={s['tokens']}, V={s['vocab']}, {s['dtype']}, "
        f"{result['logits_mb']:.0f} MB of logits a rank, {s['repetitions']} interleaved repetitions"
    )


def sheets(result: dict[str, Any]) -> list[SummaryTable]:
    """The tables of implementations and of masks."""
    on_cpu = result["settings"]["device"] == "cpu"
    return [
        _implementations(result["implementations"], on_cpu),
        _masks(result["masks"], "CPU time" if on_cpu else "time"),
    ]


def cost_ms(row: dict[str, Any], on_cpu: bool) -> float:
    """Return the time to compare implementations by: CPU time of all threads, or on a GPU wall-clock time."""
    return row["cpu_ms"] if on_cpu else row["forward_ms"] + row["backward_ms"]


def _implementations(rows: list[dict[str, Any]], on_cpu: bool) -> SummaryTable:
    columns = ("implementation", "version", "entropy", "Top-K", "fwd ms", "bwd ms", "CPU ms",
               "x first", "% copy", "peak", "all-reduces", "wire MB", "max abs dlogp",
               "grad error")  # fmt: skip
    lines = []
    for r in rows:
        header = f" + {r['header_all_reduces']}" if r["header_all_reduces"] else ""
        lines.append((
            r["name"], r["version"], "yes" if r["entropy"] else "", "yes" if r["topk"] else "",
            f"{r['forward_ms']:.1f} ± {r['forward_ms_iqr']:.1f}",
            f"{r['backward_ms']:.1f} ± {r['backward_ms_iqr']:.1f}",
            f"{r['cpu_ms']:.1f} ± {r['cpu_ms_iqr']:.1f}",
            f"{cost_ms(r, on_cpu) / cost_ms(rows[0], on_cpu):.2f}",
            f"{r['floor_share_of_copy_bandwidth']:.0%}", f"{r['peak_extra_over_logits']:.2f}",
            f"{r['payload_all_reduces']}{header}", f"{r['wire_mb']:.2f}",
            f"{r['max_log_prob_error']:.1e}", f"{r['relative_gradient_error']:.1e}",
        ))  # fmt: skip
    return SummaryTable("Forward and backward, median ± interquartile range", columns, lines)


def _masks(rows: list[dict[str, Any]], unit: str) -> SummaryTable:
    columns = ("update", "ms", "overhead", "of it in the loss", "all-reduces", "wire MB")
    lines = [
        (
            r["name"], f"{r['total_ms']:.1f}",
            f"{r['overhead']:+.2%} ± {r['overhead_iqr']:.2%}",
            f"{r['loss_overhead']:+.2%} ± {r['loss_overhead_iqr']:.2%}",
            f"{r['extra_all_reduces']:+d}", f"{r['extra_wire_mb']:+.2f}",
        )
        for r in rows
    ]  # fmt: skip
    title = f"Statistics with entropy, loss and backward: what a mask adds, paired ({unit})"
    return SummaryTable(title, columns, lines)


def show(result: dict[str, Any]) -> None:
    """Print both tables."""
    console = Console(width=200)
    console.print(setting(result))
    for sheet in sheets(result):
        name, *figures = sheet.columns
        table = Table(name, *(Column(f, justify="right") for f in figures), title=sheet.title)
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    console.print(LEGEND)


def markdown(result: dict[str, Any]) -> str:
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

    rows, masks = result["implementations"][::-1], result["masks"][1:][::-1]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4), layout="constrained")
    names = [r["name"] for r in rows]
    starts = [r["forward_ms"] for r in rows]
    left.barh(names, starts, label="forward")
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


if __name__ == "__main__":
    sys.exit(main())
