"""``megatron-dppo bench-mask``: what policy statistics and masks cost here, beside other implementations."""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any


def run_rank(rank: int, options: argparse.Namespace, result: Path) -> None:
    """Measure everything that the benchmark reports, as ``rank``. Rank 0 writes it into the file ``result``.

    All implementations run in turn on the same logits. An update with each mask follows.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    # The libraries that are measured are imported here, so that the process that starts the ranks does not load them.
    import torch
    import torch.distributed as dist

    from megatron_dppo.diagnostics.mask_benchmark.contenders import prepare_megatron
    from megatron_dppo.diagnostics.mask_benchmark.mask_overhead import mask_overheads
    from megatron_dppo.diagnostics.mask_benchmark.rank_bench import RankBench
    from megatron_dppo.trainer import platform

    platform.prepare()
    torch.set_num_threads(options.threads)
    backend = "gloo"
    if options.device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    prepare_megatron(options.tp)
    bench = RankBench(options, options.device)
    rows = bench.compare()
    settings: dict[str, Any] = {}
    for name, value in vars(options).items():
        settings[name] = str(value) if isinstance(value, Path) else value
    measurements = {
        "settings": settings,
        "machine": bench.machine(),
        "logits_mb": bench.logits.numel() * bench.logits.element_size() / 1e6,
        "implementations": rows,
        "masks": mask_overheads(bench),
    }
    dist.destroy_process_group()
    if rank == 0:
        result.write_text(json.dumps(measurements))
