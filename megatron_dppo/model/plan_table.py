"""The resharding proof of one layout as a table."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.layout import Layout, local_layers
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.proof import prove_rank_filled
from megatron_dppo.model.resharding import ReshardingReport, prove_resharding
from megatron_dppo.model.shape import ModelShape


def print_plan(
    console: Console, shape: ModelShape, layout: Layout, engine: EngineLayout, item_bytes: int
) -> None:
    """Prove, then print who holds and moves how much. Raises ProofError, LayoutError."""
    report = prove_resharding(shape, layout, engine, item_bytes)
    tensors = hf_tensors(shape)
    elements = sum(math.prod(dims) for dims in tensors.values())
    console.print(
        f"{shape.family}: {len(tensors):,} tensors, {elements:,} parameters, {_gb(report.model_bytes)} at "
        f"{item_bytes} bytes each"
    )
    console.print(_trainer_table(shape, layout, report, item_bytes))
    console.print(_engine_table(engine, report))
    least = sum(report.engine)
    console.print(
        "Proved: every element is provided by exactly one trainer rank and lands exactly once on every engine rank "
        "that holds it."
    )
    console.print(
        f"One update moves at least {_gb(least)} into the engine. Gathered on trainer rank 0 and broadcast: "
        f"{_gb(report.gathered)} to rank 0, then {_gb(report.broadcast)} to each engine rank."
    )


def _trainer_table(
    shape: ModelShape, layout: Layout, report: ReshardingReport, item_bytes: int
) -> Table:
    table = Table(
        title=f"Trainer: {layout.describe()}, {layout.world_size} ranks", title_justify="left"
    )
    for heading in (
        "stage",
        "ranks",
        "layers",
        "weights a rank",
        "provides a rank",
        "sends direct a rank",
    ):
        table.add_column(heading, justify="right")
    for stage in range(layout.pipeline):
        first = stage * layout.stage_ranks
        ranks = range(first, first + layout.stage_ranks)
        prove_rank_filled(shape, layout, first)
        resident = (
            sum(math.prod(p.shape) for p in local_parameters(shape, layout, first)) * item_bytes
        )
        chunks = (local_layers(shape, layout, stage, c) for c in range(layout.chunks))
        table.add_row(
            str(stage),
            f"{ranks[0]}-{ranks[-1]}",
            " ".join(f"{c[0]}-{c[-1]}" for c in chunks),
            _gb(resident),
            _range([report.holds[r] for r in ranks]),
            _range([report.direct[r] for r in ranks]),
        )
    return table


def _engine_table(engine: EngineLayout, report: ReshardingReport) -> Table:
    table = Table(title=f"Engine: {engine.describe()}", title_justify="left")
    for heading in ("rank", "receives at least", "receives by broadcast"):
        table.add_column(heading, justify="right")
    for rank, received in enumerate(report.engine):
        table.add_row(str(rank), _gb(received), _gb(report.broadcast))
    return table


def _range(values: list[int]) -> str:
    low, high = _gb(min(values)), _gb(max(values))
    return low if low == high else f"{low} to {high}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.3f} GB"
