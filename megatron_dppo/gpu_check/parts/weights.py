"""Weight updates by every strategy into a real server, verified tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dppo.gpu_check.part import Row, Site
from megatron_dppo.gpu_check.tiny_runs import records_of, tiny_run, updates_row
from megatron_dppo.metrics.normal_ranges import Dtype

SHOWS = "weight updates by broadcast, shared memory and disk, verified tensor by tensor"
LIMIT_S = 900.0
LABELS = {
    "distributed": ("broadcast over gloo", "broadcast over NCCL"),
    "tensor": ("shared host memory", "CUDA IPC"),
    "disk": ("disk", "disk"),
}
"""By strategy: without a GPU, and with."""


def run(site: Site) -> Iterator[Row]:
    """A run of one step by each strategy: two updates, the first into a server that has just started."""
    for strategy, labels in LABELS.items():
        label = labels[site.gpus > 0]
        if strategy == "distributed" and site.gpus == 1:
            yield Row(label, "not here: one GPU only, which NCCL takes once")
            continue
        dtype: Dtype = "bfloat16" if site.gpus else "float32"
        run = tiny_run(site, strategy, dtype, [f"weight_sync.strategy={strategy}"])
        yield updates_row(label, records_of(run))
