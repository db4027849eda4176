#!/usr/bin/env python3
"""Benchmark of the loading of weight updates: direct placement against SGLang's own loader.

Starts two CPU servers for the same checkpoint, and updates both in turn. One server is started by
``megatron_dppo.engine.launch_server``, and places tensors directly. The other server is started by
SGLang's own command. Prints, for one verified update, the median processor seconds of each server's
processes and of the trainer. Without a checkpoint, the weights are 18,867 small random tensors with
the names of Qwen3-30B-A3B.

    python tools/bench_direct_loading.py [HF_CHECKPOINT] [--strategy tensor] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_weight_sync import ADMIN_KEY, Weights, agree_alone, opener, run_config

from megatron_dppo.config.schema import TrainConfig, WeightSyncConfig
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.spec import RunSpec, ServersSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.ports import free_port
from megatron_dppo.weights.strategies import STRATEGIES
from megatron_dppo.weights.transaction import WeightUpdater
from tests.tiny_models import save_tiny_model

SIZES: dict[str, Any] = {
    "layers": 48,
    "num_experts": 128,
    "hidden": 32,
    "moe_intermediate_size": 32,
}
COLUMNS = ("server, CPU s", "trainer, CPU s", "wall s")


class SglangServer(EngineProcess):
    """A server that SGLang's own command starts."""

    def __init__(self, config: TrainConfig, servers: ServersSpec, **options: Any) -> None:
        super().__init__(config, servers, **options)
        key = ["--admin-api-key", ADMIN_KEY]
        self._command = ["-m", "sglang.launch_server", "--config", str(self.options_path), *key]


LOADERS = {"direct placement": EngineProcess, "SGLang's loader": SglangServer}


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds that a process and its descendants have used."""
    process = psutil.Process(pid)
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        times = member.cpu_times()
        total += times.user + times.system
    return total


class Bench:
    """One server with its updates.

    Attributes:
        rows: the figures of each update after the first, in the order of COLUMNS.
    """

    def __init__(
        self,
        kind: type[EngineProcess],
        source: Weights,
        folder: Path,
        runner: AsyncRunner,
        log: Path,
        strategy: str,
    ) -> None:
        config = run_config(folder, source.dtype_name, {})
        self.rows: list[tuple[float, float, float]] = []
        self.server = kind(
            config,
            RunSpec.of_checked(config).servers,
            port=free_port("127.0.0.1"),
            log_path=log,
            seed=1,
            api_key=None,
            admin_api_key=ADMIN_KEY,
        )
        self.server.start()
        self.server.wait_healthy()
        settings: Any = {"strategy": strategy}
        self._updater = WeightUpdater(
            source,
            WeightSyncConfig(canary_every=0, **settings),
            agree_alone,
            opener(config),
            runner,
        )
        self._updater.attach([self.server.url])

    def update(self, version: int) -> None:
        """Send one verified update, and note its figures."""
        server_before = cpu_seconds(self.server.pid)
        trainer_before = time.process_time()
        start = time.perf_counter()
        report = self._updater.update(version)
        assert report.verified
        wall = time.perf_counter() - start
        trainer = time.process_time() - trainer_before
        server = cpu_seconds(self.server.pid) - server_before
        # The first update opens connections and computes the table of places.
        if version > 1:
            self.rows.append((server, trainer, wall))

    def close(self) -> None:
        """End the server."""
        self._updater.close(at_once=True)
        self.server.kill()


def bench(folder: Path, rounds: int, strategy: str) -> None:
    """Update both servers in turn, and print medians."""
    torch.set_num_threads(1)  # as in a run
    source = Weights(folder)
    benches: dict[str, Bench] = {}
    with tempfile.TemporaryDirectory() as scratch, AsyncRunner() as runner:
        try:
            loaders = dict(LOADERS)
            if strategy != "disk":
                # SGLang's own loader needs whole tensors.
                del loaders["SGLang's loader"]
            for number, (name, kind) in enumerate(loaders.items()):
                log = Path(scratch) / f"engine{number}.log"
                benches[name] = Bench(kind, source, folder, runner, log, strategy)
            for version in range(1, rounds + 2):
                for each in benches.values():
                    each.update(version)
        finally:
            for each in benches.values():
                each.close()
    tensors = sum(len(bucket.tensors) for bucket in source.plan(1 << 26))
    print(f"{tensors:,} tensors, {source.bytes / 1e6:.1f} MB, strategy {strategy}")
    print(f"{'':18}" + "".join(f"{column:>18}" for column in COLUMNS))
    for name, each in benches.items():
        medians = [statistics.median(column) for column in zip(*each.rows, strict=True)]
        print(f"{name:18}" + "".join(f"{value:18.3f}" for value in medians))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a Hugging Face folder")
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="tensor")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.checkpoint is not None:
        bench(options.checkpoint, options.rounds, options.strategy)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_tiny_model(folder, "qwen3_moe", dtype=torch.bfloat16, **SIZES)
        bench(checkpoint, options.rounds, options.strategy)


if __name__ == "__main__":
    main()
