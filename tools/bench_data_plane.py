#!/usr/bin/env python3
"""The cost of a step's data between the engine and the ranks, with synthetic responses of full size.

    python tools/bench_data_plane.py --responses 64 --json after.json --beside before.json

A process answers ``/generate`` as SGLang does; the leaders' client reads and checks the answers; all
ranks exchange them by the plan of a step. The code is the run's own; only the tokens are made up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmark_rows import Quantity, write_rows
from data_plane_benchmark.report import FORMULAS, figures, table
from data_plane_benchmark.synthetic import Size

from megatron_dppo.system.ports import free_port

TOOLS = Path(__file__).resolve().parent


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the longest response")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--topk", type=int, default=20)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--experts-per-token", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--data", type=int, default=2, help="replicas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--beside", type=Path, help="figures of another run, shown beside")
    parser.add_argument("--rows", type=Path, help="write all of it for tools/scale_report.py here")
    return parser.parse_args()


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, with the tools on Python's path and one thread for each process."""
    path = f"{TOOLS}{os.pathsep}{TOOLS.parent}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def run(size: Size) -> dict[str, float]:
    """Start the processes, wait for them, and return figures of their measurements."""
    module, argument = [sys.executable, "-m"], json.dumps(asdict(size))
    with tempfile.TemporaryDirectory() as folder:
        engine = subprocess.Popen(
            [*module, "data_plane_benchmark.engine_side", argument],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert engine.stdout is not None
            url = engine.stdout.readline().split()[1]
            ranks = start_ranks([*module, "data_plane_benchmark.rank", argument, url, folder], size)
            exit_codes = [rank.wait() for rank in ranks]
            if any(exit_codes):
                sys.exit("a rank failed")
            with urllib.request.urlopen(f"{url}/figures") as answer:
                engine_figures: dict[str, Any] = json.load(answer)
        finally:
            engine.kill()
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return figures(engine_figures, results)


def start_ranks(command: list[str], size: Size) -> list[subprocess.Popen[bytes]]:
    """Start a process for each rank."""
    world, port = str(size.layout.world_size), str(free_port())
    return [
        subprocess.Popen(
            command,
            env=environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            ),
        )
        for rank in range(size.layout.world_size)
    ]  # fmt: skip


def main() -> None:
    """Print the figures, and write them."""
    options = parse()
    # Each field of Size has an option of the same name.
    size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
    current_figures = run(size)
    runs = {"now": current_figures}
    if options.beside is not None:
        runs = {"before": json.loads(options.beside.read_text()), **runs}
    print(FORMULAS, "", table(runs), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(current_figures, indent=1) + "\n")
    if options.rows is not None:
        how = f"{size.responses} responses of up to {size.tokens} tokens, {size.layout.world_size} ranks here"
        quantities = []
        for when, run_figures in runs.items():
            for name, value in run_figures.items():
                quantities.append(Quantity(f"{name} ({when})", value, "", how))
        write_rows(options.rows, "data plane", quantities)


if __name__ == "__main__":
    main()
