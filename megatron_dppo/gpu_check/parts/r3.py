"""R3: the trainer routes as the server recorded."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dppo.gpu_check.part import Row, Site
from megatron_dppo.gpu_check.tiny_runs import gap_row, records_of, tiny_run, updates_row
from megatron_dppo.metrics import names
from megatron_dppo.metrics.normal_ranges import BY_METRIC
from megatron_dppo.metrics.records import Record

SHOWS = "router replay: what the server recorded is what the trainer routes by"
LIMIT_S = 500.0


def run(site: Site) -> Iterator[Row]:
    """Two steps in bfloat16 with recorded routing; what the first tells, and the updates of both."""
    run = tiny_run(site, "run", "bfloat16", ["rollout.router_replay=true", "run.steps=2"])
    records = records_of(run)
    yield from routing_rows(records[1])
    yield gap_row(records[1], "bfloat16")
    yield updates_row("weight updates", records)


def routing_rows(record: Record) -> Iterator[Row]:
    """Recorded for every token, and as the trainer's own routers mostly choose."""
    lacking = record.get(names.ROUTING_UNRECORDED)
    yield Row("tokens without recorded routing", _percent(lacking), "0%", lacking == 0)
    agreement, low = (
        record.get(names.ROUTING_AGREEMENT_FIRST),
        BY_METRIC[names.ROUTING_AGREEMENT].low,
    )
    holds = agreement is not None and agreement >= low
    yield Row("natural routing as the server's", _percent(agreement), f"at least {low:.0%}", holds)


def _percent(share: float | None) -> str:
    return "not recorded" if share is None else f"{share:.2%}"
