#!/usr/bin/env python3
"""Benchmark of weight updates of a real SGLang server against a gloo broadcast of the same bytes.

Starts a CPU server for the checkpoint, then alternates: a whole weight update with verification, a
plain broadcast of one flat tensor of the same size to a process that copies it, and an update
without verification. The weights are in Megatron's layout (one rank), as in a trainer. Prints
medians by phase, the cost of the checksums, s/GB, and the metrics that a run records of an update.
With ``--lora-rank`` the trainer has adapters. Updates of merged weights (by the strategy) alternate
with updates of only the adapters. All updates are verified, without a canary.

    python tools/bench_weight_sync.py HF_CHECKPOINT [--strategy distributed] [--rounds 9]
        [--bucket-mib 64] [--network-gb-per-s 50] [--lora-rank 32 [--lora-modules all-linear]]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.checkpoint_conversion.hf_folder import SafetensorsReader
from megatron_dppo.config.schema import TrainConfig, WeightSyncConfig
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.ports import free_port
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import AdapterWeights, TrainerWeights
from megatron_dppo.weights.adapters import AdapterUpdater
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import OpenEngine
from megatron_dppo.weights.one_rank import OneRankWeights
from megatron_dppo.weights.strategies import STRATEGIES
from megatron_dppo.weights.transaction import UpdateReport, WeightUpdater

ADMIN_KEY = "bench"
TIMEOUT_S = 600.0


class Weights(OneRankWeights):
    """A checkpoint in memory, in the layout of a trainer with one rank."""

    def __init__(self, folder: Path) -> None:
        shape = load_model_shape(folder)
        with SafetensorsReader(folder) as reader:
            tensors = {name: reader.read(name) for name in hf_tensors(shape)}
        super().__init__(shape, tensors)


def run_config(folder: Path, dtype: str, lora: dict[str, Any]) -> TrainConfig:
    """A run that serves ``folder`` on a CPU. If ``lora`` is not empty, it trains adapters of the model."""
    return TrainConfig.model_validate(
        {
            "run": {"directory": str(folder), "steps": 1},
            "model": {"hf_checkpoint": str(folder), "dtype": dtype},
            "data": {"train": "none.jsonl"},
            "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 64},
            "training": {"prompts_per_mini_batch": 1, "micro_batch_tokens": 1024},
            "optimizer": {"lr": 1e-6},
            "engine": {"device": "cpu"},
            "lora": lora,
        }
    )


def start_server(config: TrainConfig, log: Path) -> EngineProcess:
    """Start a CPU server and wait until it is healthy."""
    port = free_port("127.0.0.1")
    server = EngineProcess(
        config,
        RunSpec.of_checked(config).servers,
        port=port,
        log_path=log,
        seed=1,
        api_key=None,
        admin_api_key=ADMIN_KEY,
    )
    server.start()
    server.wait_healthy()
    return server


def opener(config: TrainConfig) -> OpenEngine:
    """Return the function that opens the weight control of the server at a URL."""
    shape = config.model.read_shape()

    async def open_engine(url: str) -> EngineWeights:
        client = HttpClient(url, admin_api_key=ADMIN_KEY)
        return await EngineWeights.connect(client, shape, config.model.dtype, timeout_s=TIMEOUT_S)

    return open_engine


def agree_alone(error: Any) -> Any:
    """Return the first failure of all ranks, which is ``error``: there is one rank."""
    return error


def receive(port: int, size: int, rounds: int) -> None:
    """Receive the plain broadcasts, and copy each message as an engine does."""
    _join(port, rank=1)
    weights = torch.zeros(size, dtype=torch.uint8)
    message = torch.zeros(size, dtype=torch.uint8)
    for _ in range(rounds):
        dist.broadcast(message, src=0)
        weights.copy_(message)
        dist.barrier()


def _join(port: int, rank: int) -> None:
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)


def broadcast(message: Tensor) -> float:
    """Seconds of one plain broadcast, including the receiver's copy."""
    start = time.perf_counter()
    dist.broadcast(message, src=0)
    dist.barrier()
    return time.perf_counter() - start


def hash_seconds_per_gb(engine: EngineWeights, source: Weights) -> float:
    """Seconds per GB of the trainer's part of the checksums."""
    expected, seconds = engine.expected(), 0.0
    for gathered in source.gather(source.plan(source.bytes)):
        start = time.perf_counter()
        expected.add(gathered.tensors)
        seconds += time.perf_counter() - start
    return seconds / source.bytes * 1e9


def report(
    verified: list[UpdateReport], fast: list[UpdateReport], plain: list[float], hashing: float
) -> None:
    """Print medians. The first update and the first broadcast open connections, so they are not counted."""
    reference = statistics.median(plain[1:])
    low, _, high = statistics.quantiles(plain[1:])
    print(f"weights sent       {verified[-1].bytes / 1e6:10.2f} MB")
    print(
        f"plain broadcast    {reference * 1e3:10.2f} ms  (quartiles {low * 1e3:.0f}-{high * 1e3:.0f})"
    )
    for label, updates in (("without checksums", fast), ("with checksums", verified)):
        totals = [sum(u.seconds.values()) for u in updates[1:]]
        total = statistics.median(totals)
        paired = statistics.median(t / p for t, p in zip(totals, plain[1:], strict=True))
        print(f"{label:18} {total * 1e3:10.2f} ms, by phase:")
        for phase in updates[-1].seconds:
            median = statistics.median(u.seconds[phase] for u in updates[1:])
            print(f"  {phase:16} {median * 1e3:10.2f}")
        best = min(totals) / min(plain[1:])
        print(
            f"  x plain          {paired:10.2f}     (median of pairs; fastest/fastest {best:.2f})"
        )
    print(f"checksums, trainer {hashing:10.2f} s/GB")
    print("metrics of an update, median of those with checksums:")
    for name, value in median_metrics(verified[1:]).items():
        print(f"  {name:34} {value:14,.6g}")


def median_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Each metric that a run records of an update, its median over ``reports``."""
    rows = [report.metrics() for report in reports]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def bench(folder: Path, rounds: int, settings: dict[str, Any]) -> None:
    """Alternate updates and plain broadcasts, so that both run under the same load."""
    torch.set_num_threads(1)  # as in a run
    source = Weights(folder)
    with tempfile.TemporaryDirectory() as scratch, AsyncRunner() as runner:
        config = run_config(folder, source.dtype_name, {})
        server = start_server(config, Path(scratch) / "engine.log")
        open_engine = opener(config)
        port = free_port("127.0.0.1")
        arguments = [f"--receive={port},{source.bytes},{rounds}"]
        peer = subprocess.Popen([sys.executable, os.path.abspath(__file__), *arguments])
        try:
            _join(port, rank=0)
            verify_all = WeightSyncConfig(verify_every=1, canary_every=0, **settings)
            # This updater makes fewer than 2 * rounds updates, so it verifies none.
            verify_none = WeightSyncConfig(verify_every=2 * rounds, canary_every=0, **settings)
            verified = WeightUpdater(source, verify_all, agree_alone, open_engine, runner)
            unverified = WeightUpdater(source, verify_none, agree_alone, open_engine, runner)
            for updater in (verified, unverified):
                updater.attach([server.url])
            message = torch.zeros(source.bytes, dtype=torch.uint8)
            unverified.update(0)
            updates, fast, plain = [], [], []
            for version in range(rounds):
                updates.append(verified.update(version))
                plain.append(broadcast(message))
                fast.append(unverified.update(version))
            engine = runner.run(open_engine(server.url))
            report(updates, fast, plain, hash_seconds_per_gb(engine, source))
            runner.run(engine.close())
            for updater in (verified, unverified):
                updater.close()
        finally:
            peer.kill()
            server.kill()


def bench_adapters(
    folder: Path, rounds: int, lora: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Update one server with merged weights and with only the adapters, in turn; print medians of both."""
    config = run_config(folder, load_model_shape(folder).dtype, {**lora, "update": "adapters"})
    trainer = Trainer.read(config)
    with tempfile.TemporaryDirectory() as scratch, AsyncRunner() as runner:
        server = start_server(config, Path(scratch) / "engine.log")
        rest = (agree_alone, opener(config), runner)
        updaters = {
            "merged": WeightUpdater(
                TrainerWeights(trainer), WeightSyncConfig(canary_every=0, **settings), *rest
            ),
            "adapters": AdapterUpdater(
                AdapterWeights(trainer), WeightSyncConfig(canary_every=0, strategy="disk"), *rest
            ),
        }
        try:
            for updater in updaters.values():
                updater.attach([server.url])
            reports: dict[str, list[UpdateReport]] = {name: [] for name in updaters}
            for version in range(1, rounds + 2):
                for name, updater in updaters.items():
                    reports[name].append(updater.update(version))
            for name, reports_of_kind in reports.items():
                report_kind(name, reports_of_kind)
            for updater in updaters.values():
                updater.close()
        finally:
            server.kill()
    trainer.close()


def report_kind(name: str, updates: list[UpdateReport]) -> None:
    """Print bytes and times of one kind of update: of the first update, and the median of all later updates."""
    first, *others = updates
    total = statistics.median(report.update_s for report in others)
    stall = statistics.median(report.stall_s for report in others)
    phases = {
        phase: statistics.median(u.seconds[phase] for u in others) for phase in others[-1].seconds
    }
    print(
        f"{name:9} {others[-1].bytes / 1e6:9.2f} MB  {total * 1e3:8.1f} ms, engine held "
        f"{stall * 1e3:8.1f} ms (first update {first.update_s * 1e3:.0f} ms): "
        + ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in phases.items())
    )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a Hugging Face folder")
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="distributed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument(
        "--network-gb-per-s", type=float, help="GB/s into a node, for the bound in seconds"
    )
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--lora-modules", nargs="+", default=["all-linear"])
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(*map(int, options.receive.split(",")))
        return
    if options.checkpoint is None:
        parser.error("checkpoint is missing: expected a Hugging Face folder")
    settings = {
        "strategy": options.strategy,
        "bucket_mib": options.bucket_mib,
        "network_gb_per_s": options.network_gb_per_s,
    }
    if options.lora_rank:
        lora = {"rank": options.lora_rank, "target_modules": options.lora_modules}
        bench_adapters(options.checkpoint, options.rounds, lora, settings)
        return
    bench(options.checkpoint, options.rounds, settings)


if __name__ == "__main__":
    main()
