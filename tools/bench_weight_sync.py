#!/usr/bin/env python3
"""Time verified weight updates of a real SGLang server beside a plain gloo broadcast of the bytes.

Starts a CPU server for the checkpoint, then in turn pushes the weights through the whole
transaction and broadcasts one flat tensor of the same size to a process that copies it. Prints
medians by phase, and what the checksums cost for each GB.

    python tools/bench_weight_sync.py HF_CHECKPOINT [--rounds 7] [--bucket-mib 512]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.checkpoint_conversion.families import load_model_shape
from megatron_dppo.checkpoint_conversion.hf_io import SafetensorsReader
from megatron_dppo.checkpoint_conversion.mapping import hf_tensors
from megatron_dppo.config.schema import TrainConfig, WeightSyncConfig
from megatron_dppo.rollout.engine_weights import EngineWeights
from megatron_dppo.rollout.server import EngineProcess, free_port
from megatron_dppo.weight_sync.base import Bucket, UpdateReport
from megatron_dppo.weight_sync.distributed import DistributedTransport
from megatron_dppo.weight_sync.update import WeightUpdater

ADMIN_KEY = "bench"
TIMEOUT_S = 600.0


class Checkpoint:
    """A checkpoint's weights in memory, as the trainer hands them out."""

    def __init__(self, folder: Path) -> None:
        self.shape = load_model_shape(folder)
        with SafetensorsReader(folder) as reader:
            self.weights = {
                name: reader.read(name, 0, 0, size[0])
                for name, size in hf_tensors(self.shape).items()
            }
        self.bytes = sum(t.nbytes for t in self.weights.values())

    def hf_buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Buckets of at most ``bucket_bytes``, in model order."""
        bucket: list[tuple[str, Tensor]] = []
        held = 0
        for name, tensor in self.weights.items():
            if bucket and held + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append((name, tensor))
            held += tensor.nbytes
        yield bucket


def start_server(folder: Path, dtype: str, log: Path) -> EngineProcess:
    """A healthy CPU server of ``folder``."""
    config = TrainConfig.model_validate(
        {
            "run": {"directory": str(log.parent), "steps": 1},
            "model": {"hf_checkpoint": str(folder), "dtype": dtype},
            "data": {"train": "none.jsonl"},
            "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 64},
            "training": {"prompts_per_mini_batch": 1, "micro_batch_tokens": 1024},
            "optimizer": {"lr": 1e-6},
            "engine": {"device": "cpu"},
        }
    )
    port = free_port("127.0.0.1")
    server = EngineProcess(
        config, port=port, log_path=log, seed=1, api_key=None, admin_api_key=ADMIN_KEY
    )
    server.start()
    server.wait_healthy()
    return server


def receive(port: int, size: int, rounds: int) -> None:
    """The plain broadcast's other side: take each message and copy it, as an engine must."""
    _join(port, rank=1)
    weights, message = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    for _ in range(rounds):
        dist.broadcast(message, src=0)
        weights.copy_(message)
        dist.barrier()


def _join(port: int, rank: int) -> None:
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)


def broadcast(message: Tensor) -> float:
    """Seconds of one plain broadcast, the receiver's copy included."""
    start = time.perf_counter()
    dist.broadcast(message, src=0)
    dist.barrier()
    return time.perf_counter() - start


def hash_seconds_per_gb(engine: EngineWeights, source: Checkpoint) -> float:
    """Of the trainer's half of the checksums."""
    expected = engine.expected()
    start = time.perf_counter()
    expected.add(source.weights.items())
    return (time.perf_counter() - start) / source.bytes * 1e9


def report(
    updates: list[UpdateReport], fast: list[UpdateReport], plain: list[float], hashing: float
) -> None:
    """Print medians; the first update and broadcast, which open connections, don't count."""
    reference = statistics.median(plain[1:])
    print(f"weights sent       {updates[-1].bytes / 1e6:10.2f} MB")
    print(f"plain broadcast    {reference * 1e3:10.2f} ms")
    for what, kind in (("without checksums", fast), ("with checksums", updates)):
        total = statistics.median(sum(u.seconds.values()) for u in kind[1:])
        print(f"{what:18} {total * 1e3:10.2f} ms  ({total / reference:.2f} x plain), by phase:")
        for phase in kind[-1].seconds:
            median = statistics.median(u.seconds[phase] for u in kind[1:])
            print(f"  {phase:16} {median * 1e3:10.2f}")
    print(f"checksums, trainer {hashing:10.2f} s/GB")


def bench(folder: Path, rounds: int, bucket_mib: int) -> None:
    """Alternate updates and plain broadcasts, so that both meet the same machine."""
    source = Checkpoint(folder)
    dtype = str(next(iter(source.weights.values())).dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as scratch:
        server = start_server(folder, dtype, Path(scratch) / "engine.log")
        port = free_port("127.0.0.1")
        arguments = [f"--receive={port},{source.bytes},{rounds}"]
        peer = subprocess.Popen([sys.executable, os.path.abspath(__file__), *arguments])
        try:
            _join(port, rank=0)
            engine = EngineWeights(
                server.url, source.shape, dtype, admin_api_key=ADMIN_KEY, timeout_s=TIMEOUT_S
            )
            transport = DistributedTransport(engine, timeout_s=TIMEOUT_S)
            verified, unverified = (
                WeightUpdater(
                    source,
                    transport,
                    WeightSyncConfig(bucket_mib=bucket_mib, verify_every=every),
                    lambda error: error,
                )
                for every in (1, 2 * rounds)
            )
            message = torch.cat([t.reshape(-1).view(torch.uint8) for t in source.weights.values()])
            unverified.update(0)
            updates, fast, plain = [], [], []
            for version in range(rounds):
                updates.append(verified.update(version))
                fast.append(unverified.update(version))
                plain.append(broadcast(message))
            report(updates, fast, plain, hash_seconds_per_gb(engine, source))
            transport.close()
        finally:
            peer.kill()
            server.kill()


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(*map(int, options.receive.split(",")))
        return
    if options.checkpoint is None:
        parser.error("which checkpoint?")
    bench(options.checkpoint, options.rounds, options.bucket_mib)


if __name__ == "__main__":
    main()
