#!/usr/bin/env python3
"""Benchmark of checkpoint conversion: time and peak memory, against a plain copy of the same bytes.

Makes a Hugging Face checkpoint of random bytes with a few layers of a real model, then converts it to
torch_dist, verifies it and converts it back. Each phase is compared with a plain copy of the same bytes
made immediately before it, because on a virtual machine the cost of fresh memory drifts more than the measured
difference. Each phase runs in its own process, starts with the files' pages dropped from the cache and ends with its
output synced to the disk. Outputs are removed when no later phase reads them.

    python tools/bench_convert.py --model examples/model_configs/qwen3-30b-a3b --layers 1 --folder /tmp/bench
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_dppo.checkpoint_conversion.certificate import TORCH_DTYPES
from megatron_dppo.checkpoint_conversion.hf_folder import write_hf_checkpoint
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.system.files import sync_folder

COPY_BYTES = 256 << 10
"""Buffer of the plain copy: the fastest of 64 KiB to 32 MiB on the machine of docs/evidence/benchmarks.md."""


def make(config: Path, layers: int, folder: Path) -> None:
    """Write a checkpoint of random bytes with the shape of ``config`` and ``layers`` layers."""
    facts = json.loads((config / "config.json").read_text()) | {"num_hidden_layers": layers}
    side = folder.parent / "side"
    side.mkdir()
    (side / "config.json").write_text(json.dumps(facts))
    shape = load_model_shape(side)
    dtype = TORCH_DTYPES[shape.dtype]
    generator = torch.Generator().manual_seed(0)
    stream = (
        (name, torch.randint(0, 2**15, dims, dtype=torch.int16, generator=generator).view(dtype))
        for name, dims in hf_tensors(shape).items()
    )
    write_hf_checkpoint(folder, shape, dtype, stream, side_files_from=side)


def copy(root: Path) -> None:
    """Copy the checkpoint's files through a buffer and sync them to the disk."""
    (root / "copy").mkdir()
    for path in sorted((root / "hf").iterdir()):
        with open(path, "rb") as source, open(root / "copy" / path.name, "wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
    sync_folder(root / "copy")


COPY = "plain copy"
CONVERTED = "m"
"""The folder of the converted checkpoint."""


def convert(root: Path) -> None:
    """Convert the checkpoint to torch_dist."""
    hf_to_megatron(root / "hf", root / CONVERTED)


def verify_converted(root: Path) -> None:
    """Compare the converted checkpoint with the original."""
    verify(root / "hf", root / CONVERTED)


def convert_back(root: Path) -> None:
    """Convert the converted checkpoint back."""
    megatron_to_hf(root / CONVERTED, root / "back")


PHASES: dict[str, tuple[Callable[[Path], object], str]] = {
    COPY: (copy, "copy"),
    "hf-to-megatron": (convert, CONVERTED),
    "verify": (verify_converted, ""),
    "megatron-to-hf": (convert_back, "back"),
}
"""Name of the phase -> (function, the folder that the function writes, or empty text)."""


def run_phase(name: str, root: Path) -> None:
    """Run one phase in this process; print wall seconds, CPU seconds and peak memory as JSON."""
    torch.set_num_threads(1)
    before = peak_mib()
    start, cpu_start = time.monotonic(), time.process_time()
    PHASES[name][0](root)
    facts = {
        "seconds": time.monotonic() - start,
        "busy": time.process_time() - cpu_start,
        "peak_mib": peak_mib() - before,
    }
    print(json.dumps(facts))


def peak_mib() -> float:
    """Largest resident memory of this process so far, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def drop_pages(folder: Path) -> None:
    """Drop a folder's pages from the page cache; the folder may be missing."""
    for path in folder.glob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    """Make the checkpoint, measure every phase ``--repeat`` times, print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("examples/model_configs/qwen3-30b-a3b"))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, required=True, help="new folder on the disk to measure; removed"
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        run_phase(arguments.phase, arguments.folder)
        return
    arguments.folder.mkdir(parents=True)
    try:
        measure(arguments)
    finally:
        shutil.rmtree(arguments.folder)


def measure(arguments: argparse.Namespace) -> None:
    """Print one line for each phase: seconds, MB/s, ratio to the copy, MiB."""
    root = arguments.folder
    make(arguments.model, arguments.layers, root / "hf")
    size = sum(path.stat().st_size for path in (root / "hf").iterdir())
    print(f"{arguments.model.name}, {arguments.layers} layer(s): {size / 1e9:.2f} GB")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in PHASES}
    for _ in range(arguments.repeat):
        for name in PHASES:
            if name == COPY:
                continue
            copied = measure_phase(COPY, root)
            facts = measure_phase(name, root)
            results[COPY].append(copied | {"ratio": 1.0})
            results[name].append(facts | {"ratio": facts["seconds"] / copied["seconds"]})
        shutil.rmtree(root / CONVERTED)
    for name, runs in results.items():
        seconds = _median(runs, "seconds")
        cpu_s = _median(runs, "busy")
        peak = _median(runs, "peak_mib")
        ratios = sorted(run["ratio"] for run in runs)
        print(
            f"{name:15} {seconds:6.2f} s {size / seconds / 1e6:6.0f} MB/s   {_median(runs, 'ratio'):5.2f} x copy "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})  {cpu_s:5.2f} s of processor  {peak:3.0f} MiB over the start"
        )
    print("load average (1, 5, 15 minutes):", *(f"{load:.1f}" for load in os.getloadavg()))


def measure_phase(name: str, root: Path) -> dict[str, float]:
    """Run a phase in its own process; remove its output unless later phases read it."""
    target = PHASES[name][1]
    for folder in (root / "hf", root / CONVERTED):
        drop_pages(folder)
    command = [sys.executable, __file__, *sys.argv[1:], "--phase", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if target not in ("", CONVERTED):
        shutil.rmtree(root / target)
    return json.loads(output)


def _median(runs: list[dict[str, float]], key: str) -> float:
    return sorted(run[key] for run in runs)[len(runs) // 2]


if __name__ == "__main__":
    main()
