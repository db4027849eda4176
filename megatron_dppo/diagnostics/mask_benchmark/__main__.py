"""Measure the time of the policy statistics and masks on this machine, beside other implementations.

    megatron-dppo bench-mask --tokens 256 --vocab 151936 --dtype bfloat16 --tp 2 --json mask.json

All implementations run in the same processes on the same logits, interleaved. The command reports
medians and interquartile ranges. The overhead of a mask compares the time of an update with the mask
and the time of the update without a mask in the same repetition. The thresholds are so high that
the masks block nothing. The last row shows what an update saves if it skips rows of logits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.diagnostics.mask_benchmark import run_rank
from megatron_dppo.diagnostics.mask_benchmark.output import draw, markdown, show
from megatron_dppo.system.arguments import file_to_write, finite_number, positive_count
from megatron_dppo.system.ports import free_port


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo bench-mask",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tp", type=positive_count, default=1, help="tensor-parallel processes")
    parser.add_argument(
        "--tokens", type=positive_count, default=256, help="tokens of the micro-batch"
    )
    parser.add_argument("--vocab", type=positive_count, default=151936, help="true vocabulary")
    parser.add_argument("--topk", type=positive_count, default=20, help="K of the Top-K masks")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repetitions", type=positive_count, default=30)
    parser.add_argument(
        "--threads", type=positive_count, default=1, help="CPU threads of each process"
    )
    parser.add_argument(
        "--masked-share", type=finite_number(0, 1), default=0.1, help="share of rows to skip"
    )
    parser.add_argument(
        "--compile", action="store_true", help="let other implementations use torch.compile"
    )
    parser.add_argument("--json", type=file_to_write, help="write all measurements here")
    parser.add_argument("--png", type=file_to_write, help="write a chart here")
    parser.add_argument("--markdown", type=file_to_write, help="write the tables here as Markdown")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, read rank 0's measurements, print and write them; returns the exit code."""
    from torch.multiprocessing.spawn import ProcessException

    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.json"
        try:
            run_ranks(options, result_path)
        except ProcessException as error:
            print(f"a rank failed: {error}", file=sys.stderr)
            return 1
        result = json.loads(result_path.read_bytes())

    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(result))
    if options.png:
        draw(result, options.png)
    return 0


def run_ranks(options: argparse.Namespace, result: Path) -> None:
    """Run a process for each tensor-parallel rank on this machine; rank 0 writes the file ``result``.

    If a process fails, the other processes are ended, and torch's ProcessException is raised.
    """
    from torch import multiprocessing

    # Set the variables before ranks start: a rank's torch reads them when it is imported.
    os.environ |= {
        "WORLD_SIZE": str(options.tp),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(options.threads),
        "TORCHDYNAMO_DISABLE": "0" if options.compile else "1",
    }
    # At SIGTERM, raise SystemExit: when Python exits, it ends the ranks, because they are daemons.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    multiprocessing.spawn(run_rank, (options, result), options.tp, daemon=True)


if __name__ == "__main__":
    sys.exit(main())
