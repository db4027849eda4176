"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmark_rows import Benchmark

from megatron_dppo.cluster.planner.devices import DEVICES
from tools.scale import published
from tools.scale.quantities import SECTIONS
from tools.scale.sizes import FULLEST, GPU, Size

HEAD = f"""# At the recipes' sizes

What does a step take at the size of each recipe (`examples/recipes`), on the nodes of eight {DEVICES[GPU].name} that it
is written for? `python tools/scale_report.py --write` makes this page.

Figures are computed by the planner's formulas ([planner.md](../planner.md)), if nothing else is said. Responses have
half of the longest length, except in "{FULLEST}": every response reaches its limit, with Top-K 20. The two recipes of
the thinking model have the sizes of the base model's recipes."""


PUBLISHED = """Runs of others on H100, and the planner's figure for the same set-up; ratio: planner / published. What a
source leaves open is assumed in `tools/scale/published_runs.yaml`. The planner's shares of the peak are set so that
the runs that train by reinforcement learning have ratios around 1:

- dense layers reach 0.5 of the peak: the four runs of dense models;
- experts reach 0.13 in training, and their weights 0.55 of the memory's rate in decoding: Qwen3-30B-A3B in NeMo-RL 0.6;
- each sequence adds 10 us to a decode step: dense and expert models together.

Pretraining recipes with experts reach more than twice as much, because their experts have equal loads and no step waits
for a ragged batch. A trainer that reaches the published `tflops` is therefore faster than its plan. Two rows are far
off, both of NeMo-RL 0.4 with expert servers of TP4 and trainers of TP2; it is not published which of the two is slow.
The figures of the recipes' servers of TP4 come from the planner alone until they are measured."""


def page(columns: Sequence[Size], benchmarks: Sequence[Benchmark]) -> str:
    """Return the page: the sections with computed figures first."""
    head = ["", *(size.name for size in columns), "how"]
    computed = [head, ["---"] * len(head)]
    for heading, rows in SECTIONS.items():
        computed.append([f"**{heading}**", *[""] * (len(head) - 1)])
        for row in rows:
            computed.append([row.quantity, *(row.of(size.plan) for size in columns), row.how])
    blocks = [HEAD, table(computed)]
    blocks += ["## Published runs", PUBLISHED, table(published.rows(published.published_runs()))]
    blocks += ["## Measured", *_measured(benchmarks)]
    return "\n\n".join(blocks) + "\n"


def _measured(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    yield (
        "On a machine without a GPU, through the real code at synthetic full sizes; [benchmarks.md](benchmarks.md) "
        "explains the figures."
    )
    if not benchmarks:
        yield "Nothing yet: no benchmark has written its rows into `docs/evidence/benchmarks/`."
    for found in benchmarks:
        yield f"**{found.benchmark}**, `{found.command}`, on {found.machine}:"
        yield _table_of(found)


def _table_of(benchmark: Benchmark) -> str:
    """Return a row for each way of measuring ("how"), or for each quantity if all were measured in one way."""
    values: dict[str, dict[str, str]] = {}
    for row in benchmark.rows:
        values.setdefault(row.how, {})[row.quantity] = f"{row.value:.4g} {row.unit}".strip()
    if len(values) == 1:
        ((how, value_by_quantity),) = values.items()
        return table([["", how], ["---"] * 2, *map(list, value_by_quantity.items())])
    quantities = list(dict.fromkeys(row.quantity for row in benchmark.rows))
    rows = [[how, *(cells.get(q, "") for q in quantities)] for how, cells in values.items()]
    return table([["", *quantities], ["---"] * (1 + len(quantities)), *rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` as a Markdown table."""
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in row)} |" for row in rows)
