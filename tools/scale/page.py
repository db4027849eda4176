"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmark_rows import Benchmark

from megatron_dppo.cluster.planner.devices import DEVICES
from tools.scale import published
from tools.scale.quantities import SECTIONS
from tools.scale.sizes import FULLEST, GPU, Size

HEAD = f"""# At the recipes' sizes

What a step takes at the size of each recipe (`examples/recipes`), on the nodes of eight
{DEVICES[GPU].name} that it is written for. Made by `python tools/scale_report.py --write`.

**Computed** rows come from the planner's formulas ([planner.md](../planner.md)). Responses have half of the longest
length, except in "{FULLEST}": every response reaches its limit, with Top-K 20. **Simulated** rows run the trainer's own
plan over drawn lengths. **Measured** rows are at the end, each with its command. The two recipes of the thinking model
have the sizes of the base model's recipes."""


PUBLISHED = """Runs of others, and the planner's figure for the same set-up (`tools/scale/published_runs.yaml`, on
H100); ratio: planner / published. Two of its shares of the peak and two of its decoding figures are set so that the
ratios of the runs that train by reinforcement learning lie around 1:

- dense layers reach 0.5 of the peak: the four runs of dense models, which mostly train or wait for it;
- experts reach 0.13 in training, and their weights 0.55 of the memory's rate in decoding: the runs of Qwen3-30B-A3B
  of NeMo-RL 0.6, of which one waits for training, one for generation and one for both in turn;
- each sequence adds 10 us to a decode step: dense and expert models together.

Pretraining recipes with experts reach more than twice as much: their experts have equal loads, kernels and dispatch are
tuned, and no step waits for a ragged batch. A user's first try reached what RL runs do. So `tflops` rows with ratios
below 1 are no error to be tuned away: a trainer that reaches the published figure is faster than its plan. Two rows are
far off, both of NeMo-RL 0.4 with expert servers of TP4 and trainers of TP2. It is not published which of the two is
slow. The figures of the recipes' servers of TP4 come from the planner alone until they are measured."""


def page(columns: Sequence[Size], benchmarks: Sequence[Benchmark]) -> str:
    """Return the page: the sections with computed figures first."""
    blocks = [HEAD]
    for heading, rows in SECTIONS.items():
        head = ["", *(size.name for size in columns), "how"]
        cells = [[row.quantity, *(row.of(size.plan) for size in columns), row.how] for row in rows]
        blocks += [f"## {heading}", table([head, ["---"] * len(head), *cells])]
    blocks += ["## Published runs", PUBLISHED, table(published.rows(published.published_runs()))]
    blocks += ["## Measured", *_measured(benchmarks)]
    return "\n\n".join(blocks) + "\n"


def _measured(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    yield (
        "On a machine without a GPU, through the real code at synthetic full sizes; other measurements: "
        "[benchmarks.md](benchmarks.md)."
    )
    if not benchmarks:
        yield "Nothing yet: no benchmark has written its rows into `docs/evidence/benchmarks/`."
    for found in benchmarks:
        rows = [
            [row.quantity, f"{row.value:.4g} {row.unit}".strip(), row.how] for row in found.rows
        ]
        yield f"**{found.benchmark}**, `{found.command}`, on {found.machine}:"
        yield table([["", "measured", "how"], ["---"] * 3, *rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` as a Markdown table."""
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in row)} |" for row in rows)
