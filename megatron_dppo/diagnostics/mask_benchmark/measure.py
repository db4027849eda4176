"""Run the benchmark on one rank: all implementations in turn on the same logits, then an update with each mask."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.diagnostics.mask_benchmark.contenders import prepare_megatron
from megatron_dppo.diagnostics.mask_benchmark.mask_overhead import mask_overheads
from megatron_dppo.diagnostics.mask_benchmark.rank_bench import RankBench
from megatron_dppo.trainer import platform


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the benchmark reports, on this rank."""
    platform.prepare()
    torch.set_num_threads(options.threads)
    device = "cuda" if options.device == "cuda" else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    prepare_megatron(options.tp)
    bench = RankBench(options, device)
    rows = bench.compare()
    settings: dict[str, Any] = {}
    for name, value in vars(options).items():
        settings[name] = str(value) if isinstance(value, Path) else value
    result = {
        "settings": settings,
        "machine": bench.machine(),
        "logits_mb": bench.logits.numel() * bench.logits.element_size() / 1e6,
        "implementations": rows,
        "masks": mask_overheads(bench),
    }
    dist.destroy_process_group()
    return result
