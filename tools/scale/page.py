"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmark_rows import Benchmark

from megatron_dppo.planner.devices import DEVICES
from tools.scale.quantities import SECTIONS
from tools.scale.sizes import FULLEST, GPU, Size

HEAD = f"""# At the recipes' sizes

What a step takes at the size of each recipe ([examples/recipes](../examples/recipes)), on the nodes of eight
{DEVICES[GPU].name} that it is written for. Made by `python tools/scale_report.py --write`.

**Computed** rows come from the planner's formulas ([planner.md](planner.md)), with responses of half of the longest
length but in "{FULLEST}": every response at its limit, with Top-K 20. **Simulated** rows run the
trainer's own plan over drawn lengths. **Measured** rows are at the end, each with its command. The two recipes of the
thinking model are of the sizes of the base model's."""


def page(columns: Sequence[Size], benchmarks: Sequence[Benchmark]) -> str:
    """Every section, computed ones first."""
    blocks = [HEAD]
    for heading, rows in SECTIONS.items():
        head = ["", *(size.name for size in columns), "how"]
        cells = [[row.quantity, *(row.of(size.plan) for size in columns), row.how] for row in rows]
        blocks += [f"## {heading}", table([head, ["---"] * len(head), *cells])]
    blocks += ["## Measured", *_measured(benchmarks)]
    return "\n\n".join(blocks) + "\n"


def _measured(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    yield (
        "On a machine without a GPU, through the real code at synthetic full sizes; other measurements: "
        "[benchmarks.md](benchmarks.md)."
    )
    if not benchmarks:
        yield "Nothing yet: no benchmark has written its rows into `docs/benchmarks/`."
    for found in benchmarks:
        rows = [
            [row.quantity, f"{row.value:.4g} {row.unit}".strip(), row.how] for row in found.rows
        ]
        yield f"**{found.benchmark}**, `{found.command}`, on {found.machine}:"
        yield table([["", "measured", "how"], ["---"] * 3, *rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in row)} |" for row in rows)
