"""Benchmark of policy statistics and masks on this machine, against other implementations.

    megatron-dppo bench-mask --tokens 256 --vocab 151936 --dtype bfloat16 --tp 2 --json mask.json

All implementations run in the same processes on the same logits, interleaved; reported are medians
and interquartile ranges. A mask's overhead is paired with the same update without a mask; the
mask's threshold is so high that it blocks nothing. The gain of row skipping is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.system.ports import free_port


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo bench-mask",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel processes")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the micro-batch")
    parser.add_argument("--vocab", type=int, default=151936, help="true vocabulary")
    parser.add_argument("--topk", type=int, default=20, help="K of the Top-K masks")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--masked-share", type=float, default=0.1, help="for row skipping")
    parser.add_argument("--compile", action="store_true", help="let peers use torch.compile")
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    parser.add_argument("--png", type=Path, help="write a chart here")
    parser.add_argument("--markdown", type=Path, help="write the tables here as Markdown")
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, read rank 0's measurements, print and write them; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    if options.rank_result is not None:
        from megatron_dppo.mask_benchmark.measure import measure

        result = measure(options)
        if int(os.environ["RANK"]) == 0:
            options.rank_result.write_text(json.dumps(result))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.json"
        codes = wait_for(start_ranks(words, options, result_path))
        if any(codes):
            print(f"ranks ended with exit codes {codes}", file=sys.stderr)
            return 1
        result = json.loads(result_path.read_text())
    from megatron_dppo.mask_benchmark import output

    output.show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.markdown:
        options.markdown.write_text(output.markdown(result))
    if options.png:
        output.draw(result, options.png)
    return 0


def wait_for(ranks: list[subprocess.Popen]) -> list[int]:
    """Wait for the ranks and return their exit codes; kill them if one fails or on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks):
            time.sleep(0.1)
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
    return [p.wait() for p in ranks]


def start_ranks(
    words: Sequence[str], options: argparse.Namespace, result: Path
) -> list[subprocess.Popen]:
    """Start one process for each tensor-parallel rank, on this machine."""
    environment = {
        "WORLD_SIZE": str(options.tp),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(options.threads),
        "TORCHDYNAMO_DISABLE": "0" if options.compile else "1",
    }
    command = [sys.executable, "-m", "megatron_dppo.mask_benchmark", *words]
    command += ["--rank-result", str(result)]
    return [
        subprocess.Popen(
            command, env={**os.environ, **environment, "RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(options.tp)
    ]


if __name__ == "__main__":
    sys.exit(main())
